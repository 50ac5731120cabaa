"""Progress advantage: the outcome, plus the increase in a turn's log-likelihood by reinforcement learning."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Annotated, Any

from torch import Tensor

from perturn.extend import MODEL, NOT_NEGATIVE, Needs, OneOf, Progress, Trajectory
from perturn.extend.tensors import (
    LOG_RATIO_REDUCTIONS,
    CreditTraits,
    Deviation,
    GroupCredit,
    Logprobs,
    Normalization,
    as_tensors,
    by_task,
    means_of_others,
    normalized_progress,
    turn_log_ratios,
)


@dataclass(frozen=True)
class ProgressAdvantage(GroupCredit):
    """RLOO's advantage, plus the log-ratio of a turn's likelihood under the trained policy and under the reference.

        A_it = S_i - mean_(j != i) S_j + alpha z_it,   z_it = (u_it - mean(u)) / (std(u) + 1e-6)
        u_it = sum_j log pi_RL(y_itj) - log pi_ref(y_itj)

    mean(u) and std(u) are over the turns of the group. If pi_RL equals pi_ref, as before the first update, u and z
    are 0 and the outcome alone counts.

    Source: "Neglected Free Lunch from Post-training: Progress Advantage for LLM Agents", by its abstract.
    Differs: the paper scores turns with u, and does not train on u. The outcome, the normalization and alpha are
    Perturn's additions. In a FAILED trajectory u is not known and the score is 0. A trajectory alone in its group gets
    0.
    """

    alpha: Annotated[float, NOT_NEGATIVE] = 0.1
    """Weight of z relative to the outcome; >= 0. At 0 the credit equals `rloo`."""

    outcome: bool = True
    """Whether the outcome counts. False is meant for scoring turns: training on z alone would reinforce the policy's
    own changes."""

    reduction: Annotated[str, OneOf(LOG_RATIO_REDUCTIONS)] = "sum"
    """Reduction of a turn's log-ratios to u: sum over its tokens; or mean, which does not depend on the length."""

    normalize: Normalization = "std"
    """Normalization of u. mean: subtract the mean, in nats. std: then divide by the standard deviation too."""

    std: Deviation = "sample"
    """Standard deviation: sample (over n - 1), or population."""

    checkpoint: Annotated[str | None, MODEL] = None
    """Policy pi_RL: the name of a policy of the run, a folder, or a Hub id. It must have the vocabulary of the run's
    model. None: the policy that acted."""

    @property
    def needs(self) -> Needs:
        """See `Credit.needs`."""
        return (
            "reference",
            Progress(self.checkpoint),
        )

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        return CreditTraits(needs_group=True, unbiased=self.outcome and self.alpha == 0)

    def __call__(
        self,
        group: Sequence[Trajectory],
        *,
        progress: Logprobs | None = None,
        reference: Logprobs | None = None,
        **_: Any,
    ) -> list[Tensor]:
        """Return the advantage of every turn, one tensor per trajectory [turns].

        Raises:
            ValueError: If `progress` or `reference` is None, not finite, or not of the group's shape.
        """
        ratios = turn_log_ratios(group, progress, reference, self.reduction)
        rewards = self.returns(group)
        found = [[0.0] * len(of_one) for of_one in rewards]
        for members in by_task(group):
            scores = [fsum(rewards[i]) for i in members]
            others = means_of_others(members, scores)
            its = normalized_progress([ratios[i] for i in members], self.normalize, self.std)
            for i, score, of_one in zip(members, scores, its, strict=True):
                if i in others:
                    own = score - others[i] if self.outcome else 0.0
                    found[i] = [own + self.alpha * z for z in of_one]
        return as_tensors(found)
