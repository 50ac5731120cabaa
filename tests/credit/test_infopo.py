"""InfoPO: GRPO's advantage, and what replies changed where outcomes do not tell trajectories apart."""

from dataclasses import replace
from math import exp, nan, sqrt

import pytest
import torch
from torch.testing import assert_close

from perturn.credit import CREDITS
from perturn.methods.infopo.infopo_credit import gate
from perturn.types import Status

INFOPO = CREDITS["infopo"]


def numbers(found):
    return [one.tolist() for one in found]


def test_hand_worked(episode):
    """Equal scores: half the gate. Gains 1, 2, 3 have mean 2 and deviation 1; 0.5 x 0.5 x (-1, 1, 0)."""
    group = [episode([None] * 3, [0.0] * 3), episode([None] * 2, [0.0] * 2, sample=1)]

    first, other = INFOPO()(group, feedback=[[1.0, 3.0, nan], [2.0, nan]])

    share = 0.25 / (1 + 1e-6)
    assert_close(first, torch.tensor([-share, share, 0.0], dtype=torch.float64), rtol=0, atol=1e-15)
    assert other.tolist() == [0.0, 0.0]


def test_outcomes_that_differ_close_the_gate(episode):
    """Scores 1 and 0 deviate by sqrt(1/2): at a temperature of 0.05 sigmoid(-14.1) is 7e-7, at 1 it is 0.33."""
    group = [episode([None] * 2, [0.0, 1.0]), episode([None] * 2, [0.0, 0.0], sample=1)]
    feedback = [[1.0, nan], [0.0, nan]]
    grpo = CREDITS["grpo"]()(group)

    closed, open_ = INFOPO()(group, feedback=feedback), INFOPO(temperature=1.0)(group, feedback=feedback)

    for one, theirs in zip(closed, grpo, strict=True):
        assert_close(one, theirs, rtol=0, atol=3e-7)
    share, z = 1 / (1 + exp(sqrt(0.5))), sqrt(0.5) / (1 + 1e-6 / sqrt(0.5))
    assert (open_[0] - grpo[0]).tolist() == pytest.approx([0.5 * share * z, 0.0], abs=1e-12)
    assert (open_[1] - grpo[1]).tolist() == pytest.approx([-0.5 * share * z, 0.0], abs=1e-12)


def test_without_weight_it_is_grpo(episode):
    """Turn by turn, to the bit."""
    group = [episode([None] * n, [0.0] * (n - 1) + [n % 2 / 1], sample=n) for n in (1, 2, 3)]
    feedback = [[nan], [0.5, nan], [2.0, -1.0, nan]]

    assert numbers(INFOPO(beta=0.0)(group, feedback=feedback)) == numbers(CREDITS["grpo"]()(group))


def test_a_reply_that_is_not_known_counts_neither_way(episode):
    """It is no 0: the other two are normalized by themselves. A FAILED episode has none that is."""
    group = [episode([None] * 3, [0.0] * 3), episode([None] * 2, [0.0] * 2, sample=1)]
    group.append(replace(group[1], status=Status.FAILED, sample=2))

    found = INFOPO(normalize="mean")(group, feedback=[[5.0, nan, nan], [7.0, nan], [nan, nan]])

    assert numbers(found) == [[-0.25, 0.0, 0.0], [0.25, 0.0], [0.0, 0.0]]


def test_a_trajectory_alone_gets_nothing(episode):
    """Its turns are not compared with each other."""
    assert numbers(INFOPO()([episode([None] * 3, [0.0, 0.0, 1.0])], feedback=[[0.5, 2.0, nan]])) == [
        [0.0] * 3
    ]


def test_the_gate_is_at_most_half_open():
    """And closes without an overflow."""
    assert gate([0.0, 0.0], 0.05) == 0.5
    assert gate([0.0, 1.0], sqrt(0.5)) == pytest.approx(1 / (1 + exp(1)))
    assert 0 <= gate([0.0, 1e6], 0.05) < 1e-300


@pytest.mark.parametrize(
    ("feedback", "said"),
    [
        (None, "this credit needs feedback=, how much likelier the reply to each turn made"),
        ([[0.0]], "feedback must hold one entry per turn, for each trajectory"),
        ([[0.0, 1.0, 2.0]], "feedback must hold one entry per turn, for each trajectory"),
        ([[0.0, float("-inf")]], "feedback must be finite, or NaN where it is not known"),
    ],
)
def test_other_feedback_is_refused(episode, feedback, said):
    with pytest.raises(ValueError, match=said):
        INFOPO()([episode([None] * 2, [0.0, 1.0])], feedback=feedback)


@pytest.mark.parametrize(
    "settings", [{"beta": -0.1}, {"temperature": 0.0}, {"normalize": "max"}, {"std": "both"}]
)
def test_settings_outside_their_range_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        INFOPO(**settings)
