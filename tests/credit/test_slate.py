"""SLATE: turns that answered the same history against each other, by what each was worth by itself."""

from dataclasses import replace

import pytest
import torch

from perturn.credit import CREDITS
from perturn.credit_check.meter import _compare, tree_estimates
from perturn.credit_check.processes import PROCESSES
from perturn.errors import DataError
from perturn.needs import Distance
from perturn.remaining import Remaining
from perturn.types import Status


def branch(one, origin, taken_over):
    return replace(one, origin=origin, taken_over=taken_over)


@pytest.fixture
def group(episode):
    """Sample 0 is played on before turn 1, once, and before turn 2, twice, a turn each but the last."""

    def row(rewards, sample):
        return episode([None] * len(rewards), rewards, sample=sample)

    return [
        row([0.0, 0.0, 1.0], 0),
        row([0.25], 1),
        branch(row([0.0, 0.5], 2), 0, 1),
        branch(row([0.0, 0.0, 0.0], 3), 0, 2),
        branch(row([0.0, 0.0, 1.0, 7.0], 4), 0, 2),
    ]


def weights(credit, group):
    return [one.tolist() for one in credit(group)]


def test_hand_worked(group):
    """First turns 0 and 0.25; before turn 1 a half of 0 - 0.5; before turn 2 thirds of 1 - 1/2, 0 - 1 and 1 - 1/2."""
    found = weights(CREDITS["slate"](), group)

    assert found == [
        pytest.approx([-0.25, -0.25, 1 / 6]),
        pytest.approx([0.25]),
        pytest.approx([0, 0.25]),
        pytest.approx([0, 0, -1 / 3]),
        pytest.approx([0, 0, 1 / 6, 0]),
    ]


def test_hand_worked_deviations(group):
    """Two values are 1 / sqrt 2 of their deviation from the mean; of 1, 0 and 1 the deviation is 1 / sqrt 3."""
    found = weights(CREDITS["slate"](normalize="std"), group)

    assert found[1] == pytest.approx([0.5**0.5], abs=1e-4)
    assert found[2] == pytest.approx([0, 0.5**0.5 / 2], abs=1e-4)
    assert found[3] == pytest.approx([0, 0, -(2 / 3) * 3**0.5 / 3], abs=1e-4)


def test_first_turns_that_were_posed_otherwise_are_not_compared(group):
    """A seed may pose a task in another way."""
    (first,) = group[1].turns
    other = replace(group[1], turns=(replace(first, observation=({"role": "user", "content": "other"},)),))

    found = weights(CREDITS["slate"](), [group[0], other])

    assert found == [[0.0] * 3, [0.0]]


def test_progress_is_measured_and_needed(group):
    """A turn that leaves the way shorter is worth 1."""
    nearer, farther = Remaining(3, 2), Remaining(3, 4)

    def told(one, remaining):
        return replace(one, turns=tuple(replace(turn, remaining=remaining) for turn in one.turns))

    credit = CREDITS["slate"](by="progress")
    found = weights(credit, [told(group[0], nearer), told(group[1], farther), told(group[2], farther)])

    assert found == [[1.0, 0.5, 0.0], [-1.0], [0.0, -0.5]]
    assert (credit.needs, CREDITS["slate"]().needs) == ((Distance(),), ())
    with pytest.raises(DataError, match="was not measured"):
        credit(group)


def test_validity_is_a_measure_too(group):
    """Only the second branch of the last fork could not be executed."""
    turns = (*group[3].turns[:2], replace(group[3].turns[2], valid=False))

    found = weights(CREDITS["slate"](by="valid"), [*group[:3], replace(group[3], turns=turns), group[4]])

    assert found[3] == pytest.approx([0, 0, -1 / 3])
    assert [found[0], found[1]] == [pytest.approx([0, 0, 1 / 6]), [0.0]]


def test_what_failed_was_worth_nothing(group):
    """Whatever its turn paid; a branch that failed before its first turn has none, and its fork is one less."""
    failed = replace(group[4], status=Status.FAILED)
    short = replace(group[3], turns=group[3].turns[:2], status=Status.FAILED)

    for credit in (CREDITS["slate"](), CREDITS["slate"](by="valid")):
        found = weights(credit, [*group[:3], short, failed])

        assert [found[0][2], found[4]] == [0.5, [0, 0, -0.5, 0]]
        assert found[3] == [0.0] * 2


def test_the_order_of_trees_changes_no_bit(group):
    order, credit = [3, 1, 4, 0, 2], CREDITS["slate"]()
    for one, at in zip(credit([group[i] for i in order]), order, strict=True):
        assert torch.equal(one, credit(group)[at])


@pytest.mark.parametrize(
    ("process", "bias"), list(zip(PROCESSES, (0.429, 0.0, 0.251, 3.445), strict=True)), ids=lambda _: ""
)
def test_it_is_the_gradient_of_what_each_turn_pays_by_itself(process, bias):
    """E[sum over turns of r_t grad log pi(a_t | s_t)], without what follows a turn; where every turn is played on from.

    On all groups of two trees: with means of the others the factor is 1. `benchmarks/truncated.py` has the same biases.
    """
    episodes = process.episodes
    rewards = torch.zeros(len(episodes.steps), process.horizon, dtype=torch.float64)
    for row, steps in zip(rewards, episodes.steps, strict=True):
        row[: len(steps)] = torch.tensor([step.reward for step in steps], dtype=torch.float64)
    expected = torch.einsum("e,et,etp->p", episodes.probability, rewards, episodes.score)

    estimates, chances, _ = tree_estimates(CREDITS["slate"](), episodes, 2, 1)

    torch.testing.assert_close(chances @ estimates, expected, rtol=0, atol=1e-12)
    assert _compare(estimates, chances, episodes.gradient(1.0))[2] == pytest.approx(bias, abs=5e-4)


def test_other_measures_are_refused():
    with pytest.raises(ValueError, match="by must be"):
        CREDITS["slate"](by="judge")
