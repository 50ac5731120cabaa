"""KTO: a loss on single trajectories that are labelled as desirable or undesirable, without pairs."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from perturn.bounds import POSITIVE, bounded
from perturn.credit import TurnCredit
from perturn.credit.single_turn import Uniform
from perturn.losses.protocol import LossTraits
from perturn.losses.turn_logprobs import TurnLogprobs, weighted_sum


def kto_loss(log_ratio: Tensor, desirable: Tensor, reference_point: Tensor, *, beta: float) -> Tensor:
    """Return one minus the value of each trajectory under a value function after Kahneman and Tversky.

        L = 1 - sigmoid(beta * (u - z0)) if desirable, else 1 - sigmoid(beta * (z0 - u)),
        u = log pi(y|x) - log pi_ref(y|x)

    Source: Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization", arXiv:2402.01306, Eq. 8.
    Differs: one value per trajectory, without the factors lambda_D and lambda_U; the trainer averages.

    Args:
        log_ratio: u of each trajectory, in nats [trajectories].
        desirable: Whether the trajectory is desirable, as booleans [trajectories].
        reference_point: z0, in nats [].
        beta: Risk aversion, per nat.

    Returns:
        Loss, without unit [trajectories].
    """
    gain = log_ratio - reference_point
    return torch.sigmoid(-beta * torch.where(desirable, gain, -gain))  # 1 - sigmoid(x), without cancellation


@dataclass(frozen=True)
@bounded
class KTO:
    """Loss without pairs: desirable episodes become more likely, and undesirable episodes less likely.

        L = desirable_weight sigmoid(-beta (u - z0))      for a desirable trajectory
        L = undesirable_weight sigmoid(-beta (z0 - u))    for an undesirable trajectory

    The label of a trajectory is the sign of its weights: 1 on each turn of a desirable trajectory, -1 on each turn of
    an undesirable trajectory. Other absolute values are factors on the turns within u; this is Perturn's addition.
    z0 is the mean log-ratio of the mismatched trajectories of the whole optimizer step, clamped to at least 0, without
    gradient. A mismatched trajectory has the actions of one row after the prompt of another row.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, Eq. 8 and Section 4.1; on the actions of many turns, with
    observations masked, Xiong et al. 2024, "Building Math Agents with Multi-Turn Iterative Preference Learning",
    arXiv:2409.02392.
    Differs: to mismatch rows, the paper shifts the outputs of each micro-batch by one. Here, a row gets the actions of
    the last earlier row with another prompt, so z0 does not depend on the division of a step into micro-batches.
    """

    traits: ClassVar[LossTraits] = LossTraits(needs_reference=True, needs_mismatched=True, diagnostics=True)
    credit: ClassVar[TurnCredit] = Uniform()

    beta: Annotated[float, POSITIVE] = 0.1
    """Risk aversion, per nat; > 0. A larger value keeps the policy closer to the reference."""

    desirable_weight: Annotated[float, POSITIVE] = 1.0
    """Weight lambda_D of desirable trajectories, without unit; > 0. The paper recommends lambda_D n_D / (lambda_U n_U)
    between 1 and 4/3, where n_D and n_U are the numbers of desirable and undesirable rows."""

    undesirable_weight: Annotated[float, POSITIVE] = 1.0
    """Weight lambda_U of undesirable trajectories, without unit; > 0."""

    def __call__(
        self, chosen: TurnLogprobs, rejected: TurnLogprobs | None, step: Tensor | None = None
    ) -> Tensor:
        """Return the loss, without unit [trajectories].

        Args:
            chosen: Labelled trajectories, both desirable and undesirable.
            rejected: Mismatched trajectories, from which z0 is computed; None if `step` is given.
            step: `mismatch` of all rows of the optimizer step, in nats [rows]; None: use `mismatch` of `rejected`.
        """
        desirable = self._is_desirable(chosen)
        loss = kto_loss(
            self._log_ratio(chosen), desirable, self._reference_point(rejected, step), beta=self.beta
        )
        return torch.where(desirable, self.desirable_weight * loss, self.undesirable_weight * loss)

    @torch.no_grad()
    def mismatch(self, side: TurnLogprobs) -> Tensor:
        """Return the log-ratio of mismatched trajectories, in nats [trajectories]; without gradient."""
        return side.sum_by_trajectory(side.log_ratio())

    @torch.no_grad()
    def rewards(self, side: TurnLogprobs) -> Tensor:
        """Return beta u, without unit [trajectories]; without gradient."""
        return self.beta * self._log_ratio(side)

    @torch.no_grad()
    def diagnostics(
        self, chosen: TurnLogprobs, rejected: TurnLogprobs | None, step: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return values to log, under TRL's names; takes the arguments of the loss.

        Returns:
            `kl`: z0, in nats, repeated for each trajectory [trajectories]; `rewards/chosen` and `rewards/rejected`:
                beta
            u of the desirable and of the undesirable trajectories; `logps/chosen` and `logps/rejected`: their
            log-probabilities, in nats. The last four have one entry per trajectory of their label.
        """
        desirable = self._is_desirable(chosen)
        found = {"kl": self._reference_point(rejected, step).expand(chosen.num_trajectories)}
        logprobs = chosen.sum_by_trajectory(chosen.policy)
        for name, values in (("rewards", self.rewards(chosen)), ("logps", logprobs)):
            found |= {f"{name}/chosen": values[desirable], f"{name}/rejected": values[~desirable]}
        return found

    def _log_ratio(self, side: TurnLogprobs) -> Tensor:
        """Return u of each trajectory, in nats [trajectories]."""
        return weighted_sum(side, side.log_ratio(), self._labels(side).abs())

    def _is_desirable(self, side: TurnLogprobs) -> Tensor:
        """Return whether each trajectory is desirable, as booleans [trajectories].

        Raises:
            ValueError: If the weights of a trajectory do not have one sign.
        """
        signs = self._labels(side).sign()
        label, turns = side.sum_over_turns(signs), side.sum_over_turns(torch.ones_like(signs))
        if bool((label.abs() != turns).any()):
            raise ValueError(
                "kto needs all weights of a trajectory to be > 0, or all < 0; their sign is its label, and must be one."
            )
        return label > 0

    def _labels(self, side: TurnLogprobs) -> Tensor:
        """Return the weight of each turn, without unit and without gradient [turns].

        Raises:
            ValueError: If the batch has no weights.
        """
        if side.weight is None:
            raise ValueError(
                "kto needs labels, got weight=None. Pass weight= when building TurnLogprobs: 1 for each turn of a "
                "desirable trajectory, -1 for each of an undesirable one."
            )
        return side.weight.detach().to(side.precision)

    def _reference_point(self, rejected: TurnLogprobs | None, step: Tensor | None) -> Tensor:
        """Return z0, in nats []; without gradient.

        Raises:
            ValueError: If both arguments are None.
        """
        if step is None:
            if rejected is None:
                raise ValueError(
                    "kto needs mismatched trajectories, got None. Pass some as the second side, or what `mismatch` "
                    "gives of them as step=."
                )
            step = self.mismatch(rejected)
        return step.mean().clamp(min=0.0)
