"""Uniform credit: every turn counts alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from perturn.credit.protocol import weigh_group
from perturn.types import Trajectory


@dataclass(frozen=True)
class Uniform:
    """The weight 1 for every turn, as a loss on whole trajectories has it.

    Source: none is needed; the baseline that every turn-level credit is compared with.
    Differs: nothing.
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, group: Sequence[Trajectory], **_: Any) -> list[Tensor]:
        """Return 1 for every turn, one tensor a trajectory, without unit [turns]."""
        return weigh_group(self, group)

    def weigh(self, position: Tensor, turns: Tensor, confidence: Tensor | None = None) -> Tensor:
        """Return 1 for every turn, without unit [turns]."""
        return torch.ones_like(position)
