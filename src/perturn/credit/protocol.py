"""A credit's contract: a group of trajectories in, a number per turn out."""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from perturn.types import Trajectory


class Credit(Protocol):
    """A frozen dataclass of settings that weighs the turns of a group once called."""

    needs: ClassVar[frozenset[str]]
    """Inputs that a policy must compute first, by keyword, such as `reference`."""

    def __init__(self, **settings: Any) -> None:
        """Take the settings by name."""

    def __call__(self, group: Sequence[Trajectory], **needed: Any) -> list[Tensor]:
        """Return one tensor a trajectory, without unit [turns]."""


class TurnCredit(Credit, Protocol):
    """A credit whose number depends on the turn alone, so that a loss can ask it without a group."""

    def weigh(self, position: Tensor, turns: Tensor, confidence: Tensor | None) -> Tensor:
        """Return the weight of each turn, without unit [turns].

        Args:
            position: Position t of each turn in its trajectory, from 0 [turns]; floating point.
            turns: Number of turns T of the trajectory each turn belongs to [turns]; floating point.
            confidence: p, the geometric mean of pi_ref over the tokens of each turn, in (0, 1] [turns]; None unless
                the credit needs `reference`.
        """


def weigh_group(
    credit: TurnCredit, group: Sequence[Trajectory], reference: Sequence[Sequence[Tensor]] | None = None
) -> list[Tensor]:
    """Weigh each trajectory of a group by itself, with a credit that needs no group.

    Args:
        credit: What weighs.
        group: Trajectories.
        reference: log pi_ref of each turn's tokens, in nats `[trajectories][turns]`, each [tokens]; None unless the
            credit needs it.

    Returns:
        Weights, without unit, one tensor a trajectory [turns].

    Raises:
        ValueError: If the reference is needed and missing, or has not one entry a turn.
    """
    turns = [len(one.turns) for one in group]
    confidence: list[Tensor | None] = [None] * len(group)
    if "reference" in credit.needs:
        if reference is None:
            raise ValueError(
                f"{type(credit).__name__} needs reference=, the log-probabilities of each turn's tokens."
            )
        if [len(one) for one in reference] != turns:
            raise ValueError("reference must hold one entry for each turn of each trajectory of the group.")
        confidence = [_confidence(one) for one in reference]
    return [
        credit.weigh(torch.arange(count, dtype=torch.float32), torch.full((count,), float(count)), known)
        for count, known in zip(turns, confidence, strict=True)
    ]


def _confidence(turns: Sequence[Tensor]) -> Tensor:
    """Geometric mean of pi_ref over each turn [turns]; added up as `TurnLogprobs` does, to the last bit."""
    counts = torch.tensor([len(turn) for turn in turns])
    turn_index = torch.arange(len(turns)).repeat_interleave(counts)
    sums = torch.zeros(len(turns)).index_add(0, turn_index, torch.cat(list(turns)))
    return (sums / counts).exp()
