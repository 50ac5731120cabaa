"""KTO on single trajectories with labels."""

import dataclasses
import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.losses import LOSSES, TurnLogprobs
from perturn.losses.kto import KTO, kto_loss

QUICK = settings(derandomize=True)
LABELS = (1.0, -1.0, 1.0)

POLICY, REFERENCE = [[[0.3, 0.1], [-0.1]], [[-1.5]]], [[[-0.1, -0.1], [-1.0]], [[-1.0]]]
SIDE = TurnLogprobs.from_nested(POLICY, REFERENCE, weight=[[1.0, 1.0], [-1.0]])
OTHERS = TurnLogprobs.from_nested([[[-1.0]], [[-0.5]]], [[[-1.4]], [[-1.3]]])
"""Mismatched, with log-ratios 0.4 and 0.8, so z0 = 0.6."""


def labelled(side, labels=LABELS):
    """The side, each turn with the label of its trajectory."""
    return dataclasses.replace(side, weight=torch.tensor(labels, dtype=side.precision)[side.turn_trajectory])


def test_hand_worked_value():
    """U - z0 = 1, beta = 0.5: desirable 1 - 1/(1 + e^-0.5) = 0.377541, undesirable 1 - 1/(1 + e^0.5) = 0.622459."""
    u, z0 = torch.tensor([1.5, 1.5]), torch.tensor(0.5)
    loss = kto_loss(u, torch.tensor([True, False]), z0, beta=0.5)

    assert_close(loss, torch.tensor([0.377541, 0.622459]), atol=1e-6, rtol=0)


def test_hand_worked_trajectories():
    """U = (0.4 + 0.2 + 0.9, -0.5) = (1.5, -0.5), z0 = 0.6, beta = 0.5, lambda_D = 2, lambda_U = 3.

    Desirable: 2 sigmoid(-0.5 * 0.9) = 2 * 0.389361. Undesirable: 3 sigmoid(-0.5 * (0.6 + 0.5)) = 3 * 0.365864.
    """
    loss = LOSSES["kto"](beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)

    assert_close(loss(SIDE, OTHERS), torch.tensor([0.778722, 1.097593]), atol=1e-6, rtol=0)
    assert_close(loss.rewards(SIDE), torch.tensor([0.75, -0.25]))
    found = loss.diagnostics(SIDE, OTHERS)
    assert {name: values.tolist() for name, values in found.items()} == {
        "kl": pytest.approx([0.6, 0.6]),
        "rewards/chosen": pytest.approx([0.75]),
        "rewards/rejected": pytest.approx([-0.25]),
        "logps/chosen": pytest.approx([float(SIDE.policy[:3].sum())]),
        "logps/rejected": pytest.approx([float(SIDE.policy[3])]),
    }


def test_the_reference_point_is_never_below_zero():
    """Mismatched log-ratios of -0.4 and -0.8: z0 = 0, so the losses are sigmoid(-1.5 beta) and sigmoid(-0.5 beta)."""
    below = TurnLogprobs.from_nested([[[-1.4]], [[-1.3]]], [[[-1.0]], [[-0.5]]])

    assert_close(KTO(beta=1.0)(SIDE, below), torch.tensor([-1.5, -0.5]).sigmoid())


@QUICK
@given(seed=st.integers(0, 10**6), beta=st.floats(0.01, 5), one=st.floats(0.1, 5), other=st.floats(0.1, 5))
def test_the_two_labels_of_a_trajectory_share_what_a_weight_is(make_side, seed, beta, one, other):
    """sigmoid(x) + sigmoid(-x) = 1: L / lambda_D with one label and L / lambda_U with the other sum to 1."""
    side, others = make_side(seed, [[2, 1], [3], [1, 1, 4]]), make_side(seed + 1, [[2], [1, 3]])
    loss = KTO(beta=beta, desirable_weight=one, undesirable_weight=other)
    good, bad = (loss(labelled(side, (label,) * 3), others) for label in (1.0, -1.0))

    assert_close(good / one + bad / other, torch.ones(3, dtype=torch.float64))


@QUICK
@given(seed=st.integers(0, 10**6))
def test_what_is_told_of_the_step_is_that_of_the_mismatched_side(make_side, seed):
    """Rows in two passes that are told `mismatch` of all have the losses of one pass."""
    rows, others = make_side(seed, [[2, 1], [3], [1]]), make_side(seed + 1, [[2], [1, 3], [4]])
    loss, side = KTO(beta=1.0), labelled(rows)
    step = loss.mismatch(others)
    parts = [
        dataclasses.replace(
            TurnLogprobs(
                *(each[at] for each in (side.policy, side.reference, side.turn)), side.trajectory[at] - first
            ),
            weight=side.weight[side.turn_trajectory.ge(first) & side.turn_trajectory.lt(last)],
        )
        for first, last in ((0, 2), (2, 3))
        for at in [side.trajectory.ge(first) & side.trajectory.lt(last)]
    ]

    assert not step.requires_grad
    assert_close(torch.cat([loss(part, None, step=step) for part in parts]), loss(side, others))


def test_sizes_of_weights_weigh_the_turns():
    """Weights (2, 1): u = 2 * 0.6 + 0.9 = 2.1."""
    side = dataclasses.replace(SIDE, weight=torch.tensor([2.0, 1.0, -1.0]))

    assert_close(KTO(beta=1.0).rewards(side), torch.tensor([2.1, -0.5]))


