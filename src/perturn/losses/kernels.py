"""The four Bregman kernels f of density-ratio estimation, written on log r.

A density-ratio loss needs two functions of the ratio r: the derivative f'(r), taken on the chosen
side, and the conjugate f'(r) r - f(r), taken on the rejected side.

| kernel | f(r) | f'(r) | f'(r) r - f(r) |
|---|---|---|---|
| lsif | (r - 1)^2 / 2 | r - 1 | (r^2 - 1) / 2 |
| ukl | r log r - r | log r | r |
| bce | r log r - (1 + r) log(1 + r) | log r - log(1 + r) | log(1 + r) |
| basu | (r^(1 + alpha) - r) / alpha | ((1 + alpha) r^alpha - 1) / alpha | r^(1 + alpha) |

Where r is exponentiated, log r is first clamped to +-max_log_ratio.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from perturn.checks import check_choice, check_positive

LARGEST_EXPONENT = 80.0
"""The largest exponent a kernel may reach: e^80 = 5.5e34, and float32 ends at 3.4e38."""


class Kernel(Protocol):
    """Derivative and conjugate of a strictly convex f of the density ratio."""

    @property
    def max_log_ratio(self) -> float:
        """Where log r is clamped before it is exponentiated, in nats."""

    @property
    def growth(self) -> float:
        """Highest power of r in the two terms of the loss."""

    def derivative(self, log_ratio: Tensor) -> Tensor:
        """Return f'(r) from log r."""

    def conjugate(self, log_ratio: Tensor) -> Tensor:
        """Return f'(r) r - f(r) from log r."""


@dataclass(frozen=True)
class LSIF:
    """Least squares: f(r) = (r - 1)^2 / 2.

    Source: tlm-DRE, Appendix A, Eqs. 18-19, after Kanamori et al. 2009.
    Differs: log r is clamped.
    """

    max_log_ratio: float = 20.0
    """Where log r is clamped before it is exponentiated, in nats; > 0."""

    growth: ClassVar[float] = 2.0

    def derivative(self, log_ratio: Tensor) -> Tensor:
        """Return f'(r) = r - 1."""
        return torch.expm1(_clamp(log_ratio, self.max_log_ratio))  # beyond the clamp: no gradient

    def conjugate(self, log_ratio: Tensor) -> Tensor:
        """Return f'(r) r - f(r) = (r^2 - 1) / 2."""
        return torch.expm1(2 * _clamp(log_ratio, self.max_log_ratio)) / 2  # beyond the clamp: no gradient


@dataclass(frozen=True)
class UKL:
    """Unnormalized Kullback-Leibler: f(r) = r log r - r.

    Source: tlm-DRE, Appendix A, Eqs. 20-21, after Nguyen et al. 2010.
    Differs: log r is clamped in the conjugate alone; the derivative is log r itself and keeps its gradient.
    """

    max_log_ratio: float = 20.0
    """Where log r is clamped before it is exponentiated, in nats; > 0."""

    growth: ClassVar[float] = 1.0

    def derivative(self, log_ratio: Tensor) -> Tensor:
        """Return f'(r) = log r."""
        return log_ratio

    def conjugate(self, log_ratio: Tensor) -> Tensor:
        """Return f'(r) r - f(r) = r."""
        return _clamp(log_ratio, self.max_log_ratio).exp()  # beyond the clamp: no gradient


