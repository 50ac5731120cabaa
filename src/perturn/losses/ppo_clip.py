"""Clipped policy gradient on single trajectories, each turn with the advantage that a credit wrote."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from perturn.bounds import Bound, OneOf, bounded
from perturn.credit import Credit
from perturn.credit.grpo import GRPO
from perturn.losses.protocol import LossTraits
from perturn.losses.turn_logprobs import TurnLogprobs, turn_weights

_MOST = 20.0
"""Where a log-ratio is clamped before it is exponentiated, in nats; the same as in verl."""


def token_ratio(side: TurnLogprobs, log_ratio: Tensor) -> Tensor:
    """Return log pi/mu of each token, in nats [tokens]."""
    return log_ratio


def turn_ratio(side: TurnLogprobs, log_ratio: Tensor) -> Tensor:
    """Return the mean log pi/mu of each token's turn, in nats [tokens]."""
    return side.mean_by_turn(log_ratio)[side.turn_index]


def sequence_ratio(side: TurnLogprobs, log_ratio: Tensor) -> Tensor:
    """Return the mean log pi/mu of each token's trajectory, in nats [tokens]."""
    return side.mean_by_trajectory(log_ratio)[side.trajectory.long()]


RATIOS: dict[str, Callable[[TurnLogprobs, Tensor], Tensor]] = {
    "token": token_ratio,
    "turn": turn_ratio,
    "sequence": sequence_ratio,
}
"""Log of the ratio of each token, by name; from the log-ratio of each token, in nats [tokens]."""


def straight_through(mean: Tensor, log_ratio: Tensor) -> Tensor:
    """Return the mean log pi/mu with the gradient of each token's own log pi, in nats [tokens].

        log s_j = sg[m_j] + u_j - sg[u_j],   u = log pi/mu, m = its mean, sg without gradient

    Source: Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071, Eqs. 14-15.
    Differs: nothing; in logarithms.

    Args:
        mean: m, from one of RATIOS, in nats [tokens].
        log_ratio: u, in nats [tokens].
    """
    return mean.detach() + (log_ratio - log_ratio.detach())


RATIO_GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": straight_through,
    "mean": lambda mean, log_ratio: mean,
}
"""Log of each token's ratio, by the name of its gradient; from the mean and the token's own, in nats [tokens]."""


def clipped_surrogate(
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    clip_low: float | Tensor,
    clip_high: float | Tensor,
    dual_clip: float | None = None,
) -> Tensor:
    """Return negative clipped surrogate of PPO.

        L = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A),   rho = pi / mu

    With `dual_clip` c, L is at most c |A| where A < 0.

    Source: Schulman et al. 2017, arXiv:1707.06347, Eq. 7; asymmetric clipping: DAPO, arXiv:2503.14476; dual clip:
    Ye et al. 2020, arXiv:1912.09729.
    Differs: log rho is clamped to 20 nats on either side, where it has no gradient any more.

    Args:
        log_ratio: log rho, in nats [tokens].
        advantage: A of each token's turn [tokens].
        clip_low: How far rho may fall below 1; or of each token [tokens].
        clip_high: How far rho may rise above 1; or of each token [tokens].
        dual_clip: c > 1; None: no such bound.

    Returns:
        Loss, in units of the advantage [tokens].
    """
    ratio = log_ratio.clamp(-_MOST, _MOST).exp()
    bounds: dict[str, Any] = {"min": 1 - clip_low, "max": 1 + clip_high}  # both are numbers, or both tensors
    loss = -torch.minimum(ratio * advantage, ratio.clamp(**bounds) * advantage)
    if dual_clip is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -dual_clip * advantage), loss)


def truncated_importance(side: TurnLogprobs, *, over: str, cap: float) -> Tensor:
    """Return the weight of each token that makes up for what the engine sampled with and training computes otherwise.

        w = min(pi_proximal / mu, cap)

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", truncated
    importance sampling. With `over` token, the ratio of the token.
    Differs: with `over` turn, it is the geometric mean of the ratios of the turn's tokens. So the weight of a long turn
    is no further from 1 than the ratio of a short answer. The log-ratio is clamped to 20 nats on either side.

    Args:
        side: With `behavior` and `proximal`.
        over: token or turn.
        cap: Largest weight.

    Returns:
        Weights, without unit and without gradient [tokens].
    """
    log_ratio = _difference(side, "proximal", "behavior").detach()
    if over == "turn":
        log_ratio = side.mean_by_turn(log_ratio)[side.turn_index]
    return log_ratio.clamp(-_MOST, _MOST).exp().clamp(max=cap)


