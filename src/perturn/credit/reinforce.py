"""REINFORCE++: returns whitened over all tasks, optionally after subtracting the mean score of each task."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Annotated, Any, ClassVar

from torch import Tensor

from perturn.bounds import Bound, check_bounds
from perturn.credit.group_statistics import (
    Deviation,
    Singleton,
    Unit,
    as_tensors,
    by_task,
    deviation,
    mean,
    returns_to_go,
)
from perturn.credit.protocol import CreditTraits
from perturn.credit.returns import Numbers, Return
from perturn.needs import Needs
from perturn.types import Trajectory

_VARIANCE = 1e-8
"""Number added to the variance before its square root divides, as in verl."""


@dataclass(frozen=True)
class ReinforcePlusPlus:
    """Return from each turn on, normalized by the mean and deviation over the episodes of all tasks.

        A_it = (G_it - mean(S)) / sqrt(var(S) + 1e-8),   G_it = sum_k gamma^(k - t) r_ik,   S_i = G_i0

    With `baseline`, the mean score of the task is subtracted from S_i first. The difference replaces S_i, and replaces
    G_it at every turn.

    Source: Hu 2025, "REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models",
    arXiv:2501.03262.
    Differs: one number per turn. Statistics run over the trajectories of all tasks of a call, or over their turns; the
    published code runs them over tokens. Returns continue across observations; verl-agent and SkyRL reset them to 0
    there.
    """

    needs: ClassVar[Needs] = ()

    gamma: Annotated[float, Bound(least=0, most=1)] = 1.0
    """Discount from one turn to the next, in [0, 1]."""

    baseline: bool = False
    """Whether the mean score of the task is subtracted from each score first (REINFORCE++-baseline)."""

    statistics: Unit = "trajectories"
    """Unit of the statistics. trajectories: each trajectory counts once. steps: each turn counts once, so long
    trajectories weigh more."""

    std: Deviation = "sample"
    """Standard deviation: sample (over n - 1), or population."""

    singleton: Singleton = "zero"
    """With `baseline`, score of a trajectory alone in its task. zero: 0, and the statistics exclude the trajectory.
    raw: its own score."""

    returns: Return = Return()  # noqa: RUF009  frozen
    """Rewards to count, and the penalty of invalid actions; see `Return`."""

    def __post_init__(self) -> None:
        """Reject settings outside their range."""
        check_bounds(self)

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        weighs_alone = not self.baseline or self.singleton == "raw"
        return CreditTraits(
            needs_group=True, weighs_alone=weighs_alone, across_tasks=True, discount=self.gamma
        )

    def __call__(self, group: Sequence[Trajectory], **_: Any) -> list[Tensor]:
        """Return the advantage of every turn, one tensor per trajectory, without unit [turns]."""
        to_go = [returns_to_go(of_one, self.gamma) for of_one in self.returns(group)]
        scores = [of_one[0] if of_one else 0.0 for of_one in to_go]
        counted = set(range(len(group)))
        if self.baseline:
            counted -= self._take_baseline(group, scores)
            to_go = [[score] * len(of_one) for score, of_one in zip(scores, to_go, strict=True)]
        of_steps = self.statistics == "steps"
        values = [value for i in sorted(counted) for value in (to_go[i] if of_steps else [scores[i]])]
        return as_tensors(self._whiten(to_go, counted, values))

    def _take_baseline(self, group: Sequence[Trajectory], scores: list[float]) -> set[int]:
        """Subtract each task's mean from its scores, in place; return the trajectories that statistics exclude."""
        alone = set()
        for members in by_task(group):
            if len(members) > 1:
                centre = mean([scores[i] for i in members])
                for i in members:
                    scores[i] -= centre
            elif self.singleton == "zero":
                scores[members[0]] = 0.0
                alone.add(members[0])
        return alone

    def _whiten(self, values: Numbers, counted: set[int], over: list[float]) -> Numbers:
        spread = deviation(over, self.std) if len(over) > 1 else 0.0
        if not spread:
            return [[0.0] * len(of_one) for of_one in values]
        centre, scale = mean(over), sqrt(spread**2 + _VARIANCE)
        return [
            [(value - centre) / scale if i in counted else 0.0 for value in of_one]
            for i, of_one in enumerate(values)
        ]
