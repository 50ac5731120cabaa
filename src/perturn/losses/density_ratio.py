"""Shared part of the density-ratio losses: Bregman kernels, the loss on log-ratios, and the values logged beside it.

The loss needs two functions of the ratio r: the derivative f'(r), taken on the chosen side, and the conjugate
f'(r) r - f(r), taken on the rejected side. Both are written on log r, clamped to +-max_log_ratio where it is
exponentiated; a clamped value passes no gradient.

| kernel | f(r) | f'(r) | f'(r) r - f(r) |
|---|---|---|---|
| lsif | (r - 1)^2 / 2 | r - 1 | (r^2 - 1) / 2 |
| ukl | r log r - r | log r | r |
| bce | r log r - (1 + r) log(1 + r) | log r - log(1 + r) | log(1 + r) |
| basu | (r^(1 + alpha) - r) / alpha | ((1 + alpha) r^alpha - 1) / alpha | r^(1 + alpha) |
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from perturn.bounds import POSITIVE, check_bounds

LARGEST_EXPONENT = 80.0
"""The largest exponent a kernel may reach: e^80 = 5.5e34, and float32 ends at 3.4e38."""


def lsif(log_ratio: Tensor, clamped: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return least squares.

    Source: tlm-DRE, Appendix A, Eqs. 18-19, after Kanamori et al. 2009.
    Differs: log r is clamped.
    """
    return torch.expm1(clamped), torch.expm1(2 * clamped) / 2