@dataclass(frozen=True)
class BCE:
    """Binary cross-entropy, or binary Kullback-Leibler: f(r) = r log r - (1 + r) log(1 + r).

    Source: tlm-DRE, Appendix A, Eqs. 22-23, after Hastie 2009.
    Differs: the last term of the printed Eq. 23, r* log(r / r*), has the wrong sign: Eq. 22 in Eq. 3 gives
    r* log(r* / r). The loss does not contain it. Nothing is exponentiated, so nothing is clamped.
    """

    max_log_ratio: float = 20.0
    """Bounds log C, and what the diagnostics count as clamped, in nats; > 0. This kernel needs no clamp."""

    growth: ClassVar[float] = 1.0

    def derivative(self, log_ratio: Tensor) -> Tensor:
        """Return f'(r) = log r - log(1 + r)."""
        return F.logsigmoid(log_ratio)  # the same, without exponentiating

    def conjugate(self, log_ratio: Tensor) -> Tensor:
        """Return f'(r) r - f(r) = log(1 + r)."""
        return -F.logsigmoid(-log_ratio)  # the same, without exponentiating


@dataclass(frozen=True)
class Basu:
    """Basu's power divergence: f(r) = (r^(1 + alpha) - r) / alpha.

    Source: tlm-DRE, Appendix A, Eqs. 24-25, after Basu et al. 1998.
    Differs: log r is clamped. alpha -> 0 gives UKL, with f' larger by the constant 1.
    """

    alpha: float = 0.5
    """Power, without unit; > 0. Larger lets large ratios weigh more."""

    max_log_ratio: float = 20.0
    """Where log r is clamped before it is exponentiated, in nats; > 0."""

    @property
    def growth(self) -> float:
        """Highest power of r in the two terms of the loss."""
        return 1 + self.alpha

    def derivative(self, log_ratio: Tensor) -> Tensor:
        """Return f'(r) = ((1 + alpha) r^alpha - 1) / alpha."""
        exponent = self.alpha * _clamp(log_ratio, self.max_log_ratio)  # beyond the clamp: no gradient
        # The same as the formula, without its cancellation for small alpha.
        return 1 + (1 + self.alpha) * torch.expm1(exponent) / self.alpha

    def conjugate(self, log_ratio: Tensor) -> Tensor:
        """Return f'(r) r - f(r) = r^(1 + alpha)."""
        exponent = (1 + self.alpha) * _clamp(log_ratio, self.max_log_ratio)  # beyond the clamp: no gradient
        return exponent.exp()


KERNELS: dict[str, Callable[[float, float], Kernel]] = {
    "ukl": lambda alpha, max_log_ratio: UKL(max_log_ratio),
    "lsif": lambda alpha, max_log_ratio: LSIF(max_log_ratio),
    "bce": lambda alpha, max_log_ratio: BCE(max_log_ratio),
    "basu": lambda alpha, max_log_ratio: Basu(alpha, max_log_ratio),
}
"""Kernel by name; each entry takes alpha and max_log_ratio."""


def make_kernel(name: str, *, alpha: float, max_log_ratio: float) -> Kernel:
    """Build a kernel from the settings of a loss, after checking them.

    Args:
        name: A key of KERNELS.
        alpha: Power of Basu's kernel, without unit; > 0.
        max_log_ratio: Where log r is clamped before it is exponentiated, in nats; > 0, and small enough
            that float32 holds every term of the loss.

    Returns:
        The kernel.
    """
    check_choice("kernel", name, KERNELS)
    check_positive("alpha", alpha)
    check_positive("max_log_ratio", max_log_ratio)
    kernel = KERNELS[name](alpha, max_log_ratio)
    # At least 2: on the chosen side C_w, itself at most e^max_log_ratio, multiplies f'(r).
    largest = LARGEST_EXPONENT / max(2.0, kernel.growth)
    if max_log_ratio > largest and not math.isclose(max_log_ratio, largest):
        raise ValueError(
            f"max_log_ratio must be <= {largest:g} for kernel {name} with alpha {alpha:g}, "
            f"got {max_log_ratio}. Beyond it float32 cannot hold the loss."
        )
    return kernel


def _clamp(log_ratio: Tensor, max_log_ratio: float) -> Tensor:
    """Clamp to +-max_log_ratio; a clamped value passes no gradient."""
    return log_ratio.clamp(-max_log_ratio, max_log_ratio)
