"""Rollouts of other trainers: files that their own released code wrote, and files that are not as they should be.

`rollouts/write_samples.py` wrote the samples. They hold the same two rollouts of one task, but for TRL's, which are of
a real run.
"""

import json
from pathlib import Path

import pytest

from perturn.cli.log_commands import _decoder
from perturn.data.store import read_trajectories
from perturn.errors import DataError
from perturn.formats.logs.log_entries import Fields
from perturn.formats.logs.read_logs import format_of
from perturn.formats.rollouts.chat_markup import conversation_of, response_of
from perturn.group import groups_of
from perturn.run.log_import.import_logs import LogSettings, import_logs
from perturn.types import Status

SAMPLES = Path(__file__).parent / "rollouts"
FORMATS = {
    "results.jsonl": "verifiers",
    "traces.jsonl": "verifiers",
    "verl_agent_loop.jsonl": "verl",
    "skyrl_evaluation.jsonl": "skyrl",
    "skyrl_generated.json": "skyrl",
    "art_groups.parquet": "art",
    "art_trajectories.jsonl": "art",
    "agent_lightning_events.jsonl": "agent-lightning",
    "agent_lightning_spans.jsonl": "agent-lightning",
}
WITH_LOGPROBS = {
    *("results.jsonl", "traces.jsonl", "verl_agent_loop.jsonl"),
    *("skyrl_generated.json", "art_trajectories.jsonl", "agent_lightning_events.jsonl"),
}


@pytest.fixture
def bring(tmp_path, tiny_folder):
    """Import a file, or records written to one; (account, trajectories)."""

    def bring(log, score=None, model=True, name="log.jsonl", task=None, **settings):
        if not isinstance(log, Path):
            file = tmp_path / name
            file.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in log))
            log = file
        fields = Fields(score=score, task=task, decode=_decoder(str(tiny_folder)) if model else None)
        account = import_logs([log], tmp_path / "out.jsonl", LogSettings(fields=fields, **settings))
        return account, list(read_trajectories(tmp_path / "out.jsonl"))

    return bring


@pytest.mark.parametrize("name", FORMATS)
def test_every_library_gives_the_two_rollouts_of_a_task(name, bring):
    assert format_of(SAMPLES / name) == FORMATS[name]

    account, found = bring(SAMPLES / name)
    good, bad, *failed = found

    assert account.entries == sum(account.calls.values())
    assert {one.task.id for one in found} == {good.task.id}
    assert [one.sample for one in found] == list(range(len(found)))
    assert (good.total_reward, good.success, bad.total_reward, bad.success) == (1.0, True, 0.0, False)
    for one, last in ((good, "take lamp"), (bad, "wait")):
        assert [turn.action.text for turn in one.turns] == ["go to hall", last]
        assert one.is_one_sequence
        assert one.prompt[0] == {"role": "system", "content": "You find things in a house."}
        seen = [turn.observation_text for turn in one.turns]
        assert seen == ["Find the lamp in the hall.", "You are in the hall."]
    assert all(one.status is Status.FAILED for one in failed)


@pytest.mark.parametrize("name", sorted(WITH_LOGPROBS))
def test_tokens_and_log_probabilities_are_kept(name, bring):
    _, (good, *_) = bring(SAMPLES / name)

    tokens = json.loads((SAMPLES / "tokens.json").read_text())["good"]
    sampled = [each for each, kept in zip(tokens["response"], tokens["mask"], strict=True) if kept]
    assert [each for turn in good.turns for each in turn.action.token_ids] == sampled
    assert [each for turn in good.turns for each in turn.action.logprobs] == [-0.25] * len(sampled)


def test_rewards_of_tokens_are_of_the_turn_that_they_lie_in(bring):
    _, (good, bad) = bring(SAMPLES / "skyrl_generated.json")

    assert [turn.reward for turn in good.turns] == [0.25, 0.75]
    assert [turn.reward for turn in bad.turns] == [0.25, -0.25]
    assert (good.truncated, bad.truncated, bad.turns[-1].action.ended) == (False, True, False)


