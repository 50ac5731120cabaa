"""Forms of ppo-clip that have one value and two gradients, and TRL's GRPOTrainer beside both."""

import dataclasses
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.losses import TurnLogprobs
from perturn.losses.ppo_clip import AGGREGATES, PPOClip

QUICK = settings(derandomize=True)


def nested(policy, weight, **others):
    """A batch in float64 that was sampled by the policy itself, unless others say otherwise."""

    def deep(value):
        return [[torch.tensor(turn, dtype=torch.float64) for turn in turns] for turns in value]

    others = {"behavior": policy} | others
    weight = [torch.tensor(turns, dtype=torch.float64) for turns in weight]
    return TurnLogprobs.from_nested(
        deep(policy), weight=weight, **{name: deep(value) for name, value in others.items()}
    )


def value_and_gradient(loss, side, step=None):
    """The sum of a loss over trajectories, and its derivative by the log-probability of each token."""
    policy = side.policy.detach().clone().requires_grad_()
    value = loss(dataclasses.replace(side, policy=policy), step=step).sum()
    (gradient,) = torch.autograd.grad(value, policy)
    return value.detach(), gradient


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        ("token_mean", [-4 / 3 + 0.05, 4 / 3 + 0.025, 0.075]),
        ("turn_mean", [-4 / 3 + 0.06, 4 / 3 + 0.03, 0.06]),
        ("trajectory_mean", [-1 + 0.05, 2 + 0.05, 0.05]),
        ("token_sum", [-2 + 0.1, 2 + 0.05, 0.15]),
    ],
)
def test_hand_worked_two_means(aggregate, expected):
    """A = 1, -2 and none on turns of 1 1 | 1 | 2 1 tokens, pi = mu, and k1 = 0.5 of each token times kl = 0.1.

    The clipped sums are -2, 2, 0; two trajectories with a spread have 3 tokens and 3 turns, so the sums times 2/3. The
    sums of KL are 1, 0.5, 1.5 over tokens and 1, 0.5, 1 over turns; times 3 trajectories / 6 tokens, or / 5 turns.
    """
    policy = [[[-1.0], [-2.0]], [[-3.0]], [[-1.0, -1.0], [-2.0]]]
    reference = [[[u - 0.5 for u in turn] for turn in turns] for turns in policy]
    side = nested(policy, [[1.0, 1.0], [-2.0], [0.0, 0.0]], reference=reference)
    side = dataclasses.replace(side, has_spread=torch.tensor([True, True, False]))
    loss = PPOClip(aggregate=aggregate, kl=0.1, kl_estimator="k1")

    assert loss(side).tolist() == pytest.approx(expected)


@QUICK
@given(seed=st.integers(0, 10**6), aggregate=st.sampled_from(list(AGGREGATES)))
def test_the_limit_of_kl_is_the_loss_without_the_trajectories_that_have_no_spread(make_side, seed, aggregate):
    """At kl 1e-12 with all trajectories as at kl 0 with the others alone: value and gradient of each of these."""
    side = noisy(make_side, seed)
    last = side.trajectory == 2
    weight = torch.where(side.turn_trajectory == 2, 0.0, side.weight)
    whole = dataclasses.replace(side, weight=weight, has_spread=torch.tensor([True, True, False]))
    others = TurnLogprobs(
        **{name: getattr(side, name)[~last] for name in ("policy", "reference", "turn", "trajectory")},
        behavior=side.behavior[~last],
        weight=side.weight[side.turn_trajectory != 2],
    )
    limit, of_all = value_and_gradient(PPOClip(kl=1e-12, aggregate=aggregate), whole)
    none, of_others = value_and_gradient(PPOClip(aggregate=aggregate), others)

    assert_close(limit, none)
    assert_close(
        of_all, torch.cat([of_others, torch.zeros(int(last.sum()), dtype=torch.float64)]), atol=1e-9, rtol=0
    )


def test_hand_worked_importance_in_both_forms_of_a_sequence():
    """A sequence of two tokens, pi = pi_proximal, A = 1, importance weights 2 and 0.5: the value is -2.5 in both.

    GSPO-token gives each token its own weight: -2 and -0.5. GSPO gives each the mean of both: -1.25 and -1.25.
    """
    proximal = [[[-1.0, -2.0]]]
    mu = [[[-1.0 - float(torch.log(torch.tensor(2.0))), -2.0 - float(torch.log(torch.tensor(0.5)))]]]
    side = nested(proximal, [[1.0]], proximal=proximal, behavior=mu)
    found = {}
    for form in ("token", "mean"):
        loss = PPOClip(ratio="sequence", ratio_gradient=form, importance="token", aggregate="token_sum")
        found[form] = value_and_gradient(loss, side)

    assert found["token"][0].item() == found["mean"][0].item() == pytest.approx(-2.5)
    assert found["token"][1].tolist() == pytest.approx([-2.0, -0.5])
    assert found["mean"][1].tolist() == pytest.approx([-1.25, -1.25])


