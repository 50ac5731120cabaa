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

    Source: self-normalized importance sampling, the usual estimator if the normalizer is unknown.
    Differs: the paper does not normalize. Here a pair's loss depends on all pairs of its optimizer step, and a single
    pair always has C_w = 1.

    Args:
        log_coefficient: log C_w of the paper, in nats [pairs].
        step: log C_w of all pairs of the optimizer step, in nats [pairs of the step].

    Returns:
        log C_w after scaling, in nats [pairs].
    """
    largest = step.max()  # subtracted first: a log C_w far from 0 has few accurate digits
    return (log_coefficient - largest) - (step - largest).logsumexp(0) + math.log(step.shape[0])


COEFFICIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "reference": lambda log_coefficient, step: log_coefficient,
    "self_normalized": self_normalized_coefficient,
    "one": lambda log_coefficient, step: torch.zeros_like(log_coefficient),
}
"""Name -> function from the paper's log C_w, of the given pairs and of all pairs of the step, to the log C_w to use.
`one` follows from Eq. 15 with pi_ref in place of pi_c."""


@dataclass(frozen=True)
class TLMDRE:
    """Density-ratio loss in which turns that the reference is confident about weigh less.

        L = [f'(r_rejected) r_rejected - f(r_rejected)] - C_w f'(r_chosen)
        log r = sum_i omega_i sum_j u_ij,   log C_w = sum_i (1 - omega_i) sum_j log pi_ref(y_ij)

    Source: tlm-DRE ("turn-level multiscale density ratio estimation"), Eqs. 8-10 and 16. Kernel ukl: Eq. 17.
    Differs: the paper sums over turns. The reductions token_mean and turn_mean are Perturn's additions, because the sum
    vanishes or overflows on long trajectories. The loss is computed from log r, which is clamped before it is
    exponentiated. C_w comes from the reference, carries no gradient, and may be self-normalized or left out.
    """

    traits: ClassVar[LossTraits] = LossTraits(
        needs_rejected=True, needs_reference=True, step_statistic=True, diagnostics=True
    )

    kernel: Annotated[str, OneOf(tuple(KERNELS))] = "ukl"
    """Bregman kernel: ukl, lsif, bce or basu."""

    alpha: float = 0.5
    """Power of the basu kernel, without unit; > 0. The paper names no value. Other kernels ignore it."""

    pivot: float = 0.9
    """Confidence above which a turn gets the low weight, in [0, 1]."""

    low: float = 0.2
    """Weight of a turn that the reference is confident about, without unit; > 0."""

    high: float = 1.0
    """Weight of any other turn, without unit; >= low. If it is above 1, C_w can exceed 1."""

    reduction: Annotated[str, OneOf(tuple(REDUCTIONS))] = "token_mean"
    """Reduction of a trajectory's log-ratios to one number: sum (as in the paper), token_mean or turn_mean."""

    coefficient: Annotated[str, OneOf(tuple(COEFFICIENTS))] = "reference"
    """Coefficient C_w. reference: as in the paper. self_normalized: scaled to mean 1 over the pairs of the optimizer
    step. one: always 1."""

    max_log_ratio: float = 20.0
    """Bound to which |log r| is clamped before it is exponentiated, in nats; > 0. The paper does not clamp."""

    def __post_init__(self) -> None:
        """Reject settings outside their range."""
        check_bounds(self)
        self._kernel  # noqa: B018  checks its settings
        self.credit  # noqa: B018

    def __call__(self, chosen: TurnLogprobs, rejected: TurnLogprobs, step: Tensor | None = None) -> Tensor:
        """Return the loss, without unit [pairs].

        Args:
            chosen: Chosen trajectory of each pair.
            rejected: Rejected trajectory of each pair.
            step: `step_statistic` of all pairs of the optimizer step; None: the given pairs are the whole step.
        """
        return density_ratio_loss(*self._terms(chosen, rejected, step), kernel=self._kernel)

    def step_statistic(self, chosen: TurnLogprobs) -> Tensor:
        """Return log C_w of Eq. 16, in nats [pairs]; without gradient."""
        return REDUCTIONS[self.reduction](
            chosen, chosen.frozen_reference(), 1 - turn_weights(chosen, self.credit)
        )

    @property
    def credit(self) -> TurnCredit:
        """Turn weights of the paper, as a credit."""
        return Confidence(pivot=self.pivot, low=self.low, high=self.high)

    @torch.no_grad()
    def rewards(self, side: TurnLogprobs) -> Tensor:
        """Return log r after reduction (Eq. 8), in nats [trajectories]; without gradient."""
        return reduced_log_ratio(side, self.credit, self.reduction)

    def diagnostics(
        self, chosen: TurnLogprobs, rejected: TurnLogprobs, step: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return values to log, without gradient; takes the arguments of the loss.

        Returns:
            Tensors by name, each [pairs]: the tensors of density_ratio_diagnostics, and `effective_batch_size`,
            (sum C_w)^2 / sum C_w^2 over the step, in pairs, repeated for each pair.
        """
        terms = self._terms(chosen, rejected, step)
        entries, log_coefficient = density_ratio_diagnostics(*terms, kernel=self._kernel), terms[-1]
        # Computed in log space: with `reduction` sum, every C_w may underflow.
        of_step = log_coefficient if step is None else COEFFICIENTS[self.coefficient](step, step)
        of_step = of_step - of_step.max()
        log_size = 2 * of_step.logsumexp(0) - (2 * of_step).logsumexp(0)
        return entries | {"effective_batch_size": log_size.exp().expand_as(log_coefficient)}

    def _terms(
        self, chosen: TurnLogprobs, rejected: TurnLogprobs, step: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log r of the chosen and the rejected side, and log C_w; in nats, each [pairs]."""
        log_ratios = reduced_log_ratios(chosen, rejected, self.credit, self.reduction)
        own = self.step_statistic(chosen)
        return *log_ratios, COEFFICIENTS[self.coefficient](own, own if step is None else step)

    @property
    def _kernel(self) -> Kernel:
        return Kernel(self.kernel, self.alpha, self.max_log_ratio)
