"""W-DPO: DPO in which a pair weighs by the gap between the process scores of its sides."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.credit import CREDITS
from perturn.losses import LOSSES, TurnLogprobs
from perturn.losses.dpo import DPO
from perturn.losses.w_dpo import WDPO, gap_weights
from perturn.types import Action, Remaining, Task, Trajectory, Turn

QUICK = settings(derandomize=True)
SEEDS = st.integers(0, 10**6)
LENGTHS = [[2, 1], [3], [1, 1, 4]]

CHOSEN = TurnLogprobs.from_nested([[[0.3, 0.1], [-0.1]]], [[[-0.1, -0.1], [-1.0]]], [[1.0, 1.0]])
REJECTED = TurnLogprobs.from_nested(
    [[[-1.5, -1.0], [-1.0], [-1.0]]], [[[-1.0, -1.0], [-1.0], [-1.0]]], [[1.0, 0, 0]]
)


def scored(side, seed=0):
    """The side with a random score for each turn, between 0 and 1."""
    draw = torch.Generator().manual_seed(seed)
    return dataclasses.replace(
        side, weight=torch.rand(side.num_turns, generator=draw, dtype=side.policy.dtype)
    )


def on_scored(loss):
    """The loss on sides that are given scores first."""
    return lambda chosen, rejected: loss(scored(chosen, 2), scored(rejected, 1))


def test_hand_worked_value():
    """Scores 1 and 1/3, base 1: w = 5/3. u = 1.5 and -0.5, beta = 0.5: margin 1, w log(1 + e^-1) = 0.522103.

    Numbers of turns do not weigh the log-ratios. With base 0 w = 2/3, 0.208841; sides swapped, 1/3 of log(1 + e^1).
    """
    loss, alone = LOSSES["w-dpo"](beta=0.5), LOSSES["w-dpo"](beta=0.5, base=0.0)

    assert_close(loss(CHOSEN, REJECTED), torch.tensor([0.522103]), atol=1e-6, rtol=0)
    assert_close(alone(CHOSEN, REJECTED), torch.tensor([0.208841]), atol=1e-6, rtol=0)
    assert_close(loss(REJECTED, CHOSEN), torch.tensor([0.437754]), atol=1e-6, rtol=0)
    assert_close(loss.rewards(CHOSEN), torch.tensor([0.75]), atol=1e-6, rtol=0)
    assert_close(loss.diagnostics(CHOSEN, REJECTED)["pair_weight"], torch.tensor([5 / 3]))


def test_a_gap_below_minus_the_base_weighs_nothing():
    """1 - 1, 0 - 2 and 0.5 - 1 with base 0.5: 0.5, 0 and 0."""
    found = gap_weights(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([1.0, 2.0, 1.0]), base=0.5)

    assert found.tolist() == [0.5, 0.0, 0.0]


@QUICK
@given(seed=SEEDS, beta=st.floats(0.01, 5), number=st.floats(-2, 2))
def test_equal_scores_are_dpo(make_side, seed, beta, number):
    """However many turns a side has; and with scores it is DPO times its diagnostic, on sides without weights."""
    one, other = make_side(seed, LENGTHS), make_side(seed + 1, LENGTHS[::-1])
    alike = [dataclasses.replace(side, weight=torch.full((side.num_turns,), number)) for side in (one, other)]
    loss, both = WDPO(beta=beta), (scored(one, seed), scored(other, seed + 1))

    assert_close(loss(*alike), DPO(beta=beta)(one, other))
    assert_close(loss(*both), loss.diagnostics(*both)["pair_weight"] * DPO(beta=beta)(one, other))
    assert_close(loss.rewards(both[0]), DPO(beta=beta).rewards(one))


@QUICK
@given(seed=SEEDS, base=st.floats(0, 3), more=st.floats(0, 3))
def test_a_pair_weighs_more_as_its_chosen_side_scores_more(make_side, seed, base, more):
    """By just as much, where it weighs anything; never less than nothing."""
    one, other = scored(make_side(seed, LENGTHS), seed), scored(make_side(seed + 1, LENGTHS), seed + 1)
    better, loss = dataclasses.replace(one, weight=one.weight + more), WDPO(base=base)
    before, after = (loss.diagnostics(side, other)["pair_weight"] for side in (one, better))

    assert (before >= 0).all()
    assert_close(after[before > 0], before[before > 0] + more)
    assert (after >= before).all()


@QUICK
@given(seed=SEEDS)
def test_no_pair_moves_the_weight_of_another(make_side, seed):
    """Three pairs at once have the losses of each alone, so that passes and accumulation change no gradient."""
    parts = [
        [make_side(seed + k, [turns], dtype=torch.float32) for k in (i, 9 + i)]
        for i, turns in enumerate(LENGTHS)
    ]
    parts = [[scored(side, seed + i) for side in both] for i, both in enumerate(parts)]
    loss = WDPO(beta=0.7)

    def together(sides):
        named = {
            name: torch.cat([getattr(one, name) for one in sides])
            for name in ("policy", "reference", "weight")
        }
        turn, trajectory = (
            torch.cat([getattr(one, name) + i * step for i, one in enumerate(sides)])
            for name, step in (("turn", 0), ("trajectory", 1))
        )
        return TurnLogprobs(turn=turn, trajectory=trajectory, **named)

    whole = loss(*(together(sides) for sides in zip(*parts, strict=True)))

    assert_close(whole, torch.cat([loss(*both) for both in parts]))


def test_no_gradient_reaches_the_scores():
    side = dataclasses.replace(CHOSEN, weight=CHOSEN.weight.clone().requires_grad_())
    policy = CHOSEN.policy.clone().requires_grad_()

    WDPO()(dataclasses.replace(side, policy=policy), REJECTED).sum().backward()

    assert side.weight.grad is None
    assert policy.grad.abs().sum() > 0


def test_the_scores_of_episodes_reach_the_loss():
    """Its own credit: a clean episode has 1, of one that strays in one of two turns 1/2; w = 3/2."""

    def played(*path):
        return Trajectory(
            Task("t"), tuple(Turn((), Action("go"), remaining=Remaining(*way)) for way in pairwise(path))
        )

    loss = WDPO()
    right, strayed = loss.credit([played(2, 1, 0), played(2, 1, 1)])
    sides = [
        TurnLogprobs.from_nested([[[-1.0], [-1.0]]], [[[-1.0], [-1.0]]], [weight])
        for weight in (right, strayed)
    ]

    assert loss.credit == CREDITS["process-score"]()
    assert loss.diagnostics(*sides)["pair_weight"].tolist() == [1.5]
    with pytest.raises(ValueError, match="the batch has no weight, and ProcessScore needs"):
        loss(*(dataclasses.replace(side, weight=None) for side in sides))


@pytest.mark.parametrize("base", [0.0, 1.0])
def test_gradcheck(assert_gradcheck, base):
    assert_gradcheck(on_scored(WDPO(base=base)))


def test_golden(assert_golden):
    assert_golden("w-dpo", WDPO)


def test_nan_padding_changes_neither_loss_nor_gradient(assert_padding_is_inert):
    assert_padding_is_inert(on_scored(WDPO(beta=0.5)))


@pytest.mark.parametrize("base", [0.0, 1.0, 1e6])
def test_extreme_values_have_finite_gradients(assert_finite, base):
    assert_finite(on_scored(WDPO(beta=10.0, base=base)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.0}, r"beta must be > 0, got 0\.0\."),
        ({"base": -0.1}, r"base must be >= 0, got -0\.1\."),
        ({"base": float("inf")}, r"base must be <= 1000000\.0, got inf\."),
        ({"base": float("nan")}, r"base must be >= 0, got nan\."),
    ],
)
def test_settings_outside_their_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        WDPO(**settings)


def test_sides_that_do_not_pair_up_or_lack_a_reference_are_refused():
    two = TurnLogprobs.from_nested([[[-1.0]], [[-1.0]]], [[[-1.0]], [[-1.0]]], [[1.0], [1.0]])
    bare = TurnLogprobs.from_nested([[[-1.0]]], weight=[[1.0]])

    with pytest.raises(ValueError, match="got 1 chosen and 2 rejected"):
        WDPO()(CHOSEN, two)
    with pytest.raises(ValueError, match="needs reference log-probabilities"):
        WDPO()(bare, REJECTED)
