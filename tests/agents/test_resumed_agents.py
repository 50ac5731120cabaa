"""Episodes of agents that begin at a turn of a recorded episode: branches, windows, and what is measured by them."""

import time
from dataclasses import replace
from itertools import count

import pytest

from perturn.envs.load_environment import make_environment
from perturn.envs.named_protocols import PROTOCOLS
from perturn.episodes.episode import Job
from perturn.episodes.play_many import play
from perturn.errors import ContextFull, RunError
from perturn.measure.worlds import check_world
from perturn.types import Action, Sampling, Status, came_back, came_elsewhere

from .playing import HERE, Scripted, agents

FILE = HERE / "resumed_functions.py"


class Counting(Scripted):
    """A policy that says another word at each turn."""

    def __init__(self, first="a"):
        numbers = count()
        super().__init__(lambda prompt: Action(f"{first}{next(numbers)}", (1, 2), (-0.5, -0.25)))


def section(folder, function="rollout", **task):
    row = {"id": "t", "secret": "b1", **task}
    return agents(folder, [row], function=f"{FILE}:{function}")


def run(section, job, policy, protocol=PROTOCOLS["agent"]):
    """One episode."""
    (found,) = play(
        [job],
        policy,
        lambda: make_environment(section),
        protocol=protocol,
        sampling=Sampling(),
        concurrency=1,
    )
    return found


@pytest.fixture
def recorded(tmp_path):
    """An episode of four turns in two kinds of conversations, and the section that played it."""
    part = section(tmp_path)
    (task,) = make_environment(part).tasks("train")
    episode = run(part, Job(task, 7, 3), Counting())
    assert [turn.action.text for turn in episode.turns] == ["a0", "a1", "a2", "a3"]
    assert not episode.is_one_sequence
    return part, episode


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_a_branch_keeps_the_recorded_turns_and_asks_the_policy_for_the_others(recorded, kept):
    """The program gets the recorded seed, so its requests are the same."""
    part, begun = recorded
    policy = Counting("b")

    branch = run(part, Job(begun.task, 99, 5, begun, kept), policy)

    assert branch.turns[:kept] == begun.turns[:kept]
    own = [turn.action.text for turn in branch.turns[kept:]]
    assert own == (
        [f"b{number}" for number in range(4 - kept)] if kept > 2 else ["b0", "b1"]
    )  # b1 is the secret
    assert len(policy.prompts) == len(own)
    assert (branch.taken_over, branch.origin, branch.seed, branch.sample) == (kept, 3, begun.seed, 5)
    assert (branch.success, branch.status) == (kept <= 2, Status.COMPLETED)
    assert came_back(branch)
    assert branch.total_reward == float(kept <= 2)


def test_branches_are_sampled_with_their_own_seeds(recorded):
    part, begun = recorded
    first, second = (Counting("b") for _ in range(2))
    run(part, Job(begun.task, 1, 1, begun, 1), first)
    run(part, Job(begun.task, 2, 2, begun, 1), second)

    assert first.prompts[0].turns == second.prompts[0].turns
    assert first.prompts[0].seed != second.prompts[0].seed


def test_a_branch_after_an_action_may_see_another_request(recorded):
    """The check of the next request is skipped; the earlier ones are checked."""
    part, begun = recorded
    other = replace(begun.turns[2], observation=({"role": "user", "content": "Other."},))
    changed = replace(begun, turns=(*begun.turns[:2], other, begun.turns[3]))

    assert came_back(run(part, Job(begun.task, 9, 4, changed, 2, anew=True), Counting("b")))
    elsewhere = run(part, Job(begun.task, 9, 4, changed, 2), Counting("b"))
    assert came_elsewhere(elsewhere)
    assert "did not come back to turn 2, since its request differs: expected ..." in elsewhere.error
    assert "Other." in elsewhere.error


def test_a_full_context_ends_a_branch_after_an_action(recorded):
    """It has no turn of its own, but its last kept action was answered anew."""
    part, begun = recorded
    full = Scripted(lambda prompt: ContextFull("full"))

    found = run(part, Job(begun.task, 9, 4, begun, 2, anew=True), full)
    assert (found.status, found.error, len(found.turns)) == (Status.COMPLETED, "ContextFull: full", 2)
    assert run(part, Job(begun.task, 9, 4, begun, 2), full).status is Status.FAILED


def test_an_agent_with_a_clock_does_not_come_back(tmp_path):
    part = section(tmp_path, "forgetful")
    (task,) = make_environment(part).tasks("train")
    begun = run(part, Job(task, 7, 0), Counting())

    branch = run(part, Job(task, 9, 1, begun, 1), Counting("b"))

    assert (came_elsewhere(branch), branch.status, branch.turns) == (True, Status.FAILED, ())
    assert branch.error.startswith("NotComeBack: the agent did not come back to turn 0")