@pytest.mark.parametrize("is_cut", [True, False])
def test_an_answer_of_verifiers_is_cut_if_its_call_says_so(is_cut, bring):
    """An episode is truncated at a limit of turns too."""
    record = json.loads((SAMPLES / "results.jsonl").read_text().splitlines()[0]) | {"is_truncated": True}
    record["trajectory"][-1]["is_truncated"] = is_cut

    _, (found,) = bring([record])

    assert (found.truncated, found.turns[-1].action.ended) == (True, not is_cut)


def test_copies_of_the_reward_at_each_call_are_not_summed(bring):
    """The files of verifiers give each call of a rollout the reward of the whole."""
    account, (good, *_) = bring(SAMPLES / "results.jsonl")

    assert [turn.reward for turn in good.turns] == [0.0, 1.0]
    assert account.replaced_rewards == 1


def test_rollouts_that_failed_stay_in_their_group(bring):
    account, found = bring(SAMPLES / "traces.jsonl")
    assert found[-1].error == "SandboxError: the box went away"
    assert account.episodes["failure"] == 2
    assert {one.policy for one in found} == {"smollm2-135m"}


@pytest.mark.parametrize("task", [None, "metadata.scenario"])
def test_exceptions_of_art_stay_in_their_group(task, bring):
    """The group has the task and the policy of its trajectories, also if `--task` names the task."""
    answer = {"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": "go"}}
    one = {
        "messages_and_choices": [{"role": "user", "content": "x"}, answer],
        "reward": 1.0,
        "final_policy_version": 3,
    }
    groups = [
        {
            "trajectories": [one | {"metadata": {"scenario": name}}],
            "exceptions": [{"type": "Timeout", "message": "t"}],
        }
        for name in "ab"
    ]

    _, found = bring(groups, task=task)

    assert [(len(group), group.policy) for group in groups_of(found)] == [(2, "step 3")] * 2
    mixed = groups[0]["trajectories"] + [one | {"metadata": {"scenario": "a"}, "final_policy_version": 4}]
    _, found = bring([groups[0] | {"trajectories": mixed}], task=task)
    assert len({each.task.id for each in found}) == 1


def test_each_choice_of_agent_lightning_is_a_turn(bring):
    """The first choice gets a reward that follows, as in other logs."""
    choices = [{"message": {"role": "assistant", "content": text}} for text in "xy"]
    request = {"messages": [{"role": "user", "content": "q"}]}
    event = {"rollout_id": "r", "attempt_id": "a", "timestamp": 1}
    events = [
        event
        | {"event_type": "model_request", "data": {"request": request, "response": {"choices": choices}}},
        event | {"event_type": "reward", "data": {"value": 0.5}},
    ]

    account, (one,) = bring(events)

    assert account.calls == {"turns": 2}
    assert [(turn.action.text, turn.reward) for turn in one.turns] == [("x", 0.5), ("y", 0.0)]


def test_rollouts_that_failed_have_no_label(tmp_path):
    account = import_logs([SAMPLES / "traces.jsonl"], tmp_path / "out.jsonl", LogSettings(form="labelled"))

    assert account.calls == {"rollouts": 2, "failed": 1}
    assert account.episodes == {"success": 1, "failure": 1, "failed": 1}


def test_the_completions_of_a_run_of_trl_need_the_name_of_a_reward(bring):
    file = SAMPLES / "trl_completions.parquet"

    with pytest.raises(DataError, match=r"the log has the scores even, length. Name one with --score"):
        bring(file)
    account, found = bring(file, score="length")

    assert account.format == "trl"
    assert [len(one.turns[0].action.text) for one in found] == [one.total_reward for one in found]
    assert sorted(one.sample for one in found) == [0, 0, 1, 1]


def test_texts_of_verl_are_one_turn_each(bring):
    _, found = bring(SAMPLES / "verl_rollouts.jsonl", model=False)

    assert [len(one.turns) for one in found] == [1, 1]
    assert {one.policy for one in found} == {"step 7"}
    assert found[0].task.data == {"answer": "lamp"}


