"""DIL: imitation of the chosen trajectories by density-ratio estimation, without turn weights."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from perturn.bounds import OneOf, check_bounds
from perturn.credit import TurnCredit
from perturn.credit.single_turn import Uniform
from perturn.losses.density_ratio import KERNELS, Kernel, density_ratio_diagnostics, density_ratio_loss
from perturn.losses.protocol import LossTraits
from perturn.losses.turn_logprobs import REDUCTIONS, TurnLogprobs, reduced_log_ratio, reduced_log_ratios


@dataclass(frozen=True)
class DIL:
    """Density-ratio loss on whole episodes. It equals tlm-DRE with weight 1 for every turn.

        L = [f'(r_rejected) r_rejected - f(r_rejected)] - f'(r_chosen),   r = pi(y|x) / pi_ref(y|x), reduced

    Source: DIL (Xiao et al. 2025), as given in tlm-DRE, Eq. 5; the ablation "w/o tlm".
    Differs: log r is averaged over tokens by default, as in training by DIL's authors; `reduction` sum is the printed
    formula. Basu's kernel and the clamp are Perturn's additions. The loss differs from other implementations by
    constants: UKL keeps log pi_ref on the chosen side, and LSIF keeps both of its constants.
    """

    traits: ClassVar[LossTraits] = LossTraits(needs_rejected=True, needs_reference=True, diagnostics=True)
    credit: ClassVar[TurnCredit] = Uniform()

    kernel: Annotated[str, OneOf(tuple(KERNELS))] = "ukl"
    """Bregman kernel: ukl, lsif, bce or basu."""

    alpha: float = 0.5
    """Power of the basu kernel, without unit; > 0. Neither paper names a value. Other kernels ignore it."""

    reduction: Annotated[str, OneOf(tuple(REDUCTIONS))] = "token_mean"
    """Reduction of a trajectory's log-ratios to one number: sum, token_mean or turn_mean. `sum` can overflow."""

    max_log_ratio: float = 20.0
    """Bound to which |log r| is clamped before it is exponentiated, in nats; > 0. The paper does not clamp."""

    def __post_init__(self) -> None:
        """Reject settings outside their range."""
        check_bounds(self)
        self._kernel  # noqa: B018  checks its settings

    def __call__(self, chosen: TurnLogprobs, rejected: TurnLogprobs) -> Tensor:
        """Return the loss, without unit [pairs]."""
        return density_ratio_loss(*self._terms(chosen, rejected), kernel=self._kernel)

    @torch.no_grad()
    def rewards(self, side: TurnLogprobs) -> Tensor:
        """Return log r after reduction, in nats [trajectories]; without gradient."""
        return reduced_log_ratio(side, self.credit, self.reduction)

    def diagnostics(self, chosen: TurnLogprobs, rejected: TurnLogprobs) -> dict[str, Tensor]:
        """Return the tensors of density_ratio_diagnostics, each [pairs]; without gradient."""
        return density_ratio_diagnostics(*self._terms(chosen, rejected), kernel=self._kernel)

    def _terms(self, chosen: TurnLogprobs, rejected: TurnLogprobs) -> tuple[Tensor, Tensor, Tensor]:
        """Return log r of the chosen and the rejected side, and log C = 0; in nats, each [pairs]."""
        of_chosen, of_rejected = reduced_log_ratios(chosen, rejected, self.credit, self.reduction)
        return of_chosen, of_rejected, torch.zeros_like(of_chosen)

    @property
    def _kernel(self) -> Kernel:
        return Kernel(self.kernel, self.alpha, self.max_log_ratio)
