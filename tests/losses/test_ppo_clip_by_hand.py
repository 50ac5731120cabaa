"""The clipped policy gradient against values worked by hand."""

import dataclasses
import math

import pytest
import torch
from torch.testing import assert_close

from perturn.losses import TurnLogprobs
from perturn.losses.ppo_clip import (
    AGGREGATES,
    KL_ESTIMATORS,
    RATIOS,
    PPOClip,
    clipped_surrogate,
    truncated_importance,
)
from support.ppo_clip import nested, with_policy

CLIP = [1.5, 0.5, 1.5, 0.5]


def test_hand_worked_clip():
    """Ratios 1.5, 1.5, 0.5, 0.5, 4 with A 1, -1, 1, -1, -1: -1.2, 1.5, -0.5, 0.8, 4; dual clip 3 cuts the last."""
    log_ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 4.0]).log()
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0])

    loss = clipped_surrogate(log_ratio, advantage, clip_low=0.2, clip_high=0.2)
    dual = clipped_surrogate(log_ratio, advantage, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    higher = clipped_surrogate(log_ratio, advantage, clip_low=0.2, clip_high=0.4)

    assert_close(loss, torch.tensor([-1.2, 1.5, -0.5, 0.8, 4.0]))
    assert_close(dual, torch.tensor([-1.2, 1.5, -0.5, 0.8, 3.0]))
    assert_close(higher[0], torch.tensor(-1.4))


def test_hand_worked_clip_of_each_turn():
    """Ratios 1.25 | 1.25 | 0.75 | 0.75 with A 1 1 -1 -1 and factors 1.5 0.5 1.5 0.5 on 0.2: ranges 0.3 and 0.1.

    Within 1.3 the first is -1.25, the second is cut to -1.1; within 0.7 the third is 0.75, the fourth is cut to 0.9.
    Where a term is cut, its gradient is 0; elsewhere it is the gradient of -rho A.
    Without factors, 1.2 and 0.8 cut all four.
    """
    policy = torch.tensor([1.25, 1.25, 0.75, 0.75], dtype=torch.float64).log().requires_grad_()
    side = nested([[[0.0], [0.0], [0.0], [0.0]]], [[[0.0]] * 4], [[1.0, 1.0, -1.0, -1.0]], clip=[CLIP])
    loss = PPOClip(aggregate="token_sum")

    value = loss(with_policy(side, policy)).sum()
    (gradient,) = torch.autograd.grad(value, policy)
    bare = dataclasses.replace(with_policy(side, policy.detach()), clip=None)
    logged = loss.turn_diagnostics(with_policy(side, policy.detach()))

    assert value.item() == pytest.approx(-1.25 - 1.1 + 0.75 + 0.9)
    assert gradient.tolist() == pytest.approx([-1.25, 0.0, 0.75, 0.0])
    assert float(loss(bare)) == pytest.approx(-1.2 - 1.2 + 0.8 + 0.8)
    assert logged["clip_share"].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert logged["clip"].tolist() == CLIP
    assert loss.turn_diagnostics(bare)["clip_share"].tolist() == [1.0] * 4
    assert "clip" not in loss.turn_diagnostics(bare)


def test_both_ends_have_their_own_range():
    """Factor 2 on 0.1 below and 0.3 above: ratios 0.85 and 1.5 are within 0.8 and 1.6."""
    side = nested([[[math.log(0.85)], [math.log(1.5)]]], [[[0.0], [0.0]]], [[-1.0, 1.0]])
    loss = PPOClip(clip_low=0.1, clip_high=0.3, aggregate="token_sum")

    assert float(loss(side)) == pytest.approx(0.9 - 1.3)
    assert float(loss(dataclasses.replace(side, clip=2 * torch.ones(2)))) == pytest.approx(0.85 - 1.5)


def test_hand_worked_ratios():
    """Log-ratios 0.3, -0.1 | 0.4, 0: turn means 0.1 and 0.2, trajectory mean 0.15."""
    side = nested([[[-0.2, -0.6], [-0.3, -0.9]]], [[[-0.5, -0.5], [-0.7, -0.9]]], [[1.0, 1.0]])
    log_ratio = side.policy - side.behavior

    found = {name: ratio(side, log_ratio).exp().tolist() for name, ratio in RATIOS.items()}

    assert found["token"] == pytest.approx([1.349859, 0.904837, 1.491825, 1.0], abs=1e-6)
    assert found["turn"] == pytest.approx([1.105171, 1.105171, 1.221403, 1.221403], abs=1e-6)
    assert found["sequence"] == pytest.approx([1.161834] * 4, abs=1e-6)


def test_hand_worked_aggregates():
    """Token losses 2 4 | 6 of one trajectory, 1 of another, 3 | 5 of a third.

    21 over 6 tokens; turn means 3, 6, 1, 3, 5 over 5; trajectory means 4, 1, 4 over 3; sums 12, 1, 8 over 3.
    """
    side = TurnLogprobs.from_nested([[[0.0] * 2, [0.0]], [[0.0]], [[0.0], [0.0]]])
    values = torch.tensor([2.0, 4.0, 6.0, 1.0, 3.0, 5.0])

    counts = {name: PPOClip(aggregate=name).step_statistic(side)[:, 0] for name in AGGREGATES}
    found = {name: float(reduce(side, values, counts[name]).mean()) for name, reduce in AGGREGATES.items()}

    assert found == pytest.approx(
        {"token_mean": 21 / 6, "turn_mean": 18 / 5, "trajectory_mean": 3.0, "token_sum": 7.0}
    )


def test_hand_worked_kl():
    """U = 0.5, -0.3: k1 is u, k2 0.125 and 0.045, k3 e^-0.5 - 0.5 and e^0.3 - 1.3; their gradients."""
    u = torch.tensor([0.5, -0.3], dtype=torch.float64, requires_grad=True)
    expected = {
        "k1": ([0.5, -0.3], [1.0, 1.0]),
        "k2": ([0.125, 0.045], [0.5, -0.3]),
        "k3": ([0.106531, 0.049859], [0.393469, -0.349859]),
    }

    for name, estimate in KL_ESTIMATORS.items():
        value = estimate(u)
        (gradient,) = torch.autograd.grad(value.sum(), u)
        assert value.tolist() == pytest.approx(expected[name][0], abs=1e-6)
        assert gradient.tolist() == pytest.approx(expected[name][1], abs=1e-6)


def test_hand_worked_importance():
    """Log proximal/mu ln 1.5, ln 6 | ln 0.5: tokens 1.5, cap 2, 0.5; turns sqrt(9) = 3 -> 2 twice, 0.5.

    With pi = 1.1 proximal and A 1: each loss is -1.1 times its weight, and the KL is not weighed.
    """
    mu = [[[-3.0, -3.0], [-1.0]]]
    proximal = [[[-3 + math.log(1.5), -3 + math.log(6)], [-1 + math.log(0.5)]]]
    policy = [[[u + math.log(1.1) for u in turn] for turn in turns] for turns in proximal]
    side = nested(policy, mu, [[1.0, 1.0]], proximal)

    weights = [truncated_importance(side, over=over, cap=2.0).tolist() for over in ("token", "turn")]
    loss = PPOClip(importance="token", aggregate="token_sum")(side)
    by_turn = PPOClip(importance="turn", aggregate="token_sum", importance_cap=4.0)(side)
    pulled = PPOClip(importance="token", aggregate="token_sum", kl=1.0, kl_estimator="k1")(
        dataclasses.replace(side, reference=side.policy - 1.0)
    )

    assert weights[0] == pytest.approx([1.5, 2.0, 0.5])
    assert weights[1] == pytest.approx([2.0, 2.0, 0.5])
    assert float(loss) == pytest.approx(-1.1 * 4.0)
    assert float(by_turn) == pytest.approx(-1.1 * 6.5)
    assert float(pulled) == pytest.approx(-1.1 * 4.0 + 3)
