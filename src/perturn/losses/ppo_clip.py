"""PPO's clipped policy-gradient loss on single trajectories, with the advantage of each turn from a credit."""

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
"""Bound to which a log-ratio is clamped before it is exponentiated, in nats; the value of verl."""


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
"""Unit of the ratio -> function from log pi/mu of each token to the logarithm of its ratio, both in nats [tokens]."""


def straight_through(mean: Tensor, log_ratio: Tensor) -> Tensor:
    """Return the mean log pi/mu, with the gradient of each token's own log pi, in nats [tokens].

        log s_j = sg[m_j] + u_j - sg[u_j],   u = log pi/mu, m = mean of u, sg = stop-gradient

    Source: Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071, Eqs. 14-15.
    Differs: nothing; written in logarithms.

    Args:
        mean: m of each token, from one of RATIOS, in nats [tokens].
        log_ratio: u of each token, in nats [tokens].
    """
    return mean.detach() + (log_ratio - log_ratio.detach())


RATIO_GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": straight_through,
    "mean": lambda mean, log_ratio: mean,
}
"""Name of a gradient -> function from the mean log-ratio and the token's own log-ratio to the logarithm of the ratio,
all in nats [tokens]."""


def clipped_surrogate(
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    clip_low: float | Tensor,
    clip_high: float | Tensor,
    dual_clip: float | None = None,
) -> Tensor:
    """Return the negative clipped surrogate of PPO.

        L = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A),   rho = pi / mu

    With `dual_clip` c, L is at most c |A| if A < 0.

    Source: Schulman et al. 2017, arXiv:1707.06347, Eq. 7; asymmetric clipping: DAPO, arXiv:2503.14476; dual clip:
    Ye et al. 2020, arXiv:1912.09729.
    Differs: log rho is clamped to [-20, 20] nats; a clamped log rho has no gradient.

    Args:
        log_ratio: log rho, in nats [tokens].
        advantage: A of each token's turn [tokens].
        clip_low: Distance below 1 at which rho is clipped: one number, or a tensor [tokens].
        clip_high: Distance above 1 at which rho is clipped: one number, or a tensor [tokens].
        dual_clip: c > 1; None: no dual clip.

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
    """Return importance weights that correct for different log-probabilities in engine and training.

        w = min(pi_proximal / mu, cap)

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", truncated
    importance sampling. With `over` token, each token has its own ratio pi_proximal / mu.
    Differs: with `over` turn, the ratio is the geometric mean over the turn's tokens. So the weight does not move
    further from 1 as turns get longer. The log-ratio is clamped to [-20, 20] nats.

    Args:
        side: Batch with `behavior` and `proximal`.
        over: Unit of a ratio: token or turn.
        cap: Upper bound of a weight, without unit.

    Returns:
        Weights, without unit and without gradient [tokens].
    """
    log_ratio = _difference(side, "proximal", "behavior").detach()
    if over == "turn":
        log_ratio = side.mean_by_turn(log_ratio)[side.turn_index]
    return log_ratio.clamp(-_MOST, _MOST).exp().clamp(max=cap)


def _difference(side: TurnLogprobs, one: str, other: str) -> Tensor:
    """Return log-probability `one` minus log-probability `other` of each token, in nats [tokens].

    Only the log-probabilities of the policy carry a gradient.

    Raises:
        ValueError: If the batch lacks one of the two.
    """
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
"""Unit for which one importance weight is computed: each token, or each turn. none: no weights."""


def k1(log_ratio: Tensor) -> Tensor:
    """Return u = log pi/pi_ref, in nats [tokens]. As a loss, it has a gradient with expected value 0."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Return u^2 / 2, in nats [tokens]. As a loss, its expected gradient is the gradient of KL."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """Return exp(-u) - 1 + u, in nats [tokens]. It is never negative, and its expected value is KL."""
    return torch.expm1(-log_ratio.clamp(min=-_MOST)) + log_ratio


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""Name -> estimator of KL(pi, pi_ref) from one token; Schulman 2020, "Approximating KL Divergence"."""


def _mean_over_step(sums: Tensor, counts: Tensor) -> Tensor:
    """Scale the sums of trajectories so that their mean over trajectories is a mean over all tokens or turns.

    A trajectory with count 0 is left out of the mean. If all counts are 0, the sums are 0 and stay 0.

    Args:
        sums: Sum over the tokens or turns of each trajectory [trajectories].
        counts: Number of tokens or turns of each trajectory of the optimizer step [trajectories of the step].
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
"""Name -> function from one value per token to one value per trajectory. The mean over trajectories is then the mean
over all tokens, the mean over all turns, the mean over trajectories, or the mean of the sums over tokens. The third
argument is the number of tokens or turns of each trajectory of the optimizer step; 0: the trajectory is left out."""