def loop(**changed):
    """An output of an agent loop of verl."""
    held = json.loads((SAMPLES / "verl_agent_loop.jsonl").read_text().splitlines()[0])
    return held | changed


def traces(*nodes, **changed):
    """An episode of verifiers."""
    trace = {
        "nodes": list(nodes),
        "rewards": {"found": {"score": 1.0}},
        "ok": True,
        "agent": {"name": "solver"},
    }
    return {"task": {"data": {}, "key": "t"}, "traces": [trace | changed]}


def node(role, text, parent=None, **more):
    return {
        "message": {"role": role, "content": text},
        "parent": parent,
        "sampled": role == "assistant",
    } | more


BROKEN = {
    "mask": (
        "verl",
        loop(response_mask=[1, 0]),
        r"response_mask: expected \d+ entries, one for each token, got 2",
    ),
    "logprobs": ("verl", loop(response_logprobs=[-1.0]), r"response_logprobs: expected \d+ entries"),
    "text": ("verl", loop(response_ids="text"), "response_ids: expected a list of whole numbers"),
    "bool": ("verl", loop(response_ids=[True]), "response_ids: expected a list of whole numbers"),
    "unsampled": (
        "verl",
        loop(response_mask=[0] * len(loop()["response_ids"])),
        "expected sampled tokens, got none",
    ),
    "id": (
        "verl",
        loop(response_ids=[1 << 70], response_mask=[1], response_logprobs=[-1.0]),
        "cannot decode",
    ),
    "parent": (
        "verifiers",
        traces(node("user", "x"), node("assistant", "y", 5)),
        r"nodes\[1\].parent: expected",
    ),
    "cycle": ("verifiers", traces(node("user", "x", 0)), r"nodes\[0\].parent: expected the index"),
    "no node": ("verifiers", traces(), "expected a node with sampled=true, got none of 0 nodes"),
    "node": (
        "verifiers",
        traces(node("user", "x"), node("assistant", "y", 0, token_ids=[1, 2], mask=[True])),
        r"nodes\[1\].mask: expected 2 entries, one for each token, got 1",
    ),
    "image": (
        "verifiers",
        {
            "example_id": 1,
            "prompt": [{"role": "user", "content": [{"type": "image_url"}]}],
            "completion": "a",
        },
        "image",
    ),
    "no answer": (
        "verifiers",
        {"example_id": 1, "prompt": "a", "completion": [], "reward": 1.0},
        "expected an assistant message",
    ),
    "columns": (
        "skyrl",
        {"prompt_token_ids": [[1], [2]], "response_ids": [[1], [2]], "loss_masks": [[1]], "rewards": [0, 1]},
        r"loss_masks: expected 2 entries, one for each of response_ids, got 1",
    ),
    "rewards": (
        "skyrl",
        {"prompt_token_ids": [[1]], "response_ids": [[1]], "loss_masks": [[1]], "rewards": [[0.0, 1.0]]},
        r"rewards: expected 1 entries, one for each token, got 2",
    ),
    "messages": (
        "art",
        {"messages_and_choices": [{"role": "assistant", "content": "x"}], "reward": 1.0},
        "expected a choice, which the policy sampled, got messages alone",
    ),
    "reward": (
        "agent-lightning",
        {"rollout_id": "a", "attempt_id": "0", "event_type": "reward", "data": {"value": "much"}},
        "reward: expected a finite number, got 'much'",
    ),
}


@pytest.mark.parametrize(("name", "record", "said"), BROKEN.values(), ids=list(BROKEN))
def test_a_record_that_cannot_be_read_is_counted_with_its_line(name, record, said, bring):
    with pytest.raises(DataError, match=rf"Its entries: 1 unsupported. unsupported: .*log.jsonl:1.*{said}"):
        bring([record], format=name)


