"""One episode, played by hand."""

import pytest

from episodes.counting import PROTOCOL, Counter, finish, finish_from
from perturn.episodes.episode import Job, episode
from perturn.episodes.formats import FORMATS
from perturn.episodes.prompts import system_prompt
from perturn.types import Action, EpisodeProtocol, Observation, Status, Task


def test_an_episode_is_played_by_hand():
    """Prompts out, actions in: 'up' three times ends it with rewards 0.25, 0.5 and 0.75."""
    steps = episode(Counter(), Job(Task("t/1"), seed=5, sample=2), protocol=PROTOCOL, policy="hand")
    first = next(steps)
    second = steps.send(Action("Action: up"))
    third = steps.send(Action("Action: up"))
    record = finish_from(steps, "Action: up")

    assert first.messages == system_prompt(PROTOCOL)
    assert (first.turns, first.observation) == ((), ({"role": "user", "content": "count is 0"},))
    assert second.observation == ({"role": "user", "content": "count is 1"},)
    assert third.turns == record.turns[:2]
    assert [turn.reward for turn in record.turns] == [0.25, 0.5, 0.75]
    assert [turn.state_key for turn in record.turns] == ["0", "1", "2"]
    assert record.total_reward == 1.5
    assert (record.success, record.terminated, record.truncated) == (True, True, False)
    assert (record.environment, record.protocol) == ("counter-1.0", "plain-action")
    assert (record.policy, record.key, record.seed) == ("hand", ("t/1", 2), 5)
    assert (record.status, record.error) == (Status.COMPLETED, None)


def test_the_system_prompt_is_the_protocols_text_and_the_formats_instruction():
    """An empty system text leaves no blank line behind."""
    instruction = FORMATS["action"].instruction

    assert system_prompt(PROTOCOL)[0]["content"] == f"Play.\n\n{instruction}"
    assert system_prompt(EpisodeProtocol("p", format="action"))[0]["content"] == instruction


def test_an_answer_that_breaks_the_format_is_an_invalid_turn():
    """The world is not asked; the reminder is the next observation, and the state is what it was."""
    steps = episode(Counter(), Job(Task("t/1"), seed=0), protocol=PROTOCOL)
    next(steps)
    steps.send(Action("Action: up"))
    asked = steps.send(Action("up"))
    record = finish_from(steps, "Action: up", "Action: up")

    assert asked.observation == ({"role": "user", "content": FORMATS["action"].reminder},)
    assert [turn.valid for turn in record.turns] == [True, False, True, True]
    assert [turn.reward for turn in record.turns] == [0.25, 0.0, 0.5, 0.75]
    assert [turn.state_key for turn in record.turns] == ["0", "1", "1", "2"]
    assert record.turns[1].action.text == "up"
    assert record.success


def test_an_action_the_world_does_not_understand_is_an_invalid_turn():
    """Well written, but the environment said so."""
    record = finish(
        episode(Counter(), Job(Task("t/1"), seed=0), protocol=PROTOCOL),
        *["Action: dance", "Action: up", "Action: up", "Action: up"],
    )

    assert [turn.valid for turn in record.turns] == [False, True, True, True]


def test_the_turn_limit_truncates():
    """Four turns of 'wait' end by our limit, not by the world."""
    record = finish(episode(Counter(), Job(Task("t/1"), seed=0), protocol=PROTOCOL), *["Action: wait"] * 4)

    assert len(record.turns) == 4
    assert (record.success, record.terminated, record.truncated) == (False, False, True)
    assert record.status is Status.COMPLETED


def test_the_turn_limit_may_depend_on_the_kind_of_task():
    """One turn for this kind."""
    protocol = EpisodeProtocol("p", format="action", max_turns=4, max_turns_by_kind={"short": 1})
    record = finish(
        episode(Counter(), Job(Task("t/1", kind="short"), seed=0), protocol=protocol), "Action: up"
    )

    assert len(record.turns) == 1
    assert record.truncated


def test_a_world_that_raises_in_step_fails_its_episode_and_keeps_the_turns():
    """The turn that raised is not a turn; type and text of the error are kept."""
    record = finish(
        episode(Counter(), Job(Task("t/1"), seed=0), protocol=PROTOCOL), "Action: up", "Action: crash"
    )

    assert record.status is Status.FAILED
    assert record.error == "RuntimeError: the world fell over"
    assert len(record.turns) == 1
    assert record.total_reward == 0.25
    assert (record.terminated, record.truncated, record.success) == (False, False, False)


def test_an_answer_that_breaks_the_contract_of_a_world_fails_the_episode():
    """In this process too: no observation, and no number."""
    for answer, says in {
        "x": "step('up') returned 'x', not an Observation.",
        Observation("x", reward=float("nan")): "step('up') returned the reward nan, which is not finite.",
    }.items():
        world = Counter()
        world.step = lambda action, answer=answer: answer
        record = finish(episode(world, Job(Task("t/1"), seed=0), protocol=PROTOCOL), "Action: up")

        assert record.status is Status.FAILED
        assert record.error.startswith(f"EnvironmentFailure: {says}")


def test_a_world_that_ends_in_reset_fails_its_episode():
    """The flag of the last episode stands: 0 turns are no success."""
    world = Counter()
    world.reset = lambda task, seed: Observation("over", terminated=True, success=True)

    with pytest.raises(StopIteration) as end:
        next(episode(world, Job(Task("t/1"), seed=0), protocol=PROTOCOL))

    record = end.value.value
    assert (record.status, record.success) == (Status.FAILED, False)
    assert "Remedy: clear the flag of the last episode in reset()" in record.error
