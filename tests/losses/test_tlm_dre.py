"""tlm-DRE: turn-level multiscale density-ratio estimation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.losses import LOSSES, TurnLogprobs
from perturn.losses.tlm_dre import TLMDRE
from perturn.losses.turn_logprobs import turn_weights

QUICK = settings(derandomize=True)
KERNELS = ("ukl", "lsif", "bce", "basu")
REDUCTIONS = ("sum", "token_mean", "turn_mean")
COEFFICIENTS = ("reference", "self_normalized", "one")
LENGTHS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4)
every_kernel = pytest.mark.parametrize("kernel", KERNELS)
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
every_coefficient = pytest.mark.parametrize("coefficient", COEFFICIENTS)

CHOSEN = TurnLogprobs.from_nested([[[0.35, 0.15], [-0.1]]], [[[-0.05, -0.05], [-1.0]]])
REJECTED = TurnLogprobs.from_nested([[[-1.5]]], [[[-1.0]]])


def uniform_side(turns, tokens, *, reference, drift=0.0, dtype=torch.float32):
    """Return one trajectory whose tokens are all alike."""
    of_reference = torch.full((tokens,), reference, dtype=dtype)
    return TurnLogprobs.from_nested([[of_reference + drift] * turns], [[of_reference] * turns])


def some(side, first, last):
    """Return the trajectories from `first` up to `last`."""
    keep = (side.trajectory >= first) & (side.trajectory < last)
    return TurnLogprobs(
        side.policy[keep], side.reference[keep], side.turn[keep], side.trajectory[keep] - first
    )


@pytest.mark.parametrize(
    ("kernel", "reduction", "expected"),
    [
        ("ukl", "sum", -0.335048),
        ("ukl", "token_mean", 0.275478),
        ("ukl", "turn_mean", 0.136035),
        ("lsif", "sum", -1.952925),
        ("lsif", "token_mean", -0.710352),
        ("bce", "token_mean", 0.997460),
        ("bce", "turn_mean", 0.946214),
        ("basu", "token_mean", -1.042605),
    ],
)
def test_hand_worked_values(kernel, reduction, expected):
    """Turn 0: p = e^-0.05 > 0.9, omega 0.2, u = (0.4, 0.2). Turn 1: p = e^-1, omega 1, u = (0.9).

    Rejected: omega 1, u = (-0.5), r = 0.606531. log r_w and log C_w:
    sum 0.2 * 0.6 + 0.9 = 1.02 and 0.8 * -0.1 = -0.08; token_mean a third of each, 0.34 and -0.026667;
    turn_mean (0.2 * 0.3 + 0.9) / 2 = 0.48 and 0.8 * -0.05 / 2 = -0.02.
    UKL: 0.606531 - C log r. LSIF: (0.606531^2 - 1) / 2 - C (r - 1). BCE: log 1.606531 + C log(1 + 1/r).
    Basu, alpha 0.5: 0.606531^1.5 - C (1.5 r^0.5 - 1) / 0.5.
    """
    loss = LOSSES["tlm-dre"](kernel=kernel, reduction=reduction)

    assert_close(loss(CHOSEN, REJECTED), torch.tensor([expected]), atol=2e-6, rtol=0)


@pytest.mark.parametrize(("reduction", "reward"), [("sum", 1.02), ("token_mean", 0.34), ("turn_mean", 0.48)])
def test_the_reward_is_the_reduced_weighted_log_ratio(reduction, reward):
    loss = TLMDRE(reduction=reduction)

    assert_close(loss.rewards(CHOSEN), torch.tensor([reward]), atol=1e-6, rtol=0)
    assert_close(turn_weights(CHOSEN, loss.credit), torch.tensor([0.2, 1.0]))


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("ukl", 1.0),
        ("lsif", 0.0),
        ("bce", math.log(2) * (1 + math.exp(-0.08 / 3))),
        ("basu", 1 - math.exp(-0.08 / 3)),
    ],
)
def test_a_policy_equal_to_its_reference_has_a_known_loss(kernel, expected):
    """With r = 1 on both sides: UKL 1 - 0, LSIF 0 - 0, BCE log 2 + C log 2, Basu 1 - C; C = e^(-0.08 / 3)."""
    chosen = TurnLogprobs(CHOSEN.reference, CHOSEN.reference, CHOSEN.turn, CHOSEN.trajectory)
    rejected = TurnLogprobs(REJECTED.reference, REJECTED.reference, REJECTED.turn, REJECTED.trajectory)

    value = TLMDRE(kernel=kernel, reduction="token_mean")(chosen, rejected)

    assert_close(value, torch.tensor([expected]), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("turns", "tokens", "reference", "expected"), [(10, 30, -0.05, 6.1e-6), (21, 60, -0.1, 1.7e-44)]
)
def test_the_literal_coefficient_vanishes_at_realistic_lengths(turns, tokens, reference, expected):
    """With omega 0.2: C_w = exp(0.8 * 300 * -0.05) = e^-12, and exp(0.8 * 1260 * -0.1) = e^-100.8."""
    chosen = uniform_side(turns, tokens, reference=reference, dtype=torch.float64)

    literal = TLMDRE(reduction="sum").diagnostics(chosen, chosen)["coefficient"].item()
    averaged = TLMDRE(reduction="token_mean").diagnostics(chosen, chosen)["coefficient"].item()

    assert literal == pytest.approx(expected, rel=0.05)
    assert averaged == pytest.approx(math.exp(0.8 * reference))


def test_the_literal_ratio_overflows_at_realistic_lengths():
    """900 tokens drifted by +0.05 nats: r = e^45 = 3.5e19. The clamp stops it at e^20, without gradient."""
    drifted = uniform_side(30, 30, reference=-1.0, drift=0.05, dtype=torch.float64)

    literal, averaged = (TLMDRE(reduction=reduction) for reduction in ("sum", "token_mean"))
    entries = literal.diagnostics(drifted, drifted)

    assert literal.rewards(drifted).exp().item() == pytest.approx(3.5e19, rel=0.01)
    assert averaged.rewards(drifted).item() == pytest.approx(0.05)
    assert entries["clamped"].item() == 1
    assert entries["gradient_weight/rejected"].item() == 0


@QUICK
@given(
    seed=st.integers(0, 10**6),
    order=st.permutations([0, 1, 2]),
    kernel=st.sampled_from(KERNELS),
    reduction=st.sampled_from(REDUCTIONS),
    coefficient=st.sampled_from(COEFFICIENTS),
)
def test_permuting_the_pairs_permutes_the_losses(make_side, seed, order, kernel, reduction, coefficient):
    lengths = [[2, 1], [3], [1, 1, 4]]
    one, other = make_side(seed, lengths), make_side(seed + 1, lengths)
    loss = TLMDRE(kernel=kernel, reduction=reduction, coefficient=coefficient)

    def permuted(side):
        def nest(flat):
            parts = iter(flat.split(side.tokens_per_turn.tolist()))
            nested = [[next(parts) for _ in turns] for turns in lengths]
            return [nested[k] for k in order]

        return TurnLogprobs.from_nested(nest(side.policy), nest(side.reference))

    assert_close(loss(permuted(one), permuted(other)), loss(one, other)[order])


@QUICK
@given(
    seed=st.integers(0, 10**6),
    kernel=st.sampled_from(KERNELS),
    reduction=st.sampled_from(("sum", "token_mean")),
)
def test_splitting_a_turn_of_equal_weight_changes_nothing(make_side, seed, kernel, reduction):
    """With low = high = 0.6 turns [5] and [2, 3] have the same loss, C_w included."""
    whole, rejected = make_side(seed, [[5]]), make_side(seed + 1, [[2]])
    split = TurnLogprobs(whole.policy, whole.reference, torch.tensor([0, 0, 1, 1, 1]), whole.trajectory)
    loss = TLMDRE(kernel=kernel, reduction=reduction, low=0.6, high=0.6)

    assert_close(loss(whole, rejected), loss(split, rejected))


@QUICK
@given(lengths=LENGTHS, reduction=st.sampled_from(REDUCTIONS))
def test_self_normalized_coefficients_average_one_in_the_paper_proportions(make_side, lengths, reduction):
    """C_w = B softmax(log C_w): the mean is 1 and ratios between pairs are those of `reference`."""
    chosen, rejected = make_side(11, lengths), make_side(12, lengths)
    kinds = {
        kind: TLMDRE(reduction=reduction, coefficient=kind).diagnostics(chosen, rejected)
        for kind in COEFFICIENTS
    }
    normalized, paper = (kinds[kind]["coefficient"] for kind in ("self_normalized", "reference"))

    assert_close(normalized.mean(), torch.tensor(1.0, dtype=torch.float64))
    assert_close(normalized / normalized[0], paper / paper[0])
    assert_close(kinds["one"]["coefficient"], torch.ones_like(paper))
    size = paper.sum() ** 2 / (paper**2).sum()
    assert_close(kinds["self_normalized"]["effective_batch_size"], size.expand_as(paper))
    assert_close(kinds["one"]["effective_batch_size"], torch.full_like(paper, len(lengths)))


def test_self_normalized_survives_coefficients_too_small_for_a_float():
    """Here log C_w = -1600 and -1680 for the two pairs: both C_w are 0 in float32, their softmax is not."""
    chosen = TurnLogprobs.from_nested(
        [[[-0.1] * 20000], [[-0.1] * 21000]], [[[-0.1] * 20000], [[-0.1] * 21000]]
    )
    entries = TLMDRE(reduction="sum", coefficient="self_normalized").diagnostics(chosen, chosen)

    assert_close(entries["coefficient"], torch.tensor([2.0, 0.0]))
    assert_close(entries["effective_batch_size"], torch.ones(2))


@QUICK
@given(
    lengths=LENGTHS,
    cut=st.integers(1, 3),
    reduction=st.sampled_from(REDUCTIONS),
    coefficient=st.sampled_from(COEFFICIENTS),
)
def test_a_step_is_one_whatever_passes_it_is_computed_in(make_side, lengths, cut, reduction, coefficient):
    """Pairs in two passes that are told `step_statistic` of all: loss and diagnostics are those of one pass."""
    lengths = [*lengths, *lengths]
    cut = min(cut, len(lengths) - 1)
    sides = make_side(11, lengths), make_side(12, lengths)
    loss = TLMDRE(reduction=reduction, coefficient=coefficient)
    step = loss.step_statistic(sides[0])
    passes = [[some(side, *ends) for side in sides] for ends in ((0, cut), (cut, len(lengths)))]
    whole, parts = loss.diagnostics(*sides), [loss.diagnostics(*each, step=step) for each in passes]

    assert_close(torch.cat([loss(*each, step=step) for each in passes]), loss(*sides))
    for name, values in whole.items():
        assert_close(torch.cat([part[name] for part in parts]), values)


@pytest.mark.parametrize(
    ("kernel", "to_chosen", "to_rejected"),
    [
        ("ukl", lambda r: 1.0, lambda r: r),
        ("lsif", lambda r: r, lambda r: r * r),
        ("bce", lambda r: 1 / (1 + r), lambda r: r / (1 + r)),
        ("basu", lambda r: 1.5 * r**0.5, lambda r: 1.5 * r**1.5),
    ],
)
def test_diagnostics_report_gradient_weights(kernel, to_chosen, to_rejected):
    """C f''(r) r of chosen, f''(r) r^2 of rejected; f'' = 1/r, 1, 1 / (r (1 + r)), 1.5 r^-0.5."""
    loss = TLMDRE(kernel=kernel, reduction="token_mean")
    entries = {name: value.tolist() for name, value in loss.diagnostics(CHOSEN, REJECTED).items()}
    c, r_w, r_l = math.exp(-0.08 / 3), math.exp(0.34), math.exp(-0.5)

    assert entries["gradient_weight/chosen"] == pytest.approx([c * to_chosen(r_w)], rel=1e-5)
    assert entries["gradient_weight/rejected"] == pytest.approx([to_rejected(r_l)], rel=1e-5)
    assert entries["log_ratio/chosen"] == pytest.approx([0.34], rel=1e-5)
    assert entries["log_ratio/rejected"] == pytest.approx([-0.5], rel=1e-5)
    assert entries["coefficient"] == pytest.approx([c], rel=1e-5)
    assert entries["clamped"] == [0]
    assert entries["effective_batch_size"] == pytest.approx([1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_diagnostics_and_rewards_carry_no_gradient_in_any_mode(mode):
    policy = torch.tensor([-0.5], requires_grad=True)
    loss = TLMDRE()

    with mode():
        side = TurnLogprobs.from_nested([[policy]], [[[-0.6]]])
        entries = loss.diagnostics(side, side)
        reward = loss.rewards(side)

    assert entries["gradient_weight/chosen"].item() > 0
    assert not any(value.requires_grad for value in [*entries.values(), reward])


def test_either_side_beyond_the_clamp_counts_as_clamped():
    """21 nats on one token, against a clamp of 20; the exact limit does not count."""
    far = TurnLogprobs.from_nested([[[20.0]]], [[[-1.0]]])
    limit = TurnLogprobs.from_nested([[[19.0]]], [[[-1.0]]])

    assert TLMDRE().diagnostics(far, REJECTED)["clamped"].item() == 1
    assert TLMDRE().diagnostics(REJECTED, far)["clamped"].item() == 1
    assert TLMDRE().diagnostics(limit, limit)["clamped"].item() == 0


def test_the_gradient_of_the_coefficient_is_nil():
    """A reference that asks for gradients gets none, through C_w, omega or the log-ratio."""
    policy = torch.tensor([-0.5, -0.2], requires_grad=True)
    reference = torch.tensor([-0.01, -0.02], requires_grad=True)
    side = TurnLogprobs.from_nested([[policy]], [[reference]])

    TLMDRE()(side, REJECTED).sum().backward()

    assert policy.grad.abs().sum() > 0
    assert reference.grad is None


@every_kernel
@every_reduction
def test_gradcheck(assert_gradcheck, kernel, reduction):
    assert_gradcheck(TLMDRE(kernel=kernel, reduction=reduction))


@every_coefficient
def test_gradcheck_of_every_coefficient(assert_gradcheck, coefficient):
    assert_gradcheck(TLMDRE(coefficient=coefficient))


def test_golden(assert_golden):
    assert_golden("tlm-dre", TLMDRE)


@every_kernel
@every_coefficient
def test_nan_padding_changes_neither_loss_nor_gradient(assert_padding_is_inert, kernel, coefficient):
    assert_padding_is_inert(TLMDRE(kernel=kernel, coefficient=coefficient))


@every_kernel
@every_reduction
@every_coefficient
def test_extreme_values_have_finite_gradients(assert_finite, kernel, reduction, coefficient):
    assert_finite(TLMDRE(kernel=kernel, reduction=reduction, coefficient=coefficient))


@every_kernel
def test_weights_above_one_have_finite_gradients(assert_finite, kernel):
    """Setting high = 3 makes log C_w as large as 2 * 51 * 4000; it is clamped at max_log_ratio."""
    assert_finite(TLMDRE(kernel=kernel, reduction="sum", high=3.0, max_log_ratio=40.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernel": "kl"}, "kernel must be one of ukl, lsif, bce, basu, got 'kl'"),
        ({"alpha": -1}, r"alpha must be > 0, got -1\."),
        ({"pivot": -0.1}, r"pivot must be >= 0, got -0\.1\."),
        ({"low": 0}, r"low must be > 0, got 0\."),
        ({"high": 0.1}, r"high must be >= low, got high 0\.1 and low 0\.2\."),
        ({"reduction": "mean"}, "reduction must be one of sum, token_mean, turn_mean"),
        ({"coefficient": "none"}, "coefficient must be one of reference, self_normalized, one"),
        ({"kernel": "basu", "alpha": 3.5}, "max_log_ratio must be <= 17.7778 for kernel basu with alpha 3.5"),
    ],
)
def test_settings_outside_their_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TLMDRE(**settings)


def test_sides_that_do_not_pair_up_are_refused():
    two = TurnLogprobs.from_nested([[[-1.0]], [[-1.0]]], [[[-1.0]], [[-1.0]]])

    with pytest.raises(ValueError, match="got 1 chosen and 2 rejected"):
        TLMDRE()(CHOSEN, two)