def test_an_agent_that_ends_before_the_turn_does_not_come_back(tmp_path):
    part = section(tmp_path, "hasty")
    (task,) = make_environment(part).tasks("train")
    begun = run(part, Job(task, 7, 0), Counting())
    stopped = replace(begun, turns=(replace(begun.turns[0], action=Action("stop")), *begun.turns[1:]))

    branch = run(part, Job(task, 9, 1, stopped, 1), Counting("b"))

    assert came_elsewhere(branch)
    assert branch.error == "NotComeBack: the agent ended at turn 1, before it had come back to turn 1."


def test_a_window_pauses_an_episode_and_the_next_one_goes_on(recorded):
    """Four turns in windows of two: the second window ends with the episode."""
    part, whole = recorded
    first = run(part, Job(whole.task, 7, 3, window=2), Counting())
    assert (first.status, len(first.turns), first.success) == (Status.UNFINISHED, 2, False)

    second = run(part, Job(whole.task, 8, 3, first, window=2), Counting("b"))

    assert [turn.action.text for turn in second.turns] == ["a0", "a1", "b0", "b1"]
    assert (second.status, second.success, second.taken_over) == (Status.COMPLETED, True, 2)


def test_the_limit_of_turns_counts_the_kept_ones(recorded):
    part, begun = recorded
    protocol = replace(PROTOCOLS["agent"], max_turns=3)

    branch = run(part, Job(begun.task, 9, 1, begun, 2), Scripted(lambda prompt: Action("no")), protocol)

    assert (len(branch.turns), branch.truncated) == (3, True)


def test_an_agents_world_is_classified_by_its_replays(recorded, tmp_path):
    """The seed of the episode is told to the program, so another seed poses another hint."""
    part, begun = recorded
    world = make_environment(part)
    found = check_world(world, [begun], PROTOCOLS["agent"])
    assert (found.kind, found.came_back) == ("seeded", 1)

    (tmp_path / "other").mkdir()
    clock = section(tmp_path / "other", "forgetful")
    world = make_environment(clock)
    begun = run(clock, Job(world.tasks("train")[0], 7, 0), Counting())
    with pytest.raises(RunError, match="none of 1 episodes went as it was recorded"):
        check_world(world, [begun], PROTOCOLS["agent"])


def test_a_window_that_ends_at_the_limit_of_turns_ends_the_episode(recorded):
    """The limit counts, and not the window: the program then gives its reward."""
    part, whole = recorded
    protocol = replace(PROTOCOLS["agent"], max_turns=4)
    first = run(part, Job(whole.task, 7, 3, window=2), Counting(), protocol)

    second = run(
        part, Job(whole.task, 8, 3, first, window=2), Scripted(lambda prompt: Action("no")), protocol
    )

    assert (second.status, len(second.turns), second.truncated) == (Status.COMPLETED, 4, False)
    protocol = replace(PROTOCOLS["agent"], max_turns=3)
    cut = run(part, Job(whole.task, 8, 3, first, window=1), Scripted(lambda prompt: Action("no")), protocol)
    assert (cut.status, len(cut.turns), cut.truncated) == (Status.COMPLETED, 3, True)


@pytest.mark.parametrize("number", range(3))
def test_parallel_requests_come_back_in_any_order(tmp_path, number):
    """Requests are matched with the recorded ones; a seed that the program sends changes nothing."""
    part = section(tmp_path, "parallel")
    (task,) = make_environment(part).tasks("train")
    begun = run(part, Job(task, 7, 0), Counting())
    policies = [Counting("b"), Counting("b")]

    branches = [run(part, Job(task, 10 + at, 1, begun, 3), policy) for at, policy in enumerate(policies)]

    for branch in branches:
        assert came_back(branch)
        assert branch.turns[:3] == begun.turns[:3]
        assert [turn.action.text for turn in branch.turns[3:]] == ["b0"]
    assert policies[0].prompts[0].seed != policies[1].prompts[0].seed


def test_a_branch_may_begin_within_parallel_requests(tmp_path):
    """Its new turn is the recorded request, also if another one arrives first; the other one gets the next turn."""
    part = section(tmp_path, "reordered", runs=str(tmp_path / "runs"))
    (task,) = make_environment(part).tasks("train")
    begun = run(part, Job(task, 7, 0), Counting())

    branch = run(part, Job(task, 9, 1, begun, 0), Counting("b"))

    assert came_back(branch)
    assert [turn.observation for turn in branch.turns] == [turn.observation for turn in begun.turns]
    assert [turn.action.text for turn in branch.turns] == ["b0", "b1"]


@pytest.mark.parametrize("kept", [2, 3])
def test_equal_parallel_requests_come_back(tmp_path, kept):
    """Each is a request of its own, whose answer is recorded before the next one is given."""
    part = section(tmp_path, "alike")
    (task,) = make_environment(part).tasks("train")
    begun = run(part, Job(task, 7, 0), Counting())

    branch = run(part, Job(task, 9, 1, begun, kept), Counting("b"))

    assert came_back(branch)
    assert branch.turns[:kept] == begun.turns[:kept]
    assert len(branch.turns) == 4


