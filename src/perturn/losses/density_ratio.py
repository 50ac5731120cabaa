"""Shared code of the density-ratio losses: Bregman kernels, the loss on log-ratios, and its diagnostics.

The loss uses two functions of the ratio r: the derivative f'(r) on the chosen side, and the conjugate f'(r) r - f(r) on
the rejected side. Both are computed from log r. Before log r is exponentiated, it is clamped to +-max_log_ratio; a
clamped value passes no gradient.

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
"""Largest exponent that a kernel may compute: e^80 = 5.5e34, and the largest float32 is 3.4e38."""


def lsif(log_ratio: Tensor, clamped: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return the derivative and the conjugate of the least-squares kernel (LSIF) [pairs].

    Source: tlm-DRE, Appendix A, Eqs. 18-19, after Kanamori et al. 2009.
    Differs: log r is clamped.
    """
    return torch.expm1(clamped), torch.expm1(2 * clamped) / 2


def ukl(log_ratio: Tensor, clamped: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return the derivative and the conjugate of the unnormalized Kullback-Leibler kernel (UKL) [pairs].

    Source: tlm-DRE, Appendix A, Eqs. 20-21, after Nguyen et al. 2010.
    Differs: log r is clamped in the conjugate alone; the derivative is log r itself and keeps its gradient.
    """
    return log_ratio, clamped.exp()


def bce(log_ratio: Tensor, clamped: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return the derivative and the conjugate of the binary cross-entropy (binary Kullback-Leibler) kernel [pairs].

    Source: tlm-DRE, Appendix A, Eqs. 22-23, after Hastie 2009.
    Differs: the last term of the printed Eq. 23, r* log(r / r*), has the wrong sign: Eq. 22 in Eq. 3 gives
    r* log(r* / r). The loss does not contain this term. Nothing is exponentiated, so nothing is clamped.
    """
    return F.logsigmoid(log_ratio), -F.logsigmoid(-log_ratio)  # equal to the formula, without exponentials


def basu(log_ratio: Tensor, clamped: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Return the derivative and the conjugate of Basu's power divergence [pairs].

    Source: tlm-DRE, Appendix A, Eqs. 24-25, after Basu et al. 1998.
    Differs: log r is clamped. alpha -> 0 gives UKL, with f' larger by the constant 1.
    """
    # Equal to the formula, but without cancellation for small alpha.
    derivative = 1 + (1 + alpha) * torch.expm1(alpha * clamped) / alpha
    return derivative, ((1 + alpha) * clamped).exp()


KERNELS: dict[str, Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]] = {
    "ukl": ukl,
    "lsif": lsif,
    "bce": bce,
    "basu": basu,
}
"""Name of a kernel -> function that returns its derivative and its conjugate [pairs]. Its arguments are log r, log r
after clamping [pairs], and alpha."""

_GROWTH: dict[str, Callable[[float], float]] = {
    "ukl": lambda alpha: 1,
    "lsif": lambda alpha: 2,
    "bce": lambda alpha: 1,
    "basu": lambda alpha: 1 + alpha,
}
"""Name of a kernel -> function from alpha to the highest power of r in the derivative and the conjugate."""


@dataclass(frozen=True)
class Kernel:
    """Bregman kernel with its settings.

    Raises:
        ValueError: If a setting is out of range, or if the loss could overflow float32.
    """

    name: str
    """Key of the kernel in KERNELS."""

    alpha: Annotated[float, POSITIVE]
    """Power of Basu's kernel, without unit; > 0. At larger values, large ratios weigh more. Other kernels ignore it."""

    max_log_ratio: Annotated[float, POSITIVE]
    """Bound to which |log r| is clamped before it is exponentiated, and upper bound of log C, in nats; > 0."""

    def __post_init__(self) -> None:
        """Reject settings outside their range."""
        check_bounds(self)
        # At least 2: on the chosen side, f'(r) is multiplied by C_w, which can be as large as e^max_log_ratio.
        largest = LARGEST_EXPONENT / max(2.0, _GROWTH[self.name](self.alpha))
        if self.max_log_ratio > largest and not math.isclose(self.max_log_ratio, largest):
            raise ValueError(
                f"max_log_ratio must be <= {largest:g} for kernel {self.name} with alpha {self.alpha:g}, "
                f"got {self.max_log_ratio}. Beyond it float32 cannot hold the loss."
            )

    def derivative(self, log_ratio: Tensor) -> Tensor:
        """Return f'(r), given log r in nats [pairs]."""
        return self._terms(log_ratio)[0]

    def conjugate(self, log_ratio: Tensor) -> Tensor:
        """Return f'(r) r - f(r), given log r in nats [pairs]."""
        return self._terms(log_ratio)[1]

    def coefficient(self, log_coefficient: Tensor) -> Tensor:
        """Return C, given log C in nats [pairs]. It is at most e^max_log_ratio, and has no gradient."""
        return log_coefficient.detach().clamp(max=self.max_log_ratio).exp()

    def _terms(self, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
        clamped = log_ratio.clamp(-self.max_log_ratio, self.max_log_ratio)
        return KERNELS[self.name](log_ratio, clamped, self.alpha)


def density_ratio_loss(
    log_ratio_chosen: Tensor, log_ratio_rejected: Tensor, log_coefficient: Tensor, *, kernel: Kernel
) -> Tensor:
    """Return the Bregman divergence from the true density ratio, without its constant, for each pair.

        L = [f'(r_rejected) r_rejected - f(r_rejected)] - C f'(r_chosen)

    Source: tlm-DRE, Eqs. 5 (C = 1) and 16; Eq. 3 without the constant f(r*).
    Differs: one value per pair; the trainer averages. The loss is computed from log r, which is clamped before it is
    exponentiated. log C is clamped to at most max_log_ratio; it can exceed 0 only if a turn weight exceeds 1.

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
    """Return values to log for a density-ratio loss, without gradient; takes the arguments of the loss.

    Returns:
        Tensors by name, each [pairs]: `log_ratio/chosen` and `log_ratio/rejected`, in nats; `clamped`, 1 if one of the
        log-ratios exceeds max_log_ratio, else 0; `coefficient`, C; `gradient_weight/chosen` and
        `gradient_weight/rejected`, |dL / d log r| of the side.
    """
    # Gradients are needed here, even if the caller runs in inference mode.
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
