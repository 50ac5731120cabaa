"""Oracle credit: the number of turns by which each turn shortened the true distance to a success."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torch import Tensor

from perturn.extend import SENSES, Distance, Needs, OneOf, Remaining, Trajectory, bounded, failed
from perturn.extend.tensors import CreditTraits, as_tensors, by_task, means_of_others


def shortened(turn: Remaining) -> int:
    """Return the number of turns by which a turn shortened the distance to a success; -1: success became impossible."""
    if turn.before is None:
        return 0
    return -1 if turn.after is None else turn.before - turn.after


@dataclass(frozen=True)
@bounded
class Potential:
    """Difference of the potential around a turn, minus its mean over the turns of the task's other episodes.

        A_t = Phi(s_(t+1)) - Phi(s_t) - mean,   Phi(s) = -(number of turns from s to a success)

    The environment measures the distance. Before the mean is subtracted, a turn on a shortest path has 1, and a turn
    that changes nothing has 0. A turn after which no success is possible has -1, and the turns after it have 0.

    Source: Perturn, an oracle for group credits. The difference is the shaping reward of Ng, Harada and Russell
    1999, "Policy Invariance Under Reward Transformations", without a discount.
    Differs: a turn gets only its own shaping reward. In the source, the shaping reward is added to the reward, and
    earlier turns get it too. An episode that FAILED has 0 before the mean is subtracted. An episode alone in its
    group gets 0.
    """

    traits: ClassVar[CreditTraits] = CreditTraits(needs_group=True)

    distance: Annotated[str, OneOf(SENSES)] = "shortest"
    """Measure of the distance to a success. shortest: the shortest path, with full knowledge of the environment.
    searching: the path of the environment's expert, who knows only what the episode has shown."""

    @property
    def needs(self) -> Needs:
        """See `Credit.needs`."""
        return (Distance(self.distance),)

    def __call__(
        self, group: Sequence[Trajectory], *, distance: Sequence[Sequence[Remaining]], **_: Any
    ) -> list[Tensor]:
        """Return the weight of every turn as a number of turns, one tensor per trajectory [turns].

        Args:
            group: Trajectories of one task or of several tasks.
            distance: Distance to a success before and after each turn `[trajectories][turns]`.
        """
        gains = [
            [0.0 if failed(one) else float(shortened(turn)) for turn in of_one]
            for one, of_one in zip(group, distance, strict=True)
        ]
        found = [[0.0] * len(of_one) for of_one in gains]
        for members in by_task(group):
            owners = [i for i in members for _ in gains[i]]
            others = means_of_others(owners, [gain for i in members for gain in gains[i]])
            for i, mean in others.items():
                found[i] = [gain - mean for gain in gains[i]]
        return as_tensors(found)
