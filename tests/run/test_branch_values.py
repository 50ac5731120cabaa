"""Branches: where they begin, how the world comes back to there, and what a turn is worth by them."""

import math
import random
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perturn.credit.returns import Return
from perturn.episodes.episode import Job, _check_back, episode
from perturn.episodes.play_many import play
from perturn.episodes.replay import play_script
from perturn.errors import EngineFailure, NotComeBack
from perturn.explore.branches import Branches
from perturn.quantities.branch_returns import branch_values
from perturn.types import Action, EpisodeProtocol, Observation, Sampling, Status, Task
from support.branches import branched, explored, jobs_of


def test_every_so_many_turns_are_played_on_from():
    """Of 11 turns with every 5: before turns 5 and 10; of 5 none, for it ended there."""
    jobs = jobs_of(Branches(every=5, branches=2, samples=4), [explored(5, 1), explored(11)])

    assert [(job.kept, job.begun.sample, job.sample) for job in jobs] == [
        (5, 0, 4),
        (5, 0, 8),
        (10, 0, 12),
        (10, 0, 16),
    ]
    assert {job.begun.seed for job in jobs} == {5}
    assert len({job.seed for job in jobs}) == 4


def test_failed_episodes_are_left_alone_and_successes_if_asked():
    episodes = [explored(3), explored(3, 1, success=True), explored(3, 2, status=Status.FAILED)]

    def origins(of):
        return [
            job.begun.sample for job in jobs_of(Branches(every=2, branches=1, of=of, samples=3), episodes)
        ]

    assert origins("all") == [0, 1]
    assert origins("failures") == [0]


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    every=st.integers(1, 4),
    samples=st.integers(1, 3),
)
def test_no_two_branches_have_one_number_or_one_seed(lengths, every, samples):
    """Nor that of an explored episode; whatever the order in which these were stored."""
    episodes = [explored(turns, sample) for sample, turns in enumerate(lengths)]

    explorer = Branches(every=every, branches=samples, samples=len(lengths))
    jobs = jobs_of(explorer, episodes, 1)

    assert len({job.sample for job in jobs}) == len({job.seed for job in jobs}) == len(jobs)
    assert not {job.sample for job in jobs} & set(range(len(lengths)))
    assert len(jobs) == sum(samples * ((turns - 1) // every) for turns in lengths if turns)
    assert jobs == jobs_of(explorer, episodes[::-1], 1)
    assert not {job.seed for job in jobs} & {job.seed for job in jobs_of(explorer, episodes, 1, 2)}


def test_hand_worked_values():
    """From turn 1 on: 0 + 1 and 0 - 0.5, so 0.25; what was earned before is not counted. From turn 2: 0.5."""
    branches = [
        branched(0, 2, [0.25, 0.0, 0.5], 4),
        branched(0, 1, [0.25, 0.0, 1.0], 2),
        branched(0, 1, [0.25, -0.5], 3),
    ]

    values = branch_values([explored(3), explored(2, 1)], branches, Return())

    assert values[0][1:] == [0.25, 0.5]
    assert all(map(math.isnan, [values[0][0], *values[1]]))


def test_a_failed_branch_counts_as_nothing_earned_but_one_that_never_began_does_not_count():
    """(1 + 0 + 0) / 3 with two that failed on turns of their own, and not / 5 with two that did not come back."""
    failed = {"status": Status.FAILED, "error": "Crash: lost"}
    branches = [
        branched(0, 1, [0.0, 1.0], 1),
        branched(0, 1, [0.0, 0.75], 2, **failed),
        branched(0, 1, [0.0], 3, **failed),
        branched(
            0, 1, [0.0], 4, status=Status.FAILED, error="NotComeBack: the world did not come back to turn 1"
        ),
        branched(0, 1, [], 5, **failed),
    ]

    assert branch_values([explored(2)], branches, Return())[0][1] == pytest.approx(1 / 3)
    assert math.isnan(branch_values([explored(2)], branches[3:], Return())[0][1])


class Coin:
    """Three actions; the task is solved if two of them or more are heads."""

    name = "coin-1.0"

    def tasks(self, split):
        """One."""
        return [Task("coin")]

    def reset(self, task, seed):
        """Nothing was tossed."""
        self.seen = []
        return Observation("Toss.")

    def step(self, action):
        """Take note."""
        self.seen.append(action)
        won = self.seen.count("heads") >= 2
        done = len(self.seen) == 3
        return Observation(f"seen {self.seen}", reward=float(done and won), terminated=done, success=won)

    def close(self):
        """Nothing to close."""


class Tosses:
    """Heads with a chance of 0.3, by the seed of the prompt."""

    name = "tosses"

    def generate(self, prompts, sampling):
        """Toss for each."""
        heads = [random.Random(prompt.seed).random() < 0.3 for prompt in prompts]
        return [Action("Action: heads" if one else "Action: tails") for one in heads]

    def forget(self, conversation):
        """Nothing was kept."""


PLAIN = EpisodeProtocol(name="plain", format="action", system="Play.", max_turns=3)


def test_values_come_to_the_exact_ones():
    """After heads 1 - 0.7^2, after tails 0.3^2, after one of each 0.3; within 4 standard errors of 1000 episodes."""
    script = [Action("Action: heads"), Action("Action: tails"), Action("Action: tails")]
    first = play_script(
        episode(Coin(), Job(Task("coin"), 3), protocol=PLAIN), script, EngineFailure("no more")
    )
    other = play_script(
        episode(Coin(), Job(Task("coin"), 4, 1), protocol=PLAIN),
        script[1:] + script[:1],
        EngineFailure("no more"),
    )
    jobs = jobs_of(Branches(every=1, branches=1000, samples=2), [first, other])

    found = list(play(jobs, Tosses(), Coin, protocol=PLAIN, sampling=Sampling(), concurrency=8))

    assert len(found) == 4000
    values = branch_values([first, other], found, Return())
    for value, exact in zip([*values[0][1:], *values[1][1:]], [0.51, 0.3, 0.09, 0.0], strict=True):
        assert abs(value - exact) <= 4 * math.sqrt(exact * (1 - exact) / 1000)


def heads():
    """An episode of three heads."""
    script = [Action("Action: heads")] * 3
    return play_script(
        episode(Coin(), Job(Task("coin"), 3), protocol=PLAIN), script, EngineFailure("no more")
    )


def played_on(begun, kept):
    """A branch of an episode from behind so many of its turns; None: all."""
    jobs = [Job(Task("coin"), 9, 1, begun, kept)]
    (found,) = play(jobs, Tosses(), Coin, protocol=PLAIN, sampling=Sampling(), concurrency=1)
    return found


def test_a_world_that_does_not_come_back_fails_its_branch():
    """It is told which turn, and both texts; the turns before it are kept."""
    whole = heads()
    other = replace(whole.turns[1], observation=({"role": "user", "content": "seen nothing"},))
    begun = replace(whole, turns=(whole.turns[0], other))

    found = played_on(begun, None)

    assert found.status is Status.FAILED
    assert "did not come back to turn 1: expected" in found.error
    assert (len(found.turns), found.origin, found.taken_over, found.seed) == (1, 0, 2, 3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"observation": ({"role": "user", "content": "other"},)}, "did not come back to turn 1: expected"),
        ({"reward": 0.5}, r"did not come back to turn 2: expected rewards \[0.0, 0.5\], got \[0.0, 0.0\]"),
    ],
)
def test_the_first_turn_of_its_own_and_the_rewards_before_it_are_compared(changes, said):
    """The answer to the last action that is given again says whether the world is back."""
    whole, kept = heads(), 1 if "observation" in changes else 2
    begun = replace(whole, turns=(whole.turns[0], replace(whole.turns[1], **changes), whole.turns[2]))

    found = played_on(begun, kept)

    assert found.status is Status.FAILED
    assert re.match(f"NotComeBack: the world {said}", found.error)
    assert len(found.turns) == kept


def test_where_the_world_is_elsewhere_is_shown_from_where_the_texts_part():
    """The first 300 characters are alike."""
    whole = heads()
    far = ({"role": "user", "content": "x" * 300 + "other"},)
    near = ({"role": "user", "content": "x" * 300 + whole.turns[1].observation[0]["content"]},)
    begun = replace(whole, turns=(whole.turns[0], replace(whole.turns[1], observation=far), whole.turns[2]))

    with pytest.raises(NotComeBack, match=r"expected \.\.\.x+other\".*, got \.\.\.x+[^o]"):
        _check_back(begun.turns, begun.turns[:1], near)


def test_a_world_that_ends_before_it_is_back_fails_its_branch():
    """It is no success."""
    whole = heads()
    begun = replace(whole, turns=(*whole.turns, whole.turns[2]))

    found = played_on(begun, 4)

    assert found.status is Status.FAILED
    assert "the world ended at turn 3, before it had come back to turn 4" in found.error