def test_hand_worked_turn_weights_in_both_forms_of_a_sequence():
    """Two turns of one token with A 1 and -1, pi = mu. GSPO-token: -1 and 1. GSPO: the mean of A is 0, so 0 and 0."""
    side = nested([[[-1.0], [-2.0]]], [[1.0, -1.0]])
    found = {
        form: value_and_gradient(PPOClip(ratio="sequence", ratio_gradient=form, aggregate="token_sum"), side)[
            1
        ].tolist()
        for form in ("token", "mean")
    }

    assert found == {"token": pytest.approx([-1.0, 1.0]), "mean": pytest.approx([0.0, 0.0])}


def test_hand_worked_turn_mean_in_both_forms_of_a_sequence():
    """A turn of one token and one of three, A = 1, pi = mu. A token of the mean over turns counts 1/2, or 1/6.

    GSPO-token keeps these. GSPO gives each of the four tokens a quarter of their sum, 1.
    """
    side = nested([[[-1.0], [-2.0, -1.0, -3.0]]], [[1.0, 1.0]])
    found = {
        form: value_and_gradient(PPOClip(ratio="sequence", ratio_gradient=form, aggregate="turn_mean"), side)[
            1
        ].tolist()
        for form in ("token", "mean")
    }

    assert found["token"] == pytest.approx([-1 / 2, -1 / 6, -1 / 6, -1 / 6])
    assert found["mean"] == pytest.approx([-1 / 4] * 4)


@QUICK
@given(
    seed=st.integers(0, 10**6),
    aggregate=st.sampled_from(list(AGGREGATES)),
    importance=st.sampled_from(["none", "turn"]),
    case=st.sampled_from(["turn", "sequence"]),
)
def test_forms_agree_where_all_tokens_of_a_ratio_count_alike(make_side, seed, aggregate, importance, case):
    """A turn has one advantage, and no importance of its tokens. A sequence has one where all its turns have.

    A sequence needs more: no mean over turns of unequal length, and no importance of its turns.
    """
    if case == "sequence":
        aggregate, importance = aggregate.replace("turn", "token"), "none"
    side = noisy(make_side, seed, one_weight=case == "sequence")
    forms = [
        value_and_gradient(
            PPOClip(ratio=case, ratio_gradient=form, aggregate=aggregate, importance=importance), side
        )
        for form in ("token", "mean")
    ]

    assert_close(forms[0], forms[1])


@QUICK
@given(seed=st.integers(0, 10**6), ratio=st.sampled_from(["turn", "sequence"]))
def test_forms_have_one_value_and_one_sum_of_gradients_over_the_tokens_of_a_ratio(make_side, seed, ratio):
    """The mean form spreads over the tokens of a turn, or of a sequence, what the token form has on each of them."""
    side = noisy(make_side, seed)
    (value, token), (same, mean) = (
        value_and_gradient(PPOClip(ratio=ratio, ratio_gradient=form, importance="token"), side)
        for form in ("token", "mean")
    )
    over = side.mean_by_turn if ratio == "turn" else side.mean_by_trajectory
    index = side.turn_index if ratio == "turn" else side.trajectory

    assert_close(value, same)
    assert_close(over(token)[index], mean)


