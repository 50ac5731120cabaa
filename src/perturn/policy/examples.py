"""Training examples: a trajectory, or a pair of them, as tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perturn.errors import DataError
from perturn.policy.tokens import NO_TURN, Encoded, Renderer
from perturn.types import PreferencePair, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

SHARED_PREFIX = ("keep", "mask")


@dataclass(frozen=True)
class Example:
    """One row of training data; `rejected` is None where a loss reads one side only."""

    chosen: Encoded
    rejected: Encoded | None = None
    reference: tuple[Tensor, ...] = ()
    """Reference log-probabilities of each side's loss tokens, in nats; empty where nothing reads them."""
    trajectories: tuple[Trajectory, ...] = ()
    """Each side as it was played, with those of its turns that carry loss."""
    weight: tuple[Tensor, ...] = ()
    """Weight of each side's turns that carry loss, as the credit wrote it, without unit [turns]."""
    statistic: float | None = None
    """Statistic over all pairs of an optimizer step that a loss reads; None where none does."""

    @property
    def sides(self) -> tuple[Encoded, ...]:
        """The sides there are."""
        return (self.chosen,) if self.rejected is None else (self.chosen, self.rejected)


def encode_example(
    row: Trajectory | PreferencePair, renderer: Renderer, max_length: int | None, shared_prefix: str = "keep"
) -> Example:
    """Row -> tokens.

    Args:
        row: A trajectory, or a pair of them.
        renderer: Conversation -> tokens.
        max_length: Longest sequence in tokens; None for no limit.
        shared_prefix: `keep`, or `mask` to take the turns with which both sides begin out of the loss.

    Raises:
        DataError: If both sides are the same tokens, or a side has no turn that fits.
    """
    if isinstance(row, Trajectory):
        chosen = renderer.encode(row, max_length)
        return Example(chosen, trajectories=(_with_loss(row, chosen),))
    chosen, rejected = renderer.encode(row.chosen, max_length), renderer.encode(row.rejected, max_length)
    if chosen.ids == rejected.ids:
        cut = " after truncation" if chosen.dropped_turns or rejected.dropped_turns else ""
        raise DataError(f"chosen equals rejected{cut} for task {row.chosen.task.id!r}; remove the pair.")
    if shared_prefix == "mask":
        turns = min(_shared_turns(chosen, rejected), chosen.turns - 1, rejected.turns - 1)
        chosen, rejected = _without_turns(chosen, turns), _without_turns(rejected, turns)
    return Example(
        chosen,
        rejected,
        trajectories=(_with_loss(row.chosen, chosen), _with_loss(row.rejected, rejected)),
    )


def _with_loss(trajectory: Trajectory, encoded: Encoded) -> Trajectory:
    """The trajectory with those of its turns that carry loss."""
    kept = sorted(set(encoded.turn) - {NO_TURN})
    return replace(trajectory, turns=tuple(trajectory.turns[turn] for turn in kept))


def _shared_turns(chosen: Encoded, rejected: Encoded) -> int:
    """Number of whole turns, from the first, in which both sides are the same tokens."""
    pairs = zip(chosen.ids, rejected.ids, chosen.turn, rejected.turn, strict=False)
    same = next((i for i, (a, b, s, t) in enumerate(pairs) if a != b or s != t), None)
    if same is None:
        same = min(len(chosen.ids), len(rejected.ids))
    return min(_turns_before(chosen, same), _turns_before(rejected, same))


def _turns_before(side: Encoded, position: int) -> int:
    """Number of turns that end before a position."""
    last = {turn: index for index, turn in enumerate(side.turn) if turn != NO_TURN}
    return sum(index < position for index in last.values())


def _without_turns(side: Encoded, turns: int) -> Encoded:
    """The side with the loss of its first turns masked."""
    return replace(side, turn=tuple(NO_TURN if turn < turns else turn for turn in side.turn))


def check_lengths(examples: Sequence[Example], limit: int | None) -> None:
    """Refuse sequences longer than the model's context.

    Raises:
        DataError: For the longest one.
    """
    longest = max((len(side.ids) for side in sides(examples)), default=0)
    if limit is not None and longest > limit:
        raise DataError(
            f"the longest sequence has {longest} tokens, but the model's context is {limit}; "
            f"set max_length to {limit} or less to drop whole turns from the end."
        )


def sides(examples: Sequence[Example]) -> Iterator[Encoded]:
    """All sides of all examples, in order."""
    for example in examples:
        yield from example.sides
