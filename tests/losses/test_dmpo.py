"""DMPO: DPO with a discount on later turns."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.losses import LOSSES, TurnLogprobs
from perturn.losses.dmpo import DMPO
from perturn.losses.dpo import DPO
from perturn.losses.turn_logprobs import turn_weights

QUICK = settings(derandomize=True)
both_discounts = pytest.mark.parametrize("discount", ["derived", "printed"])

CHOSEN = TurnLogprobs.from_nested([[[0.3, 0.1], [-0.1]]], [[[-0.1, -0.1], [-1.0]]])
REJECTED = TurnLogprobs.from_nested([[[-1.5]]], [[[-1.0]]])


def discounts(turns, *, dtype=torch.float64, **of_loss):
    """Return phi(t, T) of a trajectory of one-token turns."""
    nested = [[torch.zeros(1, dtype=dtype)] * turns]
    return turn_weights(TurnLogprobs.from_nested(nested, nested), DMPO(**of_loss).credit)


def exact_discount(t, turns, gamma, discount):
    """Return phi in rational arithmetic, gamma being the very number the float holds."""
    g = Fraction(gamma)
    phi = Fraction(turns - t, turns) if g == 1 else (1 - g ** (turns - t)) / (1 - g**turns)
    return phi * g**t if discount == "derived" else phi


@pytest.mark.parametrize(
    ("discount", "phi", "expected", "reward"),
    [("derived", [1, 1 / 3], 0.403186, 0.45), ("printed", [1, 2 / 3], 0.355865, 0.6)],
)
def test_hand_worked_values(discount, phi, expected, reward):
    """With gamma = 0.5, T = 2: phi(1) = 0.5 * 0.5 / 0.75 = 1/3, printed 0.5 / 0.75 = 2/3; T = 1: phi = 1.

    Turn sums of chosen 0.6, 0.9; of rejected -0.5; beta = 0.5. Derived: 0.6 + 0.3 = 0.9, margin 1.4,
    log(1 + e^-0.7) = 0.403186. Printed: 0.6 + 0.6 = 1.2, margin 1.7, log(1 + e^-0.85) = 0.355865.
    """
    loss = LOSSES["dmpo"](beta=0.5, gamma=0.5, discount=discount)

    assert_close(turn_weights(CHOSEN, loss.credit), torch.tensor(phi), atol=1e-6, rtol=0)
    assert_close(loss(CHOSEN, REJECTED), torch.tensor([expected]), atol=1e-6, rtol=0)
    assert_close(loss.rewards(CHOSEN), torch.tensor([reward]), atol=1e-6, rtol=0)


@QUICK
@given(
    gamma=st.one_of(
        st.floats(1e-3, 1.0), st.sampled_from([1 - 2**-53, 1 - 1e-12, 1 - 1e-7, 0.999999, 1.0, 0.5])
    ),
    turns=st.integers(1, 40),
    discount=st.sampled_from(["derived", "printed"]),
)
def test_discount_agrees_with_rational_arithmetic(gamma, turns, discount):
    """Relative 1e-12 in float64 and 1e-5 in float32, gamma^40 included; near gamma = 1 no digits are lost."""
    exact = [float(exact_discount(t, turns, gamma, discount)) for t in range(turns)]

    for dtype, rtol, atol in ((torch.float64, 1e-12, 0), (torch.float32, 1e-5, 1e-37)):
        phi = discounts(turns, dtype=dtype, gamma=gamma, discount=discount)
        assert_close(phi, torch.tensor(exact, dtype=torch.float64).to(dtype), rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("gamma", "discount", "expected"),
    [
        (0.0, "derived", [1, 0, 0, 0]),
        (0.0, "printed", [1, 1, 1, 1]),
        (1.0, "derived", [1, 0.75, 0.5, 0.25]),
        (1.0, "printed", [1, 0.75, 0.5, 0.25]),
    ],
)
def test_limits_are_exact_and_continuous(gamma, discount, expected):
    """Corollary 4.0.2 holds for the derived discount alone; gamma near a limit comes near its values."""
    expected = torch.tensor(expected, dtype=torch.float64)
    near = abs(gamma - 1e-9)

    assert torch.equal(discounts(4, gamma=gamma, discount=discount), expected)
    assert_close(discounts(4, gamma=near, discount=discount), expected, atol=1e-8, rtol=0)


def test_discounts_of_field_implementations_are_reproduced():
    """With gamma 0.7, T 20: phi(1), phi(5), phi(10) = 0.700, 0.167, 0.0275; printed 1.000, 0.996, 0.973."""
    derived, printed = (discounts(20, discount=name)[[1, 5, 10]] for name in ("derived", "printed"))

    assert_close(derived, torch.tensor([0.700, 0.167, 0.0275], dtype=torch.float64), atol=5e-4, rtol=0)
    assert_close(printed, torch.tensor([1.000, 0.996, 0.973], dtype=torch.float64), atol=5e-4, rtol=0)


@QUICK
@given(seed=st.integers(0, 10**6), gamma=st.floats(0, 1), discount=st.sampled_from(["derived", "printed"]))
def test_one_turn_is_dpo(make_side, seed, gamma, discount):
    one, other = make_side(seed, [[3], [1]]), make_side(seed + 1, [[2], [5]])

    assert_close(DMPO(gamma=gamma, discount=discount)(one, other), DPO()(one, other))


@QUICK
@given(seed=st.integers(0, 10**6))
def test_gamma_zero_is_dpo_on_the_first_turn_or_on_all(make_side, seed):
    """Derived: later turns drop out. Printed: every turn counts, which is DPO."""
    one, other = make_side(seed, [[3, 2]]), make_side(seed + 1, [[2, 1, 4]])

    def first_turn(side):
        own = side.turn == 0
        return TurnLogprobs(side.policy[own], side.reference[own], side.turn[own], side.trajectory[own])

    assert_close(DMPO(gamma=0)(one, other), DPO()(first_turn(one), first_turn(other)))
    assert_close(DMPO(gamma=0, discount="printed")(one, other), DPO()(one, other))


@both_discounts
@pytest.mark.parametrize("gamma", [0.0, 0.7, 1.0])
def test_gradcheck(assert_gradcheck, gamma, discount):
    assert_gradcheck(DMPO(gamma=gamma, discount=discount))


def test_golden(assert_golden):
    assert_golden("dmpo", DMPO)


@both_discounts
def test_nan_padding_changes_neither_loss_nor_gradient(assert_padding_is_inert, discount):
    assert_padding_is_inert(DMPO(discount=discount))


@both_discounts
@pytest.mark.parametrize("gamma", [0.0, 1e-300, 1 - 2**-53, 1.0])
def test_extreme_values_have_finite_gradients(assert_finite, gamma, discount):
    assert_finite(DMPO(beta=10.0, gamma=gamma, discount=discount))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": -0.1}, r"beta must be > 0, got -0\.1\."),
        ({"gamma": 1.1}, r"gamma must be <= 1, got 1\.1\."),
        ({"gamma": -0.1}, r"gamma must be >= 0, got -0\.1\."),
        ({"discount": "blog"}, "discount must be one of derived, printed, got 'blog'"),
    ],
)
def test_settings_outside_their_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DMPO(**settings)


def test_sides_that_do_not_pair_up_are_refused():
    two = TurnLogprobs.from_nested([[[-1.0]], [[-1.0]]], [[[-1.0]], [[-1.0]]])

    with pytest.raises(ValueError, match="got 1 chosen and 2 rejected"):
        DMPO()(CHOSEN, two)
