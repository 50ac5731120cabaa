"""Shared part of the density-ratio losses: the loss on log-ratios, and the values logged beside it."""

import torch
from torch import Tensor

from perturn.losses.kernels import Kernel


def density_ratio_loss(
    log_ratio_chosen: Tensor, log_ratio_rejected: Tensor, log_coefficient: Tensor, *, kernel: Kernel
) -> Tensor:
    """Bregman divergence from the true density ratio, without its constant, on one pair each.

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
    coefficient = _coefficient(log_coefficient, kernel)
    return kernel.conjugate(log_ratio_rejected) - coefficient * kernel.derivative(log_ratio_chosen)


def density_ratio_diagnostics(
    log_ratio_chosen: Tensor, log_ratio_rejected: Tensor, log_coefficient: Tensor, *, kernel: Kernel
) -> dict[str, Tensor]:
    """Return what shows whether a density-ratio loss is healthy, without gradient.

    Args:
        log_ratio_chosen: log r of the chosen trajectory, in nats [pairs].
        log_ratio_rejected: log r of the rejected trajectory, in nats [pairs].
        log_coefficient: log C of the chosen trajectory, in nats [pairs].
        kernel: The kernel f.

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
        "coefficient": _coefficient(log_coefficient, kernel),
        "gradient_weight/chosen": to_chosen.abs(),
        "gradient_weight/rejected": to_rejected.abs(),
    }


def _coefficient(log_coefficient: Tensor, kernel: Kernel) -> Tensor:
    """Return C, at most e^max_log_ratio and without gradient [pairs]."""
    return log_coefficient.detach().clamp(max=kernel.max_log_ratio).exp()
