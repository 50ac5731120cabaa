"""DPO over whole trajectories."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.losses import LOSSES, TurnLogprobs
from perturn.losses.dpo import DPO, dpo_loss
from perturn.losses.turn_logprobs import turn_weights

QUICK = settings(derandomize=True)
REDUCTIONS = ("sum", "token_mean", "turn_mean")

CHOSEN = TurnLogprobs.from_nested([[[0.3, 0.1], [-0.1]]], [[[-0.1, -0.1], [-1.0]]])
REJECTED = TurnLogprobs.from_nested([[[-1.5]]], [[[-1.0]]])


def test_hand_worked_margin():
    """With u = (1, -3), beta = 0.5: margin 2, loss = log(1 + e^-2) = 0.126928."""
    loss = dpo_loss(torch.tensor([1.0]), torch.tensor([-3.0]), beta=0.5)

    assert_close(loss, torch.tensor([0.126928]), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("reduction", "expected", "reward"),
    [("sum", 0.313262, 0.75), ("token_mean", 0.474077, 0.25), ("turn_mean", 0.455492, 0.3)],
)
def test_hand_worked_reductions(reduction, expected, reward):
    """Chosen u = (0.4, 0.2), (0.9); rejected u = (-0.5); beta = 0.5.

    sum: 1.5, margin 2, log(1 + e^-1) = 0.313262. token_mean: 0.5, margin 1, log(1 + e^-0.5) = 0.474077.
    turn_mean: (0.3 + 0.9) / 2 = 0.6, margin 1.1, log(1 + e^-0.55) = 0.455492. Rewards: beta u.
    """
    loss = LOSSES["dpo"](beta=0.5, reduction=reduction)

    assert_close(loss(CHOSEN, REJECTED), torch.tensor([expected]), atol=1e-6, rtol=0)
    assert_close(loss.rewards(CHOSEN), torch.tensor([reward]), atol=1e-6, rtol=0)
    assert_close(loss.rewards(REJECTED), torch.tensor([-0.25]), atol=1e-6, rtol=0)
    assert_close(turn_weights(CHOSEN, loss.credit), torch.ones(2))


@pytest.mark.parametrize(
    ("reduction", "expected"), [("sum", 0.163262), ("token_mean", 0.424077), ("turn_mean", 0.430492)]
)
def test_hand_worked_likelihood_of_the_chosen_side(reduction, expected):
    """Chosen log pi = (0.3, 0.1), (-0.1); beta = 0.5, sft = 0.5; the losses without are those above.

    sum: 0.3, 0.313262 - 0.15. token_mean: 0.1, 0.474077 - 0.05. turn_mean: (0.2 - 0.1) / 2, 0.455492 - 0.025.
    """
    loss = LOSSES["dpo"](beta=0.5, reduction=reduction, sft=0.5)

    assert_close(loss(CHOSEN, REJECTED), torch.tensor([expected]), atol=1e-6, rtol=0)


@QUICK
@given(seed=st.integers(0, 10**6), times=st.floats(0, 5))
def test_the_likelihood_is_that_of_sft(make_side, seed, times):
    """Over the mean of tokens it is the loss `sft`, added so many times; also where turns have weights."""
    chosen, rejected = make_side(seed, [[2, 3], [1]]), make_side(seed + 1, [[4], [1, 2]])
    chosen = replace(chosen, weight=torch.tensor([0.5, 2.0, 1.0]))
    with_sft, without = (DPO(reduction="token_mean", sft=each) for each in (times, 0.0))

    added = with_sft(chosen, rejected) - without(chosen, rejected)
    assert_close(added, times * LOSSES["sft"]()(chosen))


@QUICK
@given(seed=st.integers(0, 10**6), reduction=st.sampled_from(REDUCTIONS), beta=st.floats(0.01, 5))
def test_swapping_the_sides_flips_the_margin(make_side, seed, reduction, beta):
    """As log sigmoid(m) - log sigmoid(-m) = m, so the losses differ by the margin of the rewards."""
    one, other = make_side(seed, [[2, 3], [1]]), make_side(seed + 1, [[4], [1, 2, 2]])
    loss = DPO(beta=beta, reduction=reduction)

    assert_close(loss(other, one) - loss(one, other), loss.rewards(one) - loss.rewards(other))


@QUICK
@given(seed=st.integers(0, 10**6), order=st.permutations([0, 1, 2]), reduction=st.sampled_from(REDUCTIONS))
def test_permuting_the_pairs_permutes_the_losses(make_side, seed, order, reduction):
    lengths = [[2, 1], [3], [1, 1, 4]]
    one, other = make_side(seed, lengths), make_side(seed + 1, lengths)
    loss = DPO(reduction=reduction)

    def permuted(side):
        def nest(flat):
            parts = iter(flat.split(side.tokens_per_turn.tolist()))
            nested = [[next(parts) for _ in turns] for turns in lengths]
            return [nested[k] for k in order]

        return TurnLogprobs.from_nested(nest(side.policy), nest(side.reference))

    assert_close(loss(permuted(one), permuted(other)), loss(one, other)[order])


@QUICK
@given(seed=st.integers(0, 10**6))
def test_splitting_a_turn_leaves_sum_and_token_mean_unchanged(make_side, seed):
    """Turns [5] and [2, 3] hold the same tokens; turn_mean alone tells them apart."""
    whole, rejected = make_side(seed, [[5]]), make_side(seed + 1, [[2]])
    split = TurnLogprobs(whole.policy, whole.reference, torch.tensor([0, 0, 1, 1, 1]), whole.trajectory)

    for reduction in ("sum", "token_mean"):
        loss = DPO(reduction=reduction)
        assert_close(loss(whole, rejected), loss(split, rejected))
    assert not torch.allclose(
        DPO(reduction="turn_mean").rewards(whole), DPO(reduction="turn_mean").rewards(split)
    )


@pytest.mark.parametrize("sft", [0.0, 0.7])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradcheck(assert_gradcheck, reduction, sft):
    assert_gradcheck(DPO(reduction=reduction, sft=sft))


def test_golden(assert_golden):
    assert_golden("dpo", DPO)


@pytest.mark.parametrize("sft", [0.0, 0.7])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nan_padding_changes_neither_loss_nor_gradient(assert_padding_is_inert, reduction, sft):
    assert_padding_is_inert(DPO(reduction=reduction, sft=sft))


@pytest.mark.parametrize("sft", [0.0, 10.0])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_extreme_values_have_finite_gradients(assert_finite, reduction, sft):
    assert_finite(DPO(beta=10.0, reduction=reduction, sft=sft))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.0}, r"beta must be > 0, got 0\.0\."),
        ({"beta": -0.1}, r"beta must be > 0, got -0\.1\."),
        ({"beta": float("nan")}, r"beta must be > 0, got nan\."),
        ({"sft": -0.1}, r"sft must be >= 0, got -0\.1\."),
        ({"sft": float("inf")}, r"sft must be < inf, got inf\."),
        ({"reduction": "mean"}, "reduction must be one of sum, token_mean, turn_mean, got 'mean'"),
    ],
)
def test_settings_outside_their_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DPO(**settings)


def test_sides_that_do_not_pair_up_or_lack_a_reference_are_refused():
    two = TurnLogprobs.from_nested([[[-1.0]], [[-1.0]]], [[[-1.0]], [[-1.0]]])

    with pytest.raises(ValueError, match="got 1 chosen and 2 rejected"):
        DPO()(CHOSEN, two)
    with pytest.raises(ValueError, match="needs reference log-probabilities"):
        DPO()(TurnLogprobs.from_nested([[[-1.0]]]), REJECTED)