def ukl(log_ratio: Tensor, clamped: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return unnormalized Kullback-Leibler.

    Source: tlm-DRE, Appendix A, Eqs. 20-21, after Nguyen et al. 2010.
    Differs: log r is clamped in the conjugate alone; the derivative is log r itself and keeps its gradient.
    """
    return log_ratio, clamped.exp()


def bce(log_ratio: Tensor, clamped: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return binary cross-entropy, or binary Kullback-Leibler.

    Source: tlm-DRE, Appendix A, Eqs. 22-23, after Hastie 2009.
    Differs: the last term of the printed Eq. 23, r* log(r / r*), has the wrong sign: Eq. 22 in Eq. 3 gives
    r* log(r* / r). The loss does not contain it. Nothing is exponentiated, so nothing is clamped.
    """
    return F.logsigmoid(log_ratio), -F.logsigmoid(-log_ratio)  # the same, without exponentiating


def basu(log_ratio: Tensor, clamped: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return Basu's power divergence.

    Source: tlm-DRE, Appendix A, Eqs. 24-25, after Basu et al. 1998.
    Differs: log r is clamped. alpha -> 0 gives UKL, with f' larger by the constant 1.
    """
    # The same as the formula, without its cancellation for small alpha.
    derivative = 1 + (1 + alpha) * torch.expm1(alpha * clamped) / alpha
    return derivative, ((1 + alpha) * clamped).exp()


KERNELS: dict[str, Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]] = {
    "ukl": ukl,
    "lsif": lsif,
    "bce": bce,
    "basu": basu,
}
"""Kernel by name: from log r [pairs], the same clamped, and alpha, to its derivative and its conjugate [pairs]."""

_GROWTH: dict[str, Callable[[float], float]] = {
    "ukl": lambda alpha: 1,
    "lsif": lambda alpha: 2,
    "bce": lambda alpha: 1,
    "basu": lambda alpha: 1 + alpha,
}
"""Highest power of r in the two terms, by name, from alpha."""


@dataclass(frozen=True)
class Kernel:
    """A kernel with the settings of a loss.

    Raises:
        ValueError: If a setting is out of range; float32 must hold every term of the loss.
    """

    name: str
    """A key of KERNELS."""

    alpha: Annotated[float, POSITIVE]
    """Power of Basu's kernel, without unit; > 0. A larger value lets large ratios weigh more; no other kernel uses
    it."""

    max_log_ratio: Annotated[float, POSITIVE]
    """Where log r is clamped before it is exponentiated, and log C anyway, in nats; > 0."""

    def __post_init__(self) -> None:
        """Reject settings outside their range."""
        check_bounds(self)
        # At least 2: on the chosen side C_w, itself at most e^max_log_ratio, multiplies f'(r).
        largest = LARGEST_EXPONENT / max(2.0, _GROWTH[self.name](self.alpha))
        if self.max_log_ratio > largest and not math.isclose(self.max_log_ratio, largest):
            raise ValueError(
                f"max_log_ratio must be <= {largest:g} for kernel {self.name} with alpha {self.alpha:g}, "
                f"got {self.max_log_ratio}. Beyond it float32 cannot hold the loss."
            )

    def derivative(self, log_ratio: Tensor) -> Tensor:
        """Return f'(r) from log r."""
        return self._terms(log_ratio)[0]

    def conjugate(self, log_ratio: Tensor) -> Tensor:
        """Return f'(r) r - f(r) from log r."""
        return self._terms(log_ratio)[1]

    def coefficient(self, log_coefficient: Tensor) -> Tensor:
        """Return C, at most e^max_log_ratio and without gradient [pairs]."""
        return log_coefficient.detach().clamp(max=self.max_log_ratio).exp()

    def _terms(self, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
        clamped = log_ratio.clamp(-self.max_log_ratio, self.max_log_ratio)
        return KERNELS[self.name](log_ratio, clamped, self.alpha)


def density_ratio_loss(
    log_ratio_chosen: Tensor, log_ratio_rejected: Tensor, log_coefficient: Tensor, *, kernel: Kernel
) -> Tensor:
    """Return Bregman divergence from the true density ratio, without its constant, on one pair each.

        L = [f'(r_rejected) r_rejected - f(r_rejected)] - C f'(r_chosen)

    Source: tlm-DRE, Eqs. 5 (C = 1) and 16; Eq. 3 without the constant f(r*).
    Differs: one value per pair; the trainer averages. Ratios are read in log space, clamped where they are
    exponentiated. log C above max_log_ratio is clamped to it, which takes weights above 1 to happen.

    Args:
        log_ratio_chosen: log r of the chosen trajectory, in nats [pairs].
        log_ratio_rejected: log r of the rejected trajectory, in nats [pairs].
        log_coefficient: log C of the chosen trajectory, in nats [pairs]. Carries no gradient.
        kernel: The kernel f.

    Returns:
        Loss, without unit [pairs].
    """
    coefficient = kernel.coefficient(log_coefficient)
    return kernel.conjugate(log_ratio_rejected) - coefficient * kernel.derivative(log_ratio_chosen)


def density_ratio_diagnostics(
    log_ratio_chosen: Tensor, log_ratio_rejected: Tensor, log_coefficient: Tensor, *, kernel: Kernel
) -> dict[str, Tensor]:
    """Return what shows whether a density-ratio loss is healthy, from what the loss takes; without gradient.

    Returns:
        By name, each [pairs]: `log_ratio/chosen` and `log_ratio/rejected` in nats; `clamped`, 1 where either
        of them lies beyond max_log_ratio; `coefficient`, C; `gradient_weight/chosen` and
        `gradient_weight/rejected`, |dL / d log r| of either side.
    """
    # Outside inference mode and with gradients on, whatever the caller runs under.
    with torch.inference_mode(False), torch.enable_grad():
        chosen = log_ratio_chosen.detach().clone().requires_grad_()
        rejected = log_ratio_rejected.detach().clone().requires_grad_()
        log_coefficient = log_coefficient.detach().clone()
        loss = density_ratio_loss(chosen, rejected, log_coefficient, kernel=kernel)
        to_chosen, to_rejected = torch.autograd.grad(loss.sum(), (chosen, rejected))
    furthest = torch.maximum(chosen.detach().abs(), rejected.detach().abs())
    return {
        "log_ratio/chosen": chosen.detach(),
        "log_ratio/rejected": rejected.detach(),
        "clamped": (furthest > kernel.max_log_ratio).to(chosen.dtype),
        "coefficient": kernel.coefficient(log_coefficient),
        "gradient_weight/chosen": to_chosen.abs(),
        "gradient_weight/rejected": to_rejected.abs(),
    }