def noisy(make_side, seed, one_weight=False):
    """A batch whose sampling policy and pi_proximal differ.

    With one advantage a trajectory, or one per turn.
    """
    side = make_side(seed, [[2, 1, 3], [4], [1, 2]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)

    def noise():
        return 0.2 * torch.randn(len(side.policy), generator=generator, dtype=torch.float64)

    weight = torch.randn(side.num_turns, generator=generator, dtype=torch.float64)
    if one_weight:
        weight = weight[side.turn_trajectory]
    behavior, proximal = side.policy + noise(), side.policy + noise()
    return dataclasses.replace(side, behavior=behavior, proximal=proximal, weight=weight)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("loss_type", "aggregate"), [("dapo", "token_mean"), ("grpo", "trajectory_mean")])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_trl_has_the_value_and_the_gradient_of_the_mean_form(
    make_side, level, loss_type, aggregate, corrected, beta
):
    """With one advantage a trajectory; TRL's correction for vLLM is `importance: token` where it truncates tokens."""
    side = noisy(make_side, 3, one_weight=True)
    theirs = trl_gradient(side, level=level, loss_type=loss_type, corrected=corrected, beta=beta)
    how = {"ratio": level, "aggregate": aggregate, "kl": beta, "importance": "token" if corrected else "none"}
    side = side if corrected else dataclasses.replace(side, behavior=side.proximal)
    value, mean = value_and_gradient(PPOClip(ratio_gradient="mean", **how), side)
    _, token = value_and_gradient(PPOClip(ratio_gradient="token", **how), side)

    assert_close(value / 3, theirs[0])
    assert_close(mean / 3, theirs[1])
    differs = (token / 3 - theirs[1]).norm() / theirs[1].norm()
    assert differs > 0.05 if corrected and level == "sequence" else differs < 1e-9


@pytest.mark.parametrize("kl", [0.0, 1e-12, 0.1])
def test_trl_counts_rows_without_spread_as_ours_do_where_nobody_says_that_they_are(make_side, kl):
    """The second trajectory has A 0. TRL divides by its tokens too, as ours does unless `has_spread` is False.

    Then the clipped term is a mean over the tokens of the two others, times their share of two in three.
    """
    side = noisy(make_side, 4, one_weight=True)
    weight = torch.where(side.turn_trajectory == 1, 0.0, side.weight)
    side = dataclasses.replace(side, behavior=side.proximal, weight=weight)
    without = dataclasses.replace(side, has_spread=torch.tensor([True, False, True]))
    _, theirs = trl_gradient(side, level="token", loss_type="dapo", corrected=False, beta=0.0)
    _, ours = value_and_gradient(PPOClip(kl=kl), side)
    _, alone = value_and_gradient(PPOClip(), without)
    _, pulled = value_and_gradient(PPOClip(kl=kl), without)
    _, only = value_and_gradient(PPOClip(kl=kl), dataclasses.replace(side, weight=torch.zeros_like(weight)))

    assert side.tokens_per_trajectory.tolist() == [6, 4, 3]
    assert_close(ours - only, 3 * theirs)  # less the gradient of KL
    assert_close(alone, 3 * theirs * (2 / 9) / (3 / 13))
    assert_close(pulled - only, alone)


def trl_gradient(side, *, level, loss_type, corrected, beta):
    """The loss that TRL's trainer computes of the tokens of a batch, and its derivative by each log-probability."""
    width = int(side.tokens_per_trajectory.max())
    rows, mask = side.num_trajectories, torch.zeros(side.num_trajectories, width, dtype=torch.long)
    for k, n in enumerate(side.tokens_per_trajectory.tolist()):
        mask[k, :n] = 1

    def padded(values):
        return torch.zeros(rows, width, dtype=torch.float64).masked_scatter(mask.bool(), values)

    leaf = side.policy.clone().requires_grad_()
    logprobs = padded(leaf)
    trainer = object.__new__(pytest.importorskip("trl").GRPOTrainer)
    trainer.accelerator = Accelerator(cpu=True)
    trainer.__dict__.update(
        {
            **{"aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None},
            **{"importance_sampling_level": level, "loss_type": loss_type, "beta": beta},
            **{"epsilon_low": 0.2, "epsilon_high": 0.2, "use_vllm": corrected},
            **{"vllm_importance_sampling_correction": True, "current_gradient_accumulation_steps": 1},
            **{"args": SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1)},
            **{"_entropy_bonus_enabled": False, "model": SimpleNamespace(training=True)},
            "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
            "_get_per_token_logps_and_entropies": lambda *_, **__: (
                logprobs,
                torch.zeros_like(logprobs),
                None,
            ),
        }
    )
    first_turns = torch.cat([side.turn_trajectory.new_ones(1), side.turn_trajectory.diff()]).bool()
    inputs = {
        "prompt_ids": mask[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": side.weight[first_turns],
        "old_per_token_logps": padded(side.proximal),
        "ref_per_token_logps": padded(side.reference),
        "importance_sampling_ratio": padded((side.proximal - side.behavior).exp().clamp(max=2.0)),
        "num_items_in_batch": mask.sum(),
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]
