"""Scored conversations: episodes of an agent that kept texts alone."""

import json

import pytest

from perturn.data.store import read_trajectories
from perturn.formats.logs.read_logs import format_of
from perturn.run.log_import.import_logs import LogSettings, import_logs
from perturn.types import Status


@pytest.fixture
def bring(tmp_path):
    """Import records that are written to a file; (account, trajectories)."""

    def bring(records):
        file = tmp_path / "log.jsonl"
        file.write_text("".join(json.dumps(each) + "\n" for each in records))
        account = import_logs([file], tmp_path / "out.jsonl", LogSettings())
        return account, list(read_trajectories(tmp_path / "out.jsonl"))

    return bring


def conversation(*said, **more):
    """A record with alternating messages of user and assistant."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
    return {"messages": messages, **more}


def test_scored_conversations_are_episodes(bring, tmp_path):
    """`reward` counts before `score`; without `task`, the first user message is the task."""
    first = conversation("hi", "yes", "more", "done", task="a", reward=1.0, score=0.0, model="mine")
    second = conversation("hi", "no", score=0, truncated=True)
    second["messages"][1]["weight"] = 0
    third = conversation("hi", "no", reward=0.25, error="no box")

    account, found = bring([first, second, conversation("hi", "no"), third])

    assert format_of(tmp_path / "log.jsonl") == "conversations"
    assert [(one.task.id, one.sample, one.total_reward, one.success) for one in found] == [
        ("a", 0, 1.0, True),
        ("hi", 0, 0.0, False),
        ("hi", 1, 0.25, False),
    ]
    assert [turn.action.text for turn in found[0].turns] == ["yes", "done"]
    assert (found[0].policy, found[0].turns[1].reward) == ("mine", 1.0)
    assert (found[1].turns[0].trained, found[1].truncated, found[1].turns[0].action.ended) == (
        False,
        True,
        True,
    )
    assert (found[2].status, found[2].error) == (Status.FAILED, "no box")
    assert account.calls == {"rollouts": 3, "unscored": 1}


def test_conversations_are_recognised_by_their_first_line_without_a_reward(bring):
    """A null reward is a conversation's; a user's message may be a list of parts, or text alone."""
    parts = conversation([{"type": "text", "text": "hi"}], "yes", reward=1)
    bare = {"messages": ["hi", {"role": "assistant", "content": "no"}], "reward": 0, "output": "x"}

    account, found = bring([conversation("hi", "yes", reward=None), parts, bare])

    assert account.calls == {"rollouts": 2, "unscored": 1}
    assert [(one.task.id, one.sample, one.total_reward) for one in found] == [("hi", 0, 1.0), ("hi", 1, 0.0)]


def test_rewards_of_single_messages_are_rewards_of_turns(bring, tmp_path):
    """On the messages or in a list; without a reward of the whole, their sum is it."""
    first = conversation("hi", "yes", "more", "done", task="a")
    first["messages"][1]["reward"], first["messages"][3]["reward"] = 0.25, 0.5
    second = conversation("hi", "no", "more", "done", task="b", rewards=[0, 1], reward=1)
    third = conversation("hi", "no", "more", "done", task="c", rewards=[1, 1], reward=1)

    account, found = bring([first, second, third])

    assert format_of(tmp_path / "log.jsonl") == "conversations"
    assert [[turn.reward for turn in one.turns] for one in found] == [[0.25, 0.5], [0.0, 1.0], [0.0, 1.0]]
    assert [one.total_reward for one in found] == [0.75, 1.0, 1.0]
    assert account.replaced_rewards == 1


def test_a_request_with_its_response_is_no_conversation(tmp_path):
    """LiteLLM logs the messages, the response and its score side by side."""
    answer = {"choices": [{"message": {"role": "assistant", "content": "b"}}]}
    (tmp_path / "log.jsonl").write_text(json.dumps(conversation("a", score=1) | {"response": answer}))

    assert format_of(tmp_path / "log.jsonl") == "requests"


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (conversation("hi", reward=1), "expected an assistant message after the prompt, got none"),
        ({"messages": ["hi"], "reward": 1}, "expected an assistant message after the prompt, got none"),
        ({"messages": [{"role": "judge", "content": "hi"}], "reward": 1}, "judge"),
        (
            conversation("hi", "no", rewards=[0, 1]),
            "expected 1 entries, one for each assistant message, got 2",
        ),
        (conversation("hi", "no", rewards=["so so"]), "expected a number, got 'so so'"),
        (conversation("hi", "no", rewards=[10**400]), "reward of assistant message 0: expected a number"),
        (conversation("hi", "no", rewards=[]), "expected 1 entries, one for each assistant message, got 0"),
        (
            {"messages": [{"role": "assistant", "content": "a", "reward": "much"}]},
            "expected a number, got 'much'",
        ),
    ],
)
def test_conversations_that_cannot_be_read_are_counted(record, said, bring):
    account, found = bring([conversation("hi", "yes", reward=1), record])

    assert len(found) == 1
    assert account.calls == {"rollouts": 1, "unsupported": 1}
    assert said in str(account.faults)


def test_a_reward_of_the_whole_that_cannot_be_read_erases_no_rewards_of_turns(bring):
    """The sum is the reward then; an object under `rewards` is something else."""
    first = conversation("hi", "yes", "more", "done", reward="4/5", rewards=[0.25, 0.5])
    second = conversation("ho", "yes", reward=1, rewards={"form": 1})

    account, found = bring([first, second])

    assert [[turn.reward for turn in one.turns] for one in found] == [[0.25, 0.5], [1.0]]
    assert [one.total_reward for one in found] == [0.75, 1.0]
    assert account.replaced_rewards == 0


def test_a_system_text_and_an_error_that_is_an_object_are_read(bring):
    record = conversation("hi", "yes", reward=1, system="Be brief.", error={"type": "Timeout"})

    _, (found,) = bring([record])

    assert found.prompt == ({"role": "system", "content": "Be brief."},)
    assert (found.status, found.error) == (Status.FAILED, "{'type': 'Timeout'}")
