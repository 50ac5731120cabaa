"""Potential: by how many turns each turn shortened the way to a success."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perturn.credit_check.meter import check_credit
from perturn.credit_check.processes import Outcome, Process
from perturn.methods.potential import Potential
from perturn.needs import Distance
from perturn.quantities import Ground, find
from perturn.types import Remaining, Status

QUICK = settings(derandomize=True)
TURN = (Outcome(to=1),)
MAZE = Process(
    "maze",
    {
        0: {"on": TURN, "stay": (Outcome(to=0),), "lose": (Outcome(to=2),)},
        1: {"on": (Outcome(reward=1.0, success=True),), "back": (Outcome(to=0),)},
        2: {"stay": (Outcome(to=2),)},
    },
    {0: (0.0, 0.0, 0.0), 1: (0.0, 0.0), 2: (0.0,)},
    horizon=2,
)
"""Two turns from a success; from state 2 there is none."""


def ways(*paths):
    """The way that is left around each turn of each trajectory."""
    return [[Remaining(*both) for both in pairwise(path)] for path in paths]


def weights(episode, *paths, **choice):
    group = [
        episode([None] * (len(path) - 1), [0.0] * (len(path) - 1), sample=i) for i, path in enumerate(paths)
    ]
    return [one.tolist() for one in Potential(**choice)(group, distance=ways(*paths))]


def test_hand_worked(episode):
    """Gains 1, 0, 1 and 1, -1, -2, 0: each less the mean of the other's, -1/2 and 2/3."""
    found = weights(episode, [2, 1, 1, 0], [2, 1, 2, 4, 4])

    assert found[0] == [1.5, 0.5, 1.5]
    assert found[1] == pytest.approx([1 / 3, -5 / 3, -8 / 3, -2 / 3])


def test_a_turn_that_closes_the_last_way_loses_one_turn_and_what_follows_nothing(episode):
    """The mean of the other's gains is 1."""
    assert weights(episode, [7, None, None], [1, 0])[0] == [-2, -1]


PATH = st.lists(st.one_of(st.none(), st.integers(0, 9)), min_size=2, max_size=6)


@QUICK
@given(paths=st.lists(PATH, min_size=2, max_size=4))
def test_weights_of_a_trajectory_differ_by_its_own_gains_alone(episode, paths):
    """What others did moves all turns of a trajectory alike."""
    together, other = weights(episode, *paths), weights(episode, paths[0], [3, 2, 2])

    moved = [one - two for one, two in zip(together[0], other[0], strict=True)]
    assert moved == pytest.approx([moved[0]] * len(moved))


@QUICK
@given(path=st.lists(st.integers(0, 9), min_size=2, max_size=6))
def test_gains_add_up_to_the_way_that_was_covered(episode, path):
    """The other trajectory stays where it is, so that nothing is taken off."""
    assert sum(weights(episode, path, [5, 5])[0]) == pytest.approx(path[0] - path[-1])


def test_an_episode_that_failed_gains_nothing(episode):
    group = [
        episode([None], [0.0]),
        episode([None], [0.0], sample=1, status=Status.FAILED),
    ]

    assert [one.tolist() for one in Potential()(group, distance=ways([2, 1], [2, 1]))] == [[1], [-1]]


def test_the_sense_is_requested():
    assert Potential(distance="searching").needs == (Distance("searching"),)
    with pytest.raises(ValueError, match="distance"):
        Potential(distance="far")


def test_the_exact_distance_of_a_process():
    """From 0 two turns, from 1 one, from 2 none."""
    assert MAZE.turns_to_success == {1: 1, 0: 2}
    quantity, request = find("distance")
    every = MAZE.episodes

    found = quantity.exact(request, Ground(every, 1.0, every))

    by_states = {
        tuple((step.state, step.action) for step in steps): one
        for steps, one in zip(every.steps, found, strict=True)
    }
    assert by_states[(0, 0), (1, 0)] == ways([2, 1, 0])[0]
    assert by_states[(0, 0), (1, 1)] == ways([2, 1, 2])[0]
    assert by_states[(0, 1), (0, 2)] == ways([2, 2, None])[0]
    assert by_states[(0, 2), (2, 0)] == ways([2, None, None])[0]


def test_its_gradient_is_no_gradient_of_the_return():
    """It rewards the way and not the outcome, so the meter finds it biased."""
    assert max(one.relative_bias for one in check_credit(Potential())) > 0.01