def _difference(side: TurnLogprobs, one: str, other: str) -> Tensor:
    """Return the difference of two log-probabilities of each token, in nats [tokens]; the policy's has a gradient."""
    found: list[Tensor] = []
    for name in (one, other):
        values: Tensor | None = getattr(side, name)
        if values is None:
            raise ValueError(f"ppo-clip needs {_POLICIES[name]}, got {name}=None. {_PASS.format(name)}")
        found.append((values if name == "policy" else values.detach()).to(side.precision))
    return found[0] - found[1]


_POLICIES = {
    "behavior": "the log-probabilities of the policy that sampled",
    "proximal": "the log-probabilities of that policy as training computes them, where `importance` is not none",
}
_PASS = "Pass {}= when building TurnLogprobs."

IMPORTANCE = ("none", "token", "turn")
"""Over what the importance weight is taken."""


def k1(log_ratio: Tensor) -> Tensor:
    """Return u = log pi/pi_ref, in nats [tokens]; as a loss, its gradient has expectation 0."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Return u^2 / 2, in nats [tokens]; as a loss, it has the gradient of KL in expectation."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """Return exp(-u) - 1 + u, in nats [tokens]; never negative, and unbiased as a value."""
    return torch.expm1(-log_ratio.clamp(min=-_MOST)) + log_ratio


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""Estimates of KL(pi, pi_ref) from one token, by name; Schulman 2020, "Approximating KL Divergence"."""


def _mean_over_step(sums: Tensor, counts: Tensor) -> Tensor:
    """Scale sums of trajectories, so that the mean over the counted trajectories is the mean over all they hold.

    A step that counts no trajectory has sums of 0, which stay 0.
    """
    return sums * (counts > 0).sum() / counts.sum().clamp(min=1)


AGGREGATES: dict[str, Callable[[TurnLogprobs, Tensor, Tensor], Tensor]] = {
    "token_mean": lambda side, values, counts: _mean_over_step(side.sum_by_trajectory(values), counts),
    "turn_mean": lambda side, values, counts: _mean_over_step(
        side.sum_over_turns(side.mean_by_turn(values)), counts
    ),
    "trajectory_mean": lambda side, values, counts: side.mean_by_trajectory(values),
    "token_sum": lambda side, values, counts: side.sum_by_trajectory(values),
}
"""Functions from a value of each token to a value of each trajectory, by name. The mean over trajectories is then the
mean over all tokens, over all turns, over trajectories, or the mean of sums. The third argument holds the tokens, or
turns, of every trajectory of the optimizer step; 0 for a trajectory that the mean is not over."""


