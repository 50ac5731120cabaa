"""ppo-clip: the clipped policy gradient on single trajectories."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.losses import LOSSES, TurnLogprobs
from perturn.losses.ppo_clip import (
    AGGREGATES,
    KL_ESTIMATORS,
    RATIOS,
    PPOClip,
    truncated_importance,
)
from perturn.losses.turn_logprobs import turn_weights
from support.ppo_clip import nested, sampled, with_policy

QUICK = settings(derandomize=True)
LENGTHS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=4)
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "ppo_clip.json").read_text())
SETTINGS = [
    {"ratio": ratio, "aggregate": aggregate, "kl": 0.1, "kl_estimator": estimator, "dual_clip": 3.0}
    for ratio, aggregate, estimator in zip(
        [*RATIOS, "token"], AGGREGATES, [*KL_ESTIMATORS, "k3"], strict=True
    )
]
SETTINGS += [{**SETTINGS[i], "importance": over} for i, over in ((0, "token"), (0, "turn"), (1, "turn"))]
SETTINGS += [{**SETTINGS[i], "ratio_gradient": "mean", "importance": "token"} for i in (1, 2)]
every_setting = pytest.mark.parametrize("chosen", SETTINGS, ids=lambda s: " ".join(map(str, s.values())))


@QUICK
@given(
    lengths=LENGTHS,
    seed=st.integers(0, 10**6),
    factor=st.sampled_from([0.5, 1.0, 1.3]),
    ratio=st.sampled_from(list(RATIOS)),
)
def test_one_factor_for_all_is_another_range(make_side, lengths, seed, factor, ratio):
    """Factor f on every turn is clip_low f and clip_high f, and 1 is no factor: in value and in gradient."""
    side = sampled(make_side, seed, lengths)
    told = dataclasses.replace(side, clip=torch.full((side.num_turns,), factor))
    settings = {"ratio": ratio, "dual_clip": 3.0}
    found = []
    for batch, share in ((told, 1.0), (side, factor)):
        policy = batch.policy.clone().requires_grad_()
        loss = PPOClip(clip_low=0.2 * share, clip_high=0.25 * share, **settings)(with_policy(batch, policy))
        found.append((loss.detach(), *torch.autograd.grad(loss.sum(), policy)))

    assert_close(found[0], found[1], rtol=1e-6, atol=1e-7)


@QUICK
@given(lengths=LENGTHS, seed=st.integers(0, 10**6), over=st.sampled_from(["token", "turn"]))
def test_an_engine_that_agrees_with_training_needs_no_importance(make_side, lengths, seed, over):
    """At mu = pi_proximal every weight is 1; elsewhere none is above the cap, and one cap is more than another."""
    side, loss = sampled(make_side, seed, lengths), PPOClip(importance=over)
    equal = dataclasses.replace(side, proximal=side.behavior)
    weight = truncated_importance(side, over=over, cap=1.2)

    assert_close(loss(equal), PPOClip()(equal))
    assert ((weight > 0) & (weight <= 1.2)).all()
    assert (weight <= truncated_importance(side, over=over, cap=1.5)).all()


def test_an_importance_of_turns_does_not_grow_with_their_length():
    """Each token 1.1 times as likely in training: a turn of 2 and one of 200 tokens weigh 1.1."""
    lengths = [2, 200]
    mu = [[[-1.0] * n for n in lengths]]
    side = nested(mu, mu, [[1.0, 1.0]], [[[-1.0 + math.log(1.1)] * n for n in lengths]])

    assert_close(
        truncated_importance(side, over="turn", cap=2.0), torch.full((202,), 1.1, dtype=torch.float64)
    )


def test_the_object_that_users_build():
    """One turn of ratio 1.5 with A 2: -min(3, 2.4); another of ratio 1 with A -1: 1. Token mean: 1.5 x of each."""
    side = nested([[[math.log(1.5)]], [[0.0, 0.0]]], [[[0.0]], [[0.0, 0.0]]], [[2.0], [-1.0]])

    loss = LOSSES["ppo-clip"](ratio="turn")

    assert loss(side).tolist() == pytest.approx([-2.4 * 2 / 3, 2.0 * 2 / 3])
    assert LOSSES["ppo-clip"](aggregate="trajectory_mean")(side).tolist() == pytest.approx([-2.4, 1.0])
    assert LOSSES["ppo-clip"](aggregate="token_sum")(side).tolist() == pytest.approx([-2.4, 2.0])


@QUICK
@given(lengths=LENGTHS, seed=st.integers(0, 10**6), ratio=st.sampled_from(list(RATIOS)))
def test_on_policy_the_gradient_is_that_of_reinforce(make_side, lengths, seed, ratio):
    """At mu = pi, -sum_i A_i sum_j grad log pi(y_ij), whatever the ratio: each token has its own gradient."""
    side = sampled(make_side, seed, lengths)
    policy = side.policy.clone().requires_grad_()
    side = dataclasses.replace(side, behavior=side.policy)

    (gradient,) = torch.autograd.grad(
        PPOClip(ratio=ratio, aggregate="token_sum")(with_policy(side, policy)).sum(), policy
    )

    assert_close(gradient, -side.weight[side.turn_index])


@QUICK
@given(lengths=LENGTHS, seed=st.integers(0, 10**6), aggregate=st.sampled_from(list(AGGREGATES)))
def test_micro_batches_of_a_step_add_up_to_the_whole(make_side, lengths, seed, aggregate):
    """With the statistic of the whole step, a trajectory's loss does not depend on what it is batched with."""
    side, loss = sampled(make_side, seed, lengths), PPOClip(aggregate=aggregate, ratio="sequence")
    step = loss.step_statistic(side)

    parts = []
    for k in range(side.num_trajectories):
        tokens, turns = side.trajectory == k, side.turn_trajectory == k
        part = TurnLogprobs(
            side.policy[tokens],
            None,
            side.turn[tokens],
            torch.zeros_like(side.trajectory[tokens]),
            side.weight[turns],
            side.behavior[tokens],
        )
        parts.append(loss(part, step=step))

    assert_close(torch.cat(parts), loss(side))