def test_bad_lines_beside_good_ones_are_counted(bring):
    """A reward that is no number is none."""
    row = {"example_id": 1, "prompt": "a", "completion": "b", "reward": 1.0}
    torn = json.dumps(row)[:-5]

    account, found = bring([row, row | {"reward": float("nan")}, row | {"reward": None}, torn])

    assert len(found) == 1
    assert account.calls == {"rollouts": 1, "broken": 1, "unscored": 2}
    assert account.entries == 4


def test_token_ids_without_a_tokenizer_ask_for_the_model(bring):
    with pytest.raises(DataError, match="the record holds token ids without texts"):
        bring(SAMPLES / "verl_agent_loop.jsonl", model=False)


def test_step_wise_rows_of_skyrl_are_one_rollout(bring):
    """Each row is a turn, whose prompt holds the turns before it."""
    whole = json.loads((SAMPLES / "skyrl_generated.json").read_text())
    prompt, response, mask = (whole[key][0] for key in ("prompt_token_ids", "response_ids", "loss_masks"))
    first, second = mask.index(0), len(mask) - mask[::-1].index(0)
    answers = [response[:first], response[second:]]
    rows = {
        "prompt_token_ids": [prompt, [*prompt, *response[:second]]],
        "response_ids": answers,
        "loss_masks": [[1] * len(each) for each in answers],
        "rewards": [0.0, 1.0],
        "is_last_step": [False, True],
        "trajectory_ids": ["find_lamp_0", "find_lamp_0"],
        "rollout_logprobs": None,
        "stop_reasons": ["stop", "stop"],
    }

    _, (one,) = bring([rows])

    assert one.task.id == "find_lamp"
    assert [turn.action.text for turn in one.turns] == ["go to hall", "take lamp"]
    assert one.is_one_sequence
    assert one.total_reward == 1.0


def test_an_answer_that_another_wrote_carries_no_loss(bring):
    """ART marks what the policy sampled; a corrected answer between choices is context."""
    choice = {"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": "go"}}
    said = [{"role": "user", "content": "x"}, choice, {"role": "user", "content": "y"}]
    said += [{"role": "assistant", "content": "by hand"}, {"role": "user", "content": "z"}, choice]

    _, (one,) = bring([{"messages_and_choices": said, "reward": 0.5}])

    assert [turn.trained for turn in one.turns] == [True, False, True]
    assert one.is_one_sequence


def test_branches_of_a_trace_are_sequences_of_one_episode(bring):
    """A sub-agent's conversation hangs on another root."""
    nodes = [node("user", "x"), node("assistant", "a", 0), node("user", "sub"), node("assistant", "b", 2)]
    nodes += [node("user", "go on", 1), node("assistant", "c", 4)]

    _, (one,) = bring([traces(*nodes)])

    assert [turn.action.text for turn in one.turns] == ["a", "b", "c"]
    assert [one.parent(index) for index in range(3)] == [-1, -1, 0]


MARKUPS = {
    "chatml": ("<|im_start|>{role}\n{text}<|im_end|>\n", "<|im_start|>assistant\n"),
    "llama": (
        "<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "phi": ("<|{role}|>\n{text}<|end|>\n", "<|assistant|>\n"),
}


@pytest.mark.parametrize(("form", "opening"), MARKUPS.values(), ids=list(MARKUPS))
def test_markup_of_known_templates_is_read_back(form, opening):
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a <b> c\nd"}]
    text = "".join(form.format(role=each["role"], text=each["content"]) for each in asked) + opening
    said = "yes" + form.format(role="user", text="more").join([form.partition("{text}")[2], opening]) + "no"

    assert conversation_of(text) == asked
    assert [(each["role"], each["content"].strip()) for each in response_of(said)] == [
        ("assistant", "yes"),
        ("user", "more"),
        ("assistant", "no"),
    ]


def test_text_without_markup_is_one_message():
    assert conversation_of("<s>Find it.</s>") == [{"role": "user", "content": "Find it."}]
    assert conversation_of("\n") == []
    assert response_of("done</s>") == [{"role": "assistant", "content": "done"}]