@dataclass(frozen=True)
@bounded
class PPOClip:
    """Clipped policy gradient with an advantage for each turn, and an optional divergence from a reference.

        L_ij = -min(rho_ij A_i, clip(rho_ij, 1 - clip_low, 1 + clip_high) A_i) + kl KL_ij

    rho is pi/mu of a token (`ratio` token), or exp of the mean log pi/mu of its turn (turn) or its trajectory
    (sequence). mu is the policy that sampled; `behavior` has its log-probabilities. With `ratio_gradient` token,
    `straight_through` gives each token the gradient of its own log pi. With mean, the gradient is the derivative of
    the ratio.

    The two terms have a mean each. `token_mean` and `turn_mean` divide the clipped term by the tokens or turns of the
    trajectories whose group has a spread, times the share of these trajectories in the step; they divide KL by the
    tokens or turns of all trajectories. So the gradient is continuous at `kl` 0, where a run leaves groups without
    spread out of training.

    With `importance`, there is a third policy: pi_proximal is the policy that sampled, as training computes it. Then
    rho is pi/pi_proximal, and the clipped term is multiplied by `truncated_importance`.

    If a credit also wrote `clip`, clip_low and clip_high of a turn are multiplied by this number.

    Source: Schulman et al. 2017, arXiv:1707.06347, Eq. 7; `sequence`: GSPO-token, Zheng et al. 2025, arXiv:2507.18071,
    Eqs. 14-15, and with `ratio_gradient` mean its GSPO, Eqs. 5 and 7; `turn`: Turn-PPO of ST-PPO, Li et al. 2025,
    arXiv:2511.20718; a clip range of each turn: A2TGPO, Chen et al. 2026, arXiv:2605.06200, its released code; see also
    `clipped_surrogate`, `straight_through`, `truncated_importance` and `KL_ESTIMATORS`.
    Differs: without `importance`, mu has the engine's log-probabilities at sampling, so a difference between engine
    and training is part of the ratio and is clipped with it. `token_mean` and `turn_mean` couple the trajectories of
    a step, as in DAPO. DAPO samples other groups instead of groups without spread, and TRL divides both terms by all
    tokens. KL is not multiplied by rho; TRL does so with `use_bias_correction_kl`. The clipping-bias correction of
    ST-PPO is not here: it divides the gradient by a norm, over all parameters, of the gradient that the clip removes.
    This norm is not a function of log-probabilities. The size of the clipped terms is logged as `clipped_away`.
    """

    credit: ClassVar[Credit] = GRPO()

    clip_low: Annotated[float, Bound(least=0, most=1)] = 0.2
    """How far the ratio may fall below 1 before it is clipped, in [0, 1]."""

    clip_high: Annotated[float, Bound(least=0)] = 0.2
    """How far the ratio may rise above 1 before it is clipped; >= 0."""

    ratio: Annotated[str, OneOf(tuple(RATIOS))] = "token"
    """Unit of a ratio: token, turn or sequence."""

    ratio_gradient: Annotated[str, OneOf(tuple(RATIO_GRADIENTS))] = "token"
    """Gradient of a ratio of a turn or a sequence: token (of each token's own log-probability, GSPO-token) or mean
    (of the mean log-ratio, GSPO and TRL). Used only if `ratio` is not token."""

    aggregate: Annotated[str, OneOf(tuple(AGGREGATES))] = "token_mean"
    """How tokens are averaged into the loss: token_mean (over all tokens of the step), turn_mean, trajectory_mean or
    token_sum."""

    kl: Annotated[float, Bound(least=0)] = 0.0
    """Weight of KL to the reference, in units of the advantage per nat; >= 0. 0: no reference is needed."""

    kl_estimator: Annotated[str, OneOf(tuple(KL_ESTIMATORS))] = "k3"
    """Estimator of KL: k3, k2 or k1."""

    dual_clip: Annotated[float, Bound(above=1)] | None = None
    """Largest loss of a turn with a negative advantage, relative to its size; > 1. None: no bound."""

    importance: Annotated[str, OneOf(tuple(IMPORTANCE))] = "none"
    """Whether a truncated importance weight corrects the difference between engine and training: none, token (a
    weight per token) or turn (a weight per turn)."""

    importance_cap: Annotated[float, Bound(above=0)] = 2.0
    """Largest importance weight, without unit; > 0. Used only if `importance` is not none."""

    @property
    def traits(self) -> LossTraits:
        """Traits of the loss: `kl` needs a reference, and `importance` needs the policy as training begins."""
        return LossTraits(
            needs_behavior=True,
            needs_reference=self.kl > 0,
            needs_proximal=self.importance != "none",
            reads_clip=True,
            step_statistic=True,
            diagnostics=True,
            turn_diagnostics=True,
        )

    def __call__(
        self, chosen: TurnLogprobs, rejected: TurnLogprobs | None = None, step: Tensor | None = None
    ) -> Tensor:
        """Return the loss, in units of the advantage [trajectories].

        `step`: `step_statistic` of all trajectories of the optimizer step; None: of these.
        """
        advantage = turn_weights(chosen, self.credit)[chosen.turn_index]
        low, high = self._range(chosen)
        clipped = clipped_surrogate(
            self._log_ratio(chosen), advantage, clip_low=low, clip_high=high, dual_clip=self.dual_clip
        )
        if self.importance != "none":
            clipped = clipped * truncated_importance(chosen, over=self.importance, cap=self.importance_cap)
        aggregate = AGGREGATES[self.aggregate]
        counts, has_spread = (self.step_statistic(chosen) if step is None else step).unbind(1)
        loss = aggregate(chosen, clipped, counts * has_spread)
        if self.kl:
            divergence = KL_ESTIMATORS[self.kl_estimator](chosen.log_ratio())
            loss = loss + self.kl * aggregate(chosen, divergence, counts)
        return loss

    def step_statistic(self, chosen: TurnLogprobs) -> Tensor:
        """Return what `aggregate` divides by: turns or tokens, and 1 or 0 for a spread [trajectories, 2]."""
        counts = (
            chosen.turns_per_trajectory if self.aggregate == "turn_mean" else chosen.tokens_per_trajectory
        )
        has_spread = torch.ones_like(counts) if chosen.has_spread is None else chosen.has_spread
        return torch.stack([counts, has_spread.to(counts.dtype)], dim=1).to(chosen.precision)

    @torch.no_grad()
    def rewards(self, side: TurnLogprobs) -> Tensor:
        """Return the mean log-probability of a token, in nats [trajectories]; without gradient."""
        return side.mean_by_trajectory(side.policy)

    @torch.no_grad()
    def diagnostics(
        self, chosen: TurnLogprobs, rejected: TurnLogprobs | None = None, step: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return what to log beside the loss, without gradient.

        Returns:
            By name [tokens], so that the mean of what is logged is over tokens: `ratio`; `clip_share`, 1 where the
            clip took the gradient away; `clipped_away`, the size rho |A| of what the clip took; `behavior_kl`, k3 of
            the sampling policy against this one, in nats. With a reference also `kl`, k3 of this policy against the
            reference, in nats. With `importance` also `importance`, the weight, and `importance_capped`, 1 at the cap.
        """
        ratio, clipped, advantage = self._clip(chosen)
        taken = torch.where(clipped, ratio * advantage.abs(), 0.0)
        found = {
            "ratio": ratio,
            "clip_share": clipped.to(chosen.precision),
            "clipped_away": taken,
            "behavior_kl": k3(_difference(chosen, "behavior", "policy")),
        }
        if chosen.reference is not None:
            found["kl"] = k3(chosen.log_ratio())
        if self.importance != "none":
            weight = truncated_importance(chosen, over=self.importance, cap=self.importance_cap)
            found["importance"] = weight
            found["importance_capped"] = (weight >= self.importance_cap).to(chosen.precision)
        return found

    @torch.no_grad()
    def turn_diagnostics(self, chosen: TurnLogprobs) -> dict[str, Tensor]:
        """Return what to log by the position of a turn, without gradient.

        Returns:
            By name [turns]: `advantage`; and means over the tokens of each turn: `ratio`; `clip_share`; `mismatch`, k3
            of mu against pi_proximal, or against the policy where there is none, in nats; `kl`, k3 of the policy
            against the reference, if there is one, in nats. Where turns have a clip range of their own also `clip`, the
            factor on it.
        """
        ratio, clipped, _ = self._clip(chosen)
        computed = "policy" if chosen.proximal is None else "proximal"
        of_tokens = {
            "ratio": ratio,
            "clip_share": clipped.to(chosen.precision),
            "mismatch": k3(_difference(chosen, "behavior", computed)),
        }
        if chosen.reference is not None:
            of_tokens["kl"] = k3(chosen.log_ratio())
        means = {name: chosen.mean_by_turn(values) for name, values in of_tokens.items()}
        if chosen.clip is not None:
            means["clip"] = chosen.clip
        return {"advantage": turn_weights(chosen, self.credit), **means}

    def _clip(self, side: TurnLogprobs) -> tuple[Tensor, Tensor, Tensor]:
        """Return rho, whether the clip took its gradient away, and A, each [tokens]."""
        advantage = turn_weights(side, self.credit)[side.turn_index]
        ratio = self._log_ratio(side).clamp(-_MOST, _MOST).exp()
        low, high = self._range(side)
        clipped = torch.where(advantage > 0, ratio > 1 + high, ratio < 1 - low)
        if self.dual_clip is not None:
            clipped |= (advantage < 0) & (ratio > self.dual_clip)
        return ratio, clipped & (advantage != 0), advantage

    def _range(self, side: TurnLogprobs) -> tuple[float | Tensor, float | Tensor]:
        """Return how far rho may fall below 1 and rise above it; of each token where turns have their own [tokens]."""
        if side.clip is None:
            return self.clip_low, self.clip_high
        factor = side.clip.detach().to(side.precision)[side.turn_index]
        return self.clip_low * factor, self.clip_high * factor

    def _log_ratio(self, side: TurnLogprobs) -> Tensor:
        """Log rho of each token, in nats [tokens]."""
        start = "behavior" if self.importance == "none" else "proximal"
        log_ratio = _difference(side, "policy", start)
        return RATIO_GRADIENTS[self.ratio_gradient](RATIOS[self.ratio](side, log_ratio), log_ratio)