def test_a_request_that_the_client_gave_up_is_no_turn(tmp_path):
    """It counts for no limit, and the program comes back, although its first request is answered at once then."""
    part = section(tmp_path, "impatient")
    (task,) = make_environment(part).tasks("train")
    slow = iter([1.0])
    policy = Scripted(lambda prompt: time.sleep(next(slow, 0)) or Action(f"a{len(prompt.turns)}"))

    begun = run(part, Job(task, 7, 0), policy, replace(PROTOCOLS["agent"], max_turns=2))

    assert [turn.action.text for turn in begun.turns] == ["a0", "a1"]
    assert (begun.status, begun.truncated, len(policy.prompts)) == (Status.COMPLETED, False, 3)
    assert policy.prompts[0].seed == policy.prompts[1].seed


def test_a_program_that_waits_for_a_later_turn_did_not_come_back(tmp_path, monkeypatch):
    """It would wait until `environment.seconds`, and the error would ask for more of them."""
    monkeypatch.setattr("perturn.envs.agent.agent_episode._EARLY_S", 0.5)
    part = section(tmp_path, "swapped", runs=str(tmp_path / "runs"))
    (task,) = make_environment(part).tasks("train")
    begun = run(part, Job(task, 7, 0), Counting())

    branch = run(part, Job(task, 9, 1, begun, 1), Counting("b"))

    assert came_elsewhere(branch)
    assert "did not come back to turn 0: it sent the request of a later turn" in branch.error


def test_a_clock_in_the_system_prompt_is_found_before_continuations(tmp_path):
    part = section(tmp_path, "dated")
    world = make_environment(part)
    begun = run(part, Job(world.tasks("train")[0], 7, 0), Counting())

    with pytest.raises(RunError, match="the request of turn 0 differs when the agent runs again"):
        check_world(world, [begun], PROTOCOLS["agent"])


def test_a_crash_while_coming_back_says_its_cause(tmp_path):
    part = section(tmp_path, "crashing")
    (task,) = make_environment(part).tasks("train")
    begun = run(part, Job(task, 7, 0), Counting())
    stopped = replace(begun, turns=(replace(begun.turns[0], action=Action("stop")), begun.turns[1]))

    branch = run(part, Job(task, 9, 1, stopped, 1), Counting("b"))

    assert branch.status is Status.FAILED
    assert "cannot stop" in branch.error
    assert not came_elsewhere(branch)


@pytest.mark.parametrize("kept", [2, 3])
def test_several_answers_to_one_request_come_back(tmp_path, kept):
    """They are recorded together, after the last one."""
    part = section(tmp_path, "choosing")
    (task,) = make_environment(part).tasks("train")
    begun = run(part, Job(task, 7, 0), Counting())
    assert len(begun.turns) == 4

    branch = run(part, Job(task, 9, 1, begun, kept), Counting("b"))

    assert came_back(branch)
    assert [turn.action.text for turn in branch.turns[:kept]] == ["a0", "a1", "a2"][:kept]
    assert len(branch.turns) == 4


def test_a_limit_within_several_answers_to_one_request_leaves_none_out(tmp_path):
    """Three answers are given, although the limit is two. The next request is rejected."""
    part = section(tmp_path, "choosing")
    (task,) = make_environment(part).tasks("train")

    one = run(part, Job(task, 7, 0), Counting(), replace(PROTOCOLS["agent"], max_turns=2))

    assert (one.status, one.truncated) == (Status.COMPLETED, True)
    assert [turn.action.text for turn in one.turns] == ["a0", "a1", "a2"]


def test_a_pause_within_several_answers_is_no_window(tmp_path):
    part = section(tmp_path, "choosing")
    (task,) = make_environment(part).tasks("train")

    episode = run(part, Job(task, 7, 0, window=2), Counting())

    assert episode.status is Status.FAILED
    assert "paused within a request for several answers" in episode.error


def test_a_reward_that_is_posted_after_the_pause_is_of_no_turn(tmp_path):
    """A program takes the rejected request for a failure; the rewards are those before the pause."""
    part = section(tmp_path, "punishing")
    (task,) = make_environment(part).tasks("train")
    whole = run(part, Job(task, 7, 0), Counting())
    assert [turn.reward for turn in whole.turns] == [0.5] * 4

    first = run(part, Job(task, 7, 0, window=2), Counting())
    second = run(part, Job(task, 7, 0, first, window=1), Counting())

    assert first.status is second.status is Status.UNFINISHED
    assert ([turn.reward for turn in first.turns], first.total_reward) == ([0.5, 0.5], 1.0)
    assert ([turn.reward for turn in second.turns], second.total_reward) == ([0.5, 0.5, 0.5], 1.5)