@dataclass(frozen=True)
@bounded
class PPOClip:
    """Clipped policy gradient with an advantage for each turn, and an optional KL term to a reference.

        L_ij = -min(rho_ij A_i, clip(rho_ij, 1 - clip_low, 1 + clip_high) A_i) + kl KL_ij

    rho is pi/mu of a token (`ratio` token), or exp of the mean log pi/mu over its turn (turn) or its trajectory
    (sequence). mu is the behavior policy. With `ratio_gradient` token, each token gets the gradient of its own log pi
    (see `straight_through`). With mean, the gradient is the derivative of the ratio.

    The clipped term and the KL term are averaged separately. Let n be the number of tokens (`token_mean`) or turns
    (`turn_mean`). The clipped term is divided by n of the trajectories whose group has a spread, times their share in
    the step. The KL term is divided by n of all trajectories. A group has a spread if its weights are not all 0. At
    `kl` 0, a run does not train on groups without a spread. This averaging keeps the gradient continuous at `kl` 0.

    With `importance`, pi_proximal is the behavior policy as the training code computes it. rho is then pi/pi_proximal,
    and the clipped term is multiplied by `truncated_importance`.

    If a credit sets `clip`, clip_low and clip_high of a turn are multiplied by its `clip`.

    Source: Schulman et al. 2017, arXiv:1707.06347, Eq. 7; `sequence`: GSPO-token, Zheng et al. 2025, arXiv:2507.18071,
    Eqs. 14-15, and with `ratio_gradient` mean its GSPO, Eqs. 5 and 7; `turn`: Turn-PPO of ST-PPO, Li et al. 2025,
    arXiv:2511.20718; a clip range of each turn: A2TGPO, Chen et al. 2026, arXiv:2605.06200, its released code; see also
    `clipped_surrogate`, `straight_through`, `truncated_importance` and `KL_ESTIMATORS`.
    Differs: without `importance`, mu has the engine's log-probabilities. The ratio then contains the difference between
    engine and training, which is clipped too. `token_mean` and `turn_mean` couple the trajectories of a step, as in
    DAPO. DAPO replaces groups without a spread by other groups, and TRL divides both terms by all tokens. KL is not
    multiplied by rho; TRL does so with `use_bias_correction_kl`. The clipping-bias correction of ST-PPO is not
    implemented. It divides by the norm of the gradient that the clip removes, which is not a function of
    log-probabilities. The size of the clipped terms is logged as `clipped_away`.
    """

    credit: ClassVar[Credit] = GRPO()

    clip_low: Annotated[float, Bound(least=0, most=1)] = 0.2
    """Distance below 1 at which the ratio is clipped, without unit, in [0, 1]."""

    clip_high: Annotated[float, Bound(least=0)] = 0.2
    """Distance above 1 at which the ratio is clipped, without unit; >= 0."""

    ratio: Annotated[str, OneOf(tuple(RATIOS))] = "token"
    """Unit for which one ratio is computed: token, turn or sequence."""

    ratio_gradient: Annotated[str, OneOf(tuple(RATIO_GRADIENTS))] = "token"
    """Gradient of the ratio of a turn or a sequence. token: the gradient of each token's own log-probability, as in
    GSPO-token. mean: the gradient of the mean log-ratio, as in GSPO and TRL. Ignored if `ratio` is token."""

    aggregate: Annotated[str, OneOf(tuple(AGGREGATES))] = "token_mean"
    """Reduction of the token losses. token_mean or turn_mean: the mean over all tokens or turns of the step.
    trajectory_mean: the mean over trajectories of their token means. token_sum: the mean over trajectories of their
    token sums."""

    kl: Annotated[float, Bound(least=0)] = 0.0
    """Weight of the KL to the reference, in units of the advantage per nat; >= 0. At 0 no reference is needed."""

    kl_estimator: Annotated[str, OneOf(tuple(KL_ESTIMATORS))] = "k3"
    """Estimator of KL: k3, k2 or k1."""

    dual_clip: Annotated[float, Bound(above=1)] | None = None
    """Upper bound of the loss for a negative advantage A, in units of |A|; > 1. None: no bound."""

    importance: Annotated[str, OneOf(tuple(IMPORTANCE))] = "none"
    """Truncated importance weights that correct for different log-probabilities in engine and training: none, token
    (one weight per token) or turn (one weight per turn)."""

    importance_cap: Annotated[float, Bound(above=0)] = 2.0
    """Upper bound of an importance weight, without unit; > 0. Ignored if `importance` is none."""

    @property
    def traits(self) -> LossTraits:
        """Traits of the loss: `kl` needs a reference, and `importance` needs the proximal log-probabilities."""
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

        Args:
            chosen: Trajectories, with `behavior`.
            rejected: Ignored.
            step: `step_statistic` of all trajectories of the optimizer step; None: `chosen` is the whole step.
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
        """Return the number of tokens or turns of each trajectory, and 1 if its group has a spread, else 0.

        `aggregate` divides by these numbers.

        Returns:
            The two numbers of each trajectory [trajectories, 2].
        """
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
        """Return values to log, without gradient. The trainer logs their mean over tokens.

        Returns:
            Tensors by name, each [tokens]. `ratio`: rho. `clip_share`: 1 if the clip removed the gradient, else 0.
            `clipped_away`: rho |A| if the clip removed the gradient, else 0. `behavior_kl`: k3 of the behavior policy
            against the policy, in nats. With a reference, `kl`: k3 of the policy against the reference, in nats. If
            importance weights are used, `importance`: the weight; and `importance_capped`: 1 at the cap, else 0.
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
        """Return values to log by the position of a turn in its trajectory, without gradient.

        Returns:
            Tensors by name, each [turns]: `advantage`, and means over the tokens of the turn. `ratio` and `clip_share`:
            as in `diagnostics`. `mismatch`: k3 of mu against pi_proximal, or against the policy if there is no
            pi_proximal, in nats. With a reference, `kl`: k3 of the policy against the reference, in nats. If a credit
            sets `clip`, also `clip`: the factor on the clip range.
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
        """Return rho, whether the clip removed its gradient, and A, each [tokens]."""
        advantage = turn_weights(side, self.credit)[side.turn_index]
        ratio = self._log_ratio(side).clamp(-_MOST, _MOST).exp()
        low, high = self._range(side)
        clipped = torch.where(advantage > 0, ratio > 1 + high, ratio < 1 - low)
        if self.dual_clip is not None:
            clipped |= (advantage < 0) & (ratio > self.dual_clip)
        return ratio, clipped & (advantage != 0), advantage

    def _range(self, side: TurnLogprobs) -> tuple[float | Tensor, float | Tensor]:
        """Return the distances below and above 1 at which rho is clipped; tensors [tokens] if a credit sets `clip`."""
        if side.clip is None:
            return self.clip_low, self.clip_high
        factor = side.clip.detach().to(side.precision)[side.turn_index]
        return self.clip_low * factor, self.clip_high * factor

    def _log_ratio(self, side: TurnLogprobs) -> Tensor:
        """Return log rho of each token, in nats [tokens]."""
        start = "behavior" if self.importance == "none" else "proximal"
        log_ratio = _difference(side, "policy", start)
        return RATIO_GRADIENTS[self.ratio_gradient](RATIOS[self.ratio](side, log_ratio), log_ratio)
