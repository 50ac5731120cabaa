"""tlm-DPO: DPO with turn weights from the reference's confidence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.losses import LOSSES, TurnLogprobs
from perturn.losses.dpo import DPO
from perturn.losses.tlm_dpo import TLMDPO
from perturn.losses.turn_logprobs import turn_weights

QUICK = settings(derandomize=True)
LENGTHS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4)

CHOSEN = TurnLogprobs.from_nested([[[0.35, 0.15], [-0.1]]], [[[-0.05, -0.05], [-1.0]]])
REJECTED = TurnLogprobs.from_nested([[[-1.5]]], [[[-1.0]]])


def test_hand_worked_value():
    """Turn 0 has p = e^-0.05 = 0.951 > 0.9, weight 0.2; turn 1 has p = e^-1, weight 1; beta = 0.5.

    Chosen 0.2 * 0.6 + 0.9 = 1.02, rejected -0.5: margin 1.52, log(1 + e^-0.76) = 0.383674.
    """
    loss = LOSSES["tlm-dpo"](beta=0.5)

    assert_close(turn_weights(CHOSEN, loss.credit), torch.tensor([0.2, 1.0]))
    assert_close(loss(CHOSEN, REJECTED), torch.tensor([0.383674]), atol=1e-6, rtol=0)
    assert_close(loss.rewards(CHOSEN), torch.tensor([0.51]), atol=1e-6, rtol=0)


def test_a_confidence_equal_to_the_pivot_takes_the_high_weight():
    """Eq. 10 gives the low weight above the pivot only; e^0 = 1 is exact."""
    side = TurnLogprobs.from_nested([[[0.0]]], [[[0.0]]])

    assert turn_weights(side, TLMDPO(pivot=1.0).credit).item() == 1
    assert turn_weights(side, TLMDPO(pivot=0.999).credit).item() == pytest.approx(0.2)


@QUICK
@given(lengths=LENGTHS, weight=st.floats(0.1, 3))
def test_equal_weights_are_dpo_with_another_beta(make_side, lengths, weight):
    """Setting low = high = w scales the margin: DPO with beta w."""
    one, other = make_side(5, lengths), make_side(6, lengths)

    value = TLMDPO(beta=0.3, low=weight, high=weight)(one, other)

    assert_close(value, DPO(beta=0.3 * weight)(one, other))


@QUICK
@given(lengths=LENGTHS)
def test_weights_come_from_the_reference_alone(make_side, lengths):
    """Another policy has the same weights."""
    one = make_side(7, lengths, drift=0.1)
    moved = TurnLogprobs(one.policy - 3.0, one.reference, one.turn, one.trajectory)

    assert torch.equal(turn_weights(one, TLMDPO().credit), turn_weights(moved, TLMDPO().credit))


def test_gradcheck(assert_gradcheck):
    assert_gradcheck(TLMDPO())


def test_golden(assert_golden):
    assert_golden("tlm-dpo", TLMDPO)


def test_nan_padding_changes_neither_loss_nor_gradient(assert_padding_is_inert):
    assert_padding_is_inert(TLMDPO())


def test_extreme_values_have_finite_gradients(assert_finite):
    assert_finite(TLMDPO(beta=10.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0}, r"beta must be > 0, got 0\."),
        ({"pivot": 1.5}, r"pivot must be <= 1, got 1\.5\."),
        ({"low": 0.0}, r"low must be > 0, got 0\.0\."),
        ({"low": 0.5, "high": 0.4}, r"high must be >= low, got high 0\.4 and low 0\.5\."),
        ({"high": float("inf")}, r"high must be < inf, got inf\."),
    ],
)
def test_settings_outside_their_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TLMDPO(**settings)


def test_sides_that_do_not_pair_up_are_refused():
    two = TurnLogprobs.from_nested([[[-1.0]], [[-1.0]]], [[[-1.0]], [[-1.0]]])

    with pytest.raises(ValueError, match="got 1 chosen and 2 rejected"):
        TLMDPO()(CHOSEN, two)