def test_gradcheck_of_what_carries_a_gradient(pair):
    """z0 is told, since it carries none: finite differences would see it move."""
    side, others = labelled(pair[0]), pair[1]
    loss = KTO(beta=0.7, desirable_weight=1.5)
    step = loss.mismatch(others)

    def value(policy):
        return loss(dataclasses.replace(side, policy=policy), None, step=step)

    assert torch.autograd.gradcheck(value, side.policy.clone().requires_grad_())


def test_no_gradient_reaches_the_mismatched_side(pair):
    side, others = (dataclasses.replace(one, policy=one.policy.clone().requires_grad_()) for one in pair)
    KTO()(labelled(side), others).sum().backward()

    assert side.policy.grad.abs().sum() > 0
    assert others.policy.grad is None


def test_golden(assert_golden):
    def kto(**chosen):
        loss = KTO(**chosen)
        return lambda side, others: loss(labelled(side), others)

    assert_golden("kto", kto)


def test_nan_padding_changes_neither_loss_nor_gradient(assert_padding_is_inert):
    loss = KTO(beta=0.5)

    assert_padding_is_inert(lambda side, others: loss(labelled(side), others))


@pytest.mark.parametrize("label", [1.0, -1.0])
def test_extreme_values_have_finite_gradients(assert_finite, label):
    loss = KTO(beta=10.0)

    assert_finite(lambda side, others: loss(labelled(side, (label,) * 2), others))


def test_agreement_with_trl():
    """TRL's `KTOTrainer` on a pass of its own, where its model's answers are given: losses and z0 of three rows.

    Its KL sequences are ours; both clamp z0 at 0 and multiply each side by its weight.
    """
    u, mismatch = torch.tensor([1.5, -0.5, 0.2]), torch.tensor([0.4, 0.8, -0.3])
    found = trl_losses(u, mismatch, [True, False, True], beta=0.5, desirable=2.0, undesirable=3.0)
    side = TurnLogprobs.from_nested(
        [[[1.0], [0.5]], [[-0.5]], [[0.2]]],
        [[[0.0], [0.0]], [[0.0]], [[0.0]]],
        weight=[[1.0, 1.0], [-1.0], [1.0]],
    )
    ours = KTO(beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)(side, None, step=mismatch)

    assert_close(ours.mean(), found)


def trl_losses(u, mismatch, labels, *, beta, desirable, undesirable):
    """The loss that TRL's trainer computes, where log-ratios are given; its tokens are one per row."""

    class Model(torch.nn.Module):
        """Says the log-ratios that it is given, of one loss token a row."""

        def forward(self, input_ids, **_):
            values = {1: u, 2: mismatch}[int(input_ids[0, 0])]
            return SimpleNamespace(
                log_probs=values[:, None], entropy=torch.zeros(3, 1), mean_logits=torch.zeros(3, 1)
            )

    rows, mask = torch.ones(3, 2, dtype=torch.long), torch.tensor([[0, 1]] * 3)
    batch = {
        **{"input_ids": rows, "attention_mask": torch.ones_like(rows), "completion_mask": mask},
        **{"KL_input_ids": 2 * rows, "KL_attention_mask": torch.ones_like(rows), "KL_completion_mask": mask},
        **{"label": torch.tensor(labels), "ref_logps": torch.zeros(3), "ref_KL_logps": torch.zeros(3)},
    }
    trainer = object.__new__(pytest.importorskip("trl").KTOTrainer)
    trainer.accelerator = Accelerator(cpu=True)
    trainer.__dict__.update(
        loss_type="kto", calculate_KL=True, precompute_ref_logps=True, beta=beta, aux_loss_enabled=False
    )
    trainer.__dict__.update(desirable_weight=desirable, undesirable_weight=undesirable, _tp_size=1)
    trainer.model, trainer._total_train_tokens = Model(), 0
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    return trainer._compute_loss(trainer.model, batch, return_outputs=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.0}, r"beta must be > 0, got 0\.0\."),
        ({"beta": math.nan}, r"beta must be > 0, got nan\."),
        ({"desirable_weight": -1.0}, r"desirable_weight must be > 0, got -1\.0\."),
        ({"undesirable_weight": 0.0}, r"undesirable_weight must be > 0, got 0\.0\."),
    ],
)
def test_settings_outside_their_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        KTO(**settings)


def test_rows_without_labels_or_without_a_reference_point_are_refused():
    with pytest.raises(ValueError, match="kto needs labels, got weight=None"):
        KTO()(dataclasses.replace(SIDE, weight=None), OTHERS)
    with pytest.raises(ValueError, match="kto needs mismatched trajectories, got None"):
        KTO()(SIDE, None)
    with pytest.raises(ValueError, match="needs reference log-probabilities"):
        KTO()(dataclasses.replace(SIDE, reference=None), OTHERS)


@pytest.mark.parametrize("weight", [[[1.0, -1.0], [-1.0]], [[3.0, -1.0], [-1.0]], [[1.0, 1.0], [0.0]]])
def test_weights_that_are_no_label_are_refused(weight):
    side = TurnLogprobs.from_nested(POLICY, REFERENCE, weight=weight)

    with pytest.raises(ValueError, match="all weights of a trajectory to be > 0, or all < 0"):
        KTO()(side, OTHERS)
