"""tlm-DRE: turn-level multiscale density-ratio estimation."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from perturn.bounds import OneOf, check_bounds
from perturn.credit import TurnCredit
from perturn.credit.single_turn import Confidence
from perturn.losses.density_ratio import KERNELS, Kernel, density_ratio_diagnostics, density_ratio_loss
from perturn.losses.protocol import LossTraits
from perturn.losses.turn_logprobs import (
    REDUCTIONS,
    TurnLogprobs,
    reduced_log_ratio,
    reduced_log_ratios,
    turn_weights,
)


def self_normalized_coefficient(log_coefficient: Tensor, step: Tensor) -> Tensor:
    """Scale the coefficients of an optimizer step so that they average 1.

        C_w = B exp(log C_w) / sum exp(log C_w), the sum over the B pairs of the step

    Source: self-normalized importance sampling, the usual estimator where the normalizer is unknown.
    Differs: the paper has none of it. It couples the pairs of a step: a pair's loss depends on the others of
    its step, and one pair alone always has C_w = 1.

    Args:
        log_coefficient: log C_w as the paper has it, in nats [pairs].
        step: The same of all pairs of the optimizer step, in nats [pairs of the step].

    Returns:
        log C_w after scaling, in nats [pairs].
    """
    largest = step.max()  # taken off first, for log C_w may be so far from 0 that its last digits are lost
    return (log_coefficient - largest) - (step - largest).logsumexp(0) + math.log(step.shape[0])


COEFFICIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "reference": lambda log_coefficient, step: log_coefficient,
    "self_normalized": self_normalized_coefficient,
    "one": lambda log_coefficient, step: torch.zeros_like(log_coefficient),
}
"""Coefficient by name: from the paper's log C_w, of some pairs and of all of their step, to the one used. `one` is what
Eq. 15 gives where pi_ref stands for pi_c."""


@dataclass(frozen=True)
class TLMDRE:
    """Density-ratio loss in which turns that the reference knows already weigh less.

        L = [f'(r_rejected) r_rejected - f(r_rejected)] - C_w f'(r_chosen)
        log r = sum_i omega_i sum_j u_ij,   log C_w = sum_i (1 - omega_i) sum_j log pi_ref(y_ij)

    Source: tlm-DRE ("turn-level multiscale density ratio estimation"), Eqs. 8-10 and 16. Kernel ukl: Eq. 17.
    Differs: `sum` is the paper's; the means are Perturn's addition, because at the length of real trajectories
    the sum vanishes or overflows. Computed in log space, with log r clamped where it is exponentiated. C_w
    comes from the reference, carries no gradient, and may be self-normalized or left out.
    """

    traits: ClassVar[LossTraits] = LossTraits(
        needs_rejected=True, needs_reference=True, step_statistic=True, diagnostics=True
    )

    kernel: Annotated[str, OneOf(tuple(KERNELS))] = "ukl"
    """Bregman kernel: ukl, lsif, bce or basu."""

    alpha: float = 0.5
    """Power of the basu kernel, without unit; > 0. The paper names no value; no other kernel uses it."""

    pivot: float = 0.9
    """Confidence above which a turn gets the low weight, in [0, 1]."""

    low: float = 0.2
    """Weight of a turn the reference is confident of, without unit; > 0."""

    high: float = 1.0
    """Weight of any other turn, without unit; >= low. Above 1 it lets C_w exceed 1."""

    reduction: Annotated[str, OneOf(tuple(REDUCTIONS))] = "token_mean"
    """How a trajectory's turns become one number: sum (the paper's, see Differs), token_mean or turn_mean."""

    coefficient: Annotated[str, OneOf(tuple(COEFFICIENTS))] = "reference"
    """C_w: reference (the paper's), self_normalized over the pairs of the optimizer step, or one."""

    max_log_ratio: float = 20.0
    """Where log r is clamped before it is exponentiated, in nats; > 0. The paper does not clamp."""

    def __post_init__(self) -> None:
        """Reject settings outside their range."""
        check_bounds(self)
        self._kernel  # noqa: B018  checks its settings
        self.credit  # noqa: B018

    def __call__(self, chosen: TurnLogprobs, rejected: TurnLogprobs, step: Tensor | None = None) -> Tensor:
        """Return the loss, without unit [pairs]; `step`: `step_statistic` of all pairs of the step, None: of these."""
        return density_ratio_loss(*self._terms(chosen, rejected, step), kernel=self._kernel)

    def step_statistic(self, chosen: TurnLogprobs) -> Tensor:
        """Return log C_w as Eq. 16 has it, in nats [pairs]; without gradient."""
        return REDUCTIONS[self.reduction](
            chosen, chosen.frozen_reference(), 1 - turn_weights(chosen, self.credit)
        )

    @property
    def credit(self) -> TurnCredit:
        """The paper's turn weights."""
        return Confidence(pivot=self.pivot, low=self.low, high=self.high)

    @torch.no_grad()
    def rewards(self, side: TurnLogprobs) -> Tensor:
        """Return log r after reduction (Eq. 8), in nats [trajectories]; without gradient."""
        return reduced_log_ratio(side, self.credit, self.reduction)

    def diagnostics(
        self, chosen: TurnLogprobs, rejected: TurnLogprobs, step: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return what to log beside the loss, without gradient; takes the arguments of the loss.

        Returns:
            By name: the entries of density_ratio_diagnostics [pairs]; `effective_batch_size`,
            (sum C_w)^2 / sum C_w^2 over the step, in pairs: one value, once a pair [pairs].
        """
        terms = self._terms(chosen, rejected, step)
        entries, log_coefficient = density_ratio_diagnostics(*terms, kernel=self._kernel), terms[-1]
        # In log space: with `sum` every C_w may be too small for a float.
        of_step = log_coefficient if step is None else COEFFICIENTS[self.coefficient](step, step)
        of_step = of_step - of_step.max()
        log_size = 2 * of_step.logsumexp(0) - (2 * of_step).logsumexp(0)
        return entries | {"effective_batch_size": log_size.exp().expand_as(log_coefficient)}

    def _terms(
        self, chosen: TurnLogprobs, rejected: TurnLogprobs, step: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log r of both sides and log C_w, in nats, each [pairs]."""
        log_ratios = reduced_log_ratios(chosen, rejected, self.credit, self.reduction)
        own = self.step_statistic(chosen)
        return *log_ratios, COEFFICIENTS[self.coefficient](own, own if step is None else step)

    @property
    def _kernel(self) -> Kernel:
        return Kernel(self.kernel, self.alpha, self.max_log_ratio)
