"""Process scores from the environment, without a reward model: a score for each turn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from perturn.bounds import OneOf, bounded
from perturn.credit.protocol import CreditTraits
from perturn.needs import SENSES, Distance, Needs
from perturn.remaining import wrong_turns
from perturn.types import Trajectory, score

SCORES: dict[str, Callable[[Trajectory], list[float]]] = {
    "progress": lambda one: [float(not wrong) for wrong in wrong_turns(one)],
    "valid": lambda one: [float(turn.valid) for turn in one.turns],
    "outcome": lambda one: [score(one)] * len(one.turns),
}
"""Name of a score -> function from a trajectory to the score of each turn, without unit [turns]. `progress` needs the
recorded distance to a success before and after each turn."""


@dataclass(frozen=True)
@bounded
class ProcessScore:
    """Score of each turn, such as 1 if the turn came closer to success and 0 if not. For the loss `w-dpo`.

    The mean over the turns of a trajectory is its process score. Depending on `by`, it is the share of turns that came
    closer to success, the share of valid turns, or the total reward.

    Source: ours; StepORLM (Zhou et al. 2025), arXiv:2509.22558, asks a generative process reward model for such scores.
    Differs: the environment scores a turn, not a model. The environment measures the distance to success, or knows
    whether an action was valid.
    """

    traits: ClassVar[CreditTraits] = CreditTraits()

    by: Annotated[str, OneOf(tuple(SCORES))] = "progress"
    """Score of a turn. progress: 1 if the turn came closer to success, else 0. valid: 1 if its action was valid,
    else 0. outcome: the total reward of the trajectory."""

    distance: Annotated[str, OneOf(SENSES)] = "shortest"
    """With `by` progress, the measure of the distance to success. shortest: the shortest path, with full knowledge of
    the environment. searching: the path of the environment's expert, who knows only what the episode has shown."""

    @property
    def needs(self) -> Needs:
        """See `Credit.needs`."""
        return (Distance(self.distance),) if self.by == "progress" else ()

    def __call__(self, group: Sequence[Trajectory], **_: Any) -> list[Tensor]:
        """Return the score of every turn, one tensor per trajectory, without unit [turns].

        Raises:
            DataError: If `by` is progress and the remaining path of a turn was not measured.
        """
        return [torch.tensor(SCORES[self.by](one), dtype=torch.float32) for one in group]
