"""DIL: density-ratio estimation on whole trajectories."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.losses import LOSSES, TurnLogprobs
from perturn.losses.dil import DIL
from perturn.losses.tlm_dre import TLMDRE
from perturn.losses.turn_logprobs import turn_weights

QUICK = settings(derandomize=True)
KERNELS = ("ukl", "lsif", "bce", "basu")
REDUCTIONS = ("sum", "token_mean", "turn_mean")
LENGTHS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4)
every_kernel = pytest.mark.parametrize("kernel", KERNELS)
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)

CHOSEN = TurnLogprobs.from_nested([[[0.35, 0.15], [-0.1]]], [[[-0.05, -0.05], [-1.0]]])
REJECTED = TurnLogprobs.from_nested([[[-1.5]]], [[[-1.0]]])


@pytest.mark.parametrize(
    ("kernel", "reduction", "expected"),
    [
        ("ukl", "sum", -0.893469),
        ("ukl", "token_mean", 0.106531),
        ("ukl", "turn_mean", 0.006531),
        ("lsif", "token_mean", -0.964782),
        ("bce", "token_mean", 0.948154),
        ("basu", "token_mean", -1.379710),
        ("basu", "turn_mean", -1.577210),
    ],
)
def test_hand_worked_values(kernel, reduction, expected):
    """Chosen u (0.4, 0.2), (0.9), so log r 1.5, 0.5 or 0.6; rejected u (-0.5), r = 0.606531.

    UKL: 0.606531 - log r. LSIF: (0.367879 - 1) / 2 - (e^0.5 - 1) = -0.964782.
    BCE: log 1.606531 + log(1 + e^-0.5) = 0.474077 + 0.474077. Basu, alpha 0.5: 0.606531^1.5 = 0.472367, less
    (1.5 e^0.25 - 1) / 0.5 = 1.852076, or with 0.6 less (1.5 e^0.3 - 1) / 0.5 = 2.049576.
    """
    loss = LOSSES["dil"](kernel=kernel, reduction=reduction)

    assert_close(loss(CHOSEN, REJECTED), torch.tensor([expected]), atol=2e-6, rtol=0)


@pytest.mark.parametrize(("reduction", "reward"), [("sum", 1.5), ("token_mean", 0.5), ("turn_mean", 0.6)])
def test_the_reward_is_the_reduced_log_ratio(reduction, reward):
    loss = DIL(reduction=reduction)

    assert_close(loss.rewards(CHOSEN), torch.tensor([reward]), atol=1e-6, rtol=0)
    assert_close(turn_weights(CHOSEN, loss.credit), torch.ones(2))


@QUICK
@given(
    lengths=LENGTHS,
    kernel=st.sampled_from(KERNELS),
    reduction=st.sampled_from(REDUCTIONS),
    coefficient=st.sampled_from(["reference", "self_normalized", "one"]),
)
def test_it_is_tlm_dre_with_every_weight_one(make_side, lengths, kernel, reduction, coefficient):
    """With omega = 1 every C_w is 1, whichever way it is computed. Values, rewards and diagnostics agree."""
    one, other = make_side(8, lengths), make_side(9, lengths)
    dil = DIL(kernel=kernel, reduction=reduction)
    tlm_dre = TLMDRE(kernel=kernel, reduction=reduction, low=1.0, high=1.0, coefficient=coefficient)

    assert_close(dil(one, other), tlm_dre(one, other))
    assert_close(dil.rewards(one), tlm_dre.rewards(one))
    theirs = tlm_dre.diagnostics(one, other)
    for name, value in dil.diagnostics(one, other).items():
        assert_close(value, theirs[name])


@every_kernel
@every_reduction
def test_gradcheck(assert_gradcheck, kernel, reduction):
    assert_gradcheck(DIL(kernel=kernel, reduction=reduction))


def test_golden(assert_golden):
    assert_golden("dil", DIL)


@every_kernel
def test_nan_padding_changes_neither_loss_nor_gradient(assert_padding_is_inert, kernel):
    assert_padding_is_inert(DIL(kernel=kernel))


@every_kernel
@every_reduction
def test_extreme_values_have_finite_gradients(assert_finite, kernel, reduction):
    assert_finite(DIL(kernel=kernel, reduction=reduction))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernel": "kl"}, "kernel must be one of ukl, lsif, bce, basu, got 'kl'"),
        ({"alpha": 0.0}, r"alpha must be > 0, got 0\.0\."),
        ({"reduction": "mean"}, "reduction must be one of sum, token_mean, turn_mean"),
        ({"max_log_ratio": 0.0}, r"max_log_ratio must be > 0, got 0\.0\."),
        ({"max_log_ratio": 41}, "max_log_ratio must be <= 40 for kernel ukl"),
    ],
)
def test_settings_outside_their_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DIL(**settings)


def test_sides_that_do_not_pair_up_or_lack_a_reference_are_refused():
    two = TurnLogprobs.from_nested([[[-1.0]], [[-1.0]]], [[[-1.0]], [[-1.0]]])

    with pytest.raises(ValueError, match="got 1 chosen and 2 rejected"):
        DIL()(CHOSEN, two)
    with pytest.raises(ValueError, match="needs reference log-probabilities"):
        DIL()(TurnLogprobs.from_nested([[[-1.0]]]), REJECTED)