@every_setting
def test_gradcheck(make_side, chosen):
    """Of ratios of turns and sequences with `ratio_gradient` mean; the other is by design not that of the value."""
    side = sampled(make_side)
    loss = PPOClip(**{**chosen, "ratio_gradient": "mean"})
    policy = side.policy.clone().requires_grad_()

    assert torch.autograd.gradcheck(lambda p: loss(with_policy(side, p)), (policy,))


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str(case["settings"]))
def test_golden(case):
    """Values and gradients against products of probabilities in 60 digits; 1e-10 is far above float64 rounding here.

    The second trajectory of some cases is without spread: its weights are 0, and it counts in the mean of KL alone.
    """
    spread = case["has_spread"]
    side = nested(
        GOLDEN["policy"],
        GOLDEN["behavior"],
        [[w * own for w in turns] for turns, own in zip(GOLDEN["weight"], spread, strict=True)],
        GOLDEN["proximal"],
        reference=[
            [torch.tensor(turn, dtype=torch.float64) for turn in turns] for turns in GOLDEN["reference"]
        ],
    )
    policy = side.policy.clone().requires_grad_()

    value = PPOClip(**case["settings"])(
        dataclasses.replace(side, policy=policy, has_spread=torch.tensor(spread))
    )
    (gradient,) = torch.autograd.grad(value.sum(), policy)

    expected = (torch.tensor(case[name], dtype=torch.float64) for name in ("values", "gradient"))
    assert_close((value.detach(), gradient), tuple(expected), rtol=1e-10, atol=1e-12)


@every_setting
def test_nan_padding_changes_neither_loss_nor_gradient(make_side, chosen):
    """Tokens are selected from padded rows by indexing."""
    side, loss = sampled(make_side), PPOClip(**chosen)
    width = 2 * int(side.tokens_per_trajectory.max()) + 3
    rows = {
        name: torch.full((3, width), math.nan, dtype=torch.float64)
        for name in ("policy", "reference", "behavior", "proximal")
    }
    turn = torch.full((3, width), -1)
    for k in range(3):
        own = side.trajectory == k
        positions = 2 + 2 * torch.arange(int(own.sum()))
        for name, row in rows.items():
            row[k, positions] = getattr(side, name)[own]
        turn[k, positions] = side.turn[own]
    leaf = rows["policy"].clone().requires_grad_()
    padded = dataclasses.replace(
        TurnLogprobs.from_padded(leaf, rows["reference"], turn),
        **{name: rows[name][turn >= 0] for name in ("behavior", "proximal")},
        weight=side.weight,
    )
    policy = side.policy.clone().requires_grad_()
    expected, value = loss(with_policy(side, policy)), loss(padded)
    expected.sum().backward()
    value.sum().backward()

    assert_close(value, expected, rtol=0, atol=0)
    assert_close(leaf.grad[turn >= 0], policy.grad, rtol=0, atol=0)
    assert torch.all(leaf.grad[turn < 0] == 0)


@every_setting
@pytest.mark.parametrize("nats", [50.0, -50.0])
@pytest.mark.parametrize("advantage", [10.0, -10.0])
def test_extreme_values_have_finite_gradients(chosen, nats, advantage):
    """+-50 nats on each of 4000 tokens, in float32."""
    turns = [400] * 10
    policy = torch.full((4000,), -60.0 + nats).requires_grad_()
    side = TurnLogprobs(
        policy,
        torch.full((4000,), -60.0),
        torch.arange(10).repeat_interleave(400),
        torch.zeros(4000).long(),
        torch.full((10,), advantage),
        torch.full((4000,), -60.0),
        torch.full((4000,), -60.0 - nats),
    )
    value = PPOClip(**chosen)(side)
    value.sum().backward()

    assert len(turns) == side.num_turns
    assert value.dtype == torch.float32
    assert value.isfinite().all()
    assert policy.grad.isfinite().all()


