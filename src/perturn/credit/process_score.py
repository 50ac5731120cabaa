"""Process scores without a reward model: how good each turn was, by what the environment says of it."""

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
"""How good each turn of a trajectory was, by name [turns]. `progress` needs the remaining path of each turn."""


@dataclass(frozen=True)
@bounded
class ProcessScore:
    """1 for a turn that brought the success nearer, 0 for any other, or another measure. Loss `w-dpo` reads it.

    The mean over a trajectory is its process score: the share of right turns or of valid turns, or the total reward.

    Source: ours; StepORLM (Zhou et al. 2025), arXiv:2509.22558, asks a generative process reward model for such scores.
    Differs: no model judges a turn. The environment does, since it can measure the distance to a success or the
    validity of actions.
    """

    traits: ClassVar[CreditTraits] = CreditTraits()

    by: Annotated[str, OneOf(tuple(SCORES))] = "progress"
    """1 for a turn that brought the success nearer (progress) or could be executed (valid), else 0; or the total reward
    for each turn (outcome)."""

    distance: Annotated[str, OneOf(SENSES)] = "shortest"
    """With `by` progress, how the way to a success is measured: `shortest`, with full knowledge of the world,
    or `searching`, by the environment's expert, who knows only what the episode has shown."""

    @property
    def needs(self) -> Needs:
        """See `Credit.needs`."""
        return (Distance(self.distance),) if self.by == "progress" else ()

    def __call__(self, group: Sequence[Trajectory], **_: Any) -> list[Tensor]:
        """Return the score of every turn, one tensor per trajectory, without unit [turns].

        Raises:
            DataError: If it is by progress, and the remaining path of a turn was not measured.
        """
        return [torch.tensor(SCORES[self.by](one), dtype=torch.float32) for one in group]