def test_what_is_logged():
    """Ratios 1.5 and 1: A 1 clips the first of two tokens; with A -1 none is clipped. One value for each token."""
    side = nested(
        [[[math.log(1.5), 0.0]], [[math.log(1.5), 0.0]]], [[[0.0, 0.0]], [[0.0, 0.0]]], [[1.0], [-1.0]]
    )

    found = PPOClip().diagnostics(side)

    assert found["ratio"].tolist() == pytest.approx([1.5, 1.0] * 2)
    assert found["clip_share"].tolist() == pytest.approx([1.0, 0.0, 0.0, 0.0])
    assert found["clipped_away"].tolist() == pytest.approx([1.5, 0.0, 0.0, 0.0])
    assert found["behavior_kl"].tolist() == pytest.approx([0.5 - math.log(1.5), 0.0] * 2)
    assert found.keys() == {"ratio", "clip_share", "clipped_away", "behavior_kl"}
    kl = PPOClip().diagnostics(dataclasses.replace(side, reference=side.behavior))["kl"]
    assert kl.tolist() == pytest.approx([1 / 1.5 - 1 + math.log(1.5), 0.0] * 2)
    assert PPOClip().rewards(side).tolist() == pytest.approx([math.log(1.5) / 2] * 2)


def test_what_is_logged_by_turn():
    """Two turns with A 1 and -2, ratios 1.5, 1 | 0.5; pi_proximal = e mu on the second turn."""
    policy = [[[math.log(1.5), 0.0], [math.log(0.5)]]]
    mu = [[[0.0, 0.0], [0.0]]]
    side = nested(policy, mu, [[1.0, -2.0]])
    found = PPOClip().turn_diagnostics(side)
    with_proximal = nested(policy, mu, [[1.0, -2.0]], [[[0.0, 0.0], [1.0]]])
    other = PPOClip(importance="turn").turn_diagnostics(
        dataclasses.replace(with_proximal, reference=with_proximal.policy)
    )
    logged = PPOClip(importance="turn").diagnostics(with_proximal)

    assert found["advantage"].tolist() == [1.0, -2.0]
    assert found["ratio"].tolist() == pytest.approx([1.25, 0.5])
    assert found["clip_share"].tolist() == pytest.approx([0.5, 1.0])
    assert found["mismatch"].tolist() == pytest.approx([(0.5 - math.log(1.5)) / 2, -0.5 + math.log(2)])
    assert "kl" not in found
    assert other["mismatch"].tolist() == pytest.approx([0.0, math.e - 2])
    assert other["kl"].tolist() == pytest.approx([0.0, 0.0], abs=1e-12)
    assert other["ratio"].tolist()[1] == pytest.approx(0.5 / math.e)
    assert logged["importance"].tolist() == pytest.approx([1.0, 1.0, 2.0])
    assert logged["importance_capped"].tolist() == pytest.approx([0.0, 0.0, 1.0])


def test_a_batch_without_weight_says_that_the_group_is_needed():
    """Its paper's credit compares trajectories, which a batch of log-probabilities does not hold."""
    bare = TurnLogprobs.from_nested([[[-1.0]]], behavior=[[[-1.0]]])

    with pytest.raises(ValueError, match="GRPO needs the whole group of a task to give one"):
        PPOClip()(bare)
    with pytest.raises(ValueError, match="needs the whole group"):
        turn_weights(bare, PPOClip().credit)


def test_what_is_missing_is_named():
    bare = TurnLogprobs.from_nested([[[-1.0]]], weight=[[1.0]])

    with pytest.raises(ValueError, match="got behavior=None"):
        PPOClip()(bare)
    with pytest.raises(
        ValueError, match="as training computes them, where `importance` is not none, got proximal"
    ):
        PPOClip(importance="token")(dataclasses.replace(bare, behavior=bare.policy))
    with pytest.raises(ValueError, match="reference=None"):
        PPOClip(kl=0.1)(dataclasses.replace(bare, behavior=bare.policy))
    assert not PPOClip().traits.needs_reference
    assert PPOClip(kl=0.1).traits.needs_reference
    assert not PPOClip().traits.needs_proximal
    assert PPOClip(importance="turn").traits.needs_proximal


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_low": 1.5}, r"clip_low must be <= 1, got 1\.5"),
        ({"clip_high": -0.1}, r"clip_high must be >= 0"),
        ({"dual_clip": 1.0}, r"dual_clip must be > 1, got 1\.0"),
        ({"kl": -1.0}, "kl must be >= 0"),
        ({"ratio": "word"}, "ratio must be one of token, turn, sequence, got 'word'"),
        ({"ratio_gradient": "turn"}, "ratio_gradient must be one of token, mean, got 'turn'"),
        ({"aggregate": "sum"}, "aggregate must be one of token_mean, turn_mean, trajectory_mean, token_sum"),
        ({"importance": "sequence"}, "importance must be one of none, token, turn, got 'sequence'"),
        ({"importance_cap": 0.0}, r"importance_cap must be > 0"),
        ({"kl_estimator": "k4"}, "kl_estimator must be one of k1, k2, k3"),
    ],
)
def test_settings_outside_their_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PPOClip(**settings)
