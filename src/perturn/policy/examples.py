"""Rows of training data as tokens: a trajectory or a pair, and the turns of its sides that carry loss."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from perturn.chat.rendering import NO_TURN, first_difference
from perturn.chat.tokens import Encoded, Renderer, silent_turns
from perturn.errors import DataError
from perturn.types import PreferencePair, Trajectory, WeightedTrajectory

if TYPE_CHECKING:
    from torch import Tensor

_logger = logging.getLogger(__name__)

SHARED_PREFIX = ("keep", "mask")
LOSS_ON = ("actions", "all")


@dataclass(frozen=True)
class Example:
    """One row of training data; `rejected` is None where a loss reads one side only."""

    chosen: Encoded
    rejected: Encoded | None = None
    reference: tuple[Tensor, ...] = ()
    """Reference log-probabilities of each side's loss tokens, in nats; empty where nothing reads them."""
    behavior: tuple[Tensor, ...] = ()
    """Log-probabilities that tokens were sampled with, in nats; empty where nothing reads them."""
    proximal: tuple[Tensor, ...] = ()
    """Log-probabilities under the policy as training starts, in nats; empty where nothing reads them."""
    inputs: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)
    """Log-probabilities under further frozen policies that a loss reads, by the name of the input, in nats."""
    trajectories: tuple[Trajectory, ...] = ()
    """Each side as it was played, with its turns that carry loss."""
    whole: tuple[Trajectory, ...] = ()
    """Each side as it was played, with all of its turns."""
    weight: tuple[Tensor, ...] = ()
    """Weight of each side's turns that carry loss, as the credit wrote it, without unit [turns]."""
    clip: tuple[Tensor, ...] = ()
    """Factor on the clip range of each side's turns that carry loss, without unit [turns]; empty: 1."""
    mismatched: Encoded | None = None
    mismatched_logprobs: Mapping[str, Tensor] = field(default_factory=dict)
    """The actions of another row after this one's prompt, None where no loss reads them; and their log-probabilities,
    in nats, by the name of the frozen policy, such as `reference`."""
    statistic: float | list[float] | None = None
    """Statistic over all pairs of an optimizer step that a loss reads; None where none does."""
    has_spread: bool = True
    """Whether the weights of the trajectory's group differ from 0; see `WeightedTrajectory`."""

    @property
    def sides(self) -> tuple[Encoded, ...]:
        """The sides there are."""
        return (self.chosen,) if self.rejected is None else (self.chosen, self.rejected)


def encode_example(
    row: Trajectory | WeightedTrajectory | PreferencePair,
    renderer: Renderer,
    max_length: int | None,
    shared_prefix: str = "keep",
    loss_on: str = "actions",
    own_turns: bool = False,
) -> Example:
    """Turn row into tokens.

    Args:
        row: A trajectory, which may have weights, or a pair of trajectories.
        renderer: Conversation -> tokens.
        max_length: Longest sequence in tokens; None for no limit.
        shared_prefix: `keep`, or `mask` to take the turns with which both sides begin out of the loss.
        loss_on: `actions`, or `all` where a trajectory carries loss on the tokens that the policy read too.
        own_turns: Whether a branched episode carries loss only on the turns after its branching point,
            where the row itself does not say.

    Raises:
        DataError: If both sides are the same tokens, or a side has no turn that fits, no turn of its own, or no turn
            that carries loss.
    """
    said = None
    if isinstance(row, WeightedTrajectory):
        said, row = row.own_turns, row.trajectory
    if isinstance(row, Trajectory):
        chosen = renderer.encode(row, max_length, every_turn=True)
        chosen = _with_all(chosen) if loss_on == "all" else chosen
        if own_turns and row.origin is not None if said is None else said:
            chosen = _own_turns(row, chosen)
        chosen = _without_silent(row, chosen, "the trajectory")
        return Example(chosen, trajectories=(_with_loss(row, chosen),), whole=(row,))
    chosen, rejected = (
        renderer.encode(side, max_length, every_turn=True) for side in (row.chosen, row.rejected)
    )
    if chosen.ids == rejected.ids:
        cut = " after truncation" if chosen.dropped_turns or rejected.dropped_turns else ""
        raise DataError(f"chosen equals rejected{cut} for task {row.chosen.task.id!r}; remove the pair.")
    shared = _shared_turns(chosen, rejected) if shared_prefix == "mask" else 0
    chosen = _without_silent(row.chosen, chosen, "chosen")
    rejected = _without_silent(row.rejected, rejected, "rejected")
    shared = min(shared, chosen.loss_turns[-1], rejected.loss_turns[-1])  # each side keeps a turn
    chosen, rejected = _without_turns(chosen, shared), _without_turns(rejected, shared)
    trajectories = _with_loss(row.chosen, chosen), _with_loss(row.rejected, rejected)
    return Example(chosen, rejected, trajectories=trajectories, whole=(row.chosen, row.rejected))


def _own_turns(branch: Trajectory, side: Encoded) -> Encoded:
    """Return a branched episode with loss on its own turns alone; the resumed episode has loss on the shared turns."""
    if side.turns <= branch.taken_over:
        raise DataError(
            f"task {branch.task.id!r:.80}, sample {branch.sample}: none of the turns after the branching point, "
            f"from turn {branch.taken_over} on, fits the length limit; leave it out."
        )
    return _without_turns(side, branch.taken_over)


def _without_silent(trajectory: Trajectory, side: Encoded, name: str) -> Encoded:
    """Return the side without loss on turns that are empty or not to be trained."""
    if silent := silent_turns(trajectory):
        side = replace(side, turn=tuple(NO_TURN if turn in silent else turn for turn in side.turn))
    if not side.turns:
        empty = sum(turn.trained and not turn.carries_loss for turn in trajectory.turns)
        marked = sum(not turn.trained for turn in trajectory.turns)
        raise DataError(
            f"task {trajectory.task.id!r:.80}: {name} has no turn that carries loss: of {len(trajectory.turns)} turns "
            f"{empty} are empty, {marked} are marked as not to be trained, and any other is cut by the length limit or "
            "masked; remove the row."
        )
    return side


def _with_all(side: Encoded) -> Encoded:
    """Return the side with loss on all tokens but the first of each sequence; read tokens belong to the turn after."""
    turn, following = [NO_TURN] * len(side.ids), NO_TURN
    for index in reversed(range(len(side.ids))):
        following = side.turn[index] if side.turn[index] != NO_TURN else following
        turn[index] = following
    for start in side.starts:
        turn[start] = NO_TURN
    return replace(side, turn=tuple(turn))


def _with_loss(trajectory: Trajectory, encoded: Encoded) -> Trajectory:
    """Return the trajectory with its turns that carry loss, one after the other."""
    kept = (trajectory.turns[turn] for turn in sorted(set(encoded.loss_turns)))
    return replace(trajectory, turns=tuple(replace(turn, follows=None, opening=None) for turn in kept))


def _shared_turns(chosen: Encoded, rejected: Encoded) -> int:
    """Return the number of whole turns, from the first, in which both sides are the same tokens."""
    same = first_difference(*(list(zip(side.ids, side.turn, strict=True)) for side in (chosen, rejected)))
    return min(_turns_before(chosen, same), _turns_before(rejected, same))


def _turns_before(side: Encoded, position: int) -> int:
    """Return the number of turns that end before a position."""
    last = {turn: index for index, turn in enumerate(side.turn) if turn != NO_TURN}
    return sum(index < position for index in last.values())


def _without_turns(side: Encoded, turns: int) -> Encoded:
    """Return the side with the loss of its first turns masked."""
    return replace(side, turn=tuple(NO_TURN if turn < turns else turn for turn in side.turn))


def warn_of_changes(name: str, examples: Sequence[Example], max_length: int | None) -> None:
    """Log how many turns of a dataset are dropped, and how many are read otherwise than they might be meant.

    Args:
        name: Of the dataset.
        examples: Its rows.
        max_length: Limit that turns were dropped for, in tokens.
    """
    dropped = [side.dropped_turns for side in sides(examples) if side.dropped_turns]
    if dropped:
        _logger.warning(
            "%s: dropped %d turns from the end of %d trajectories to keep max_length=%s",
            name,
            sum(dropped),
            len(dropped),
            max_length,
        )
    if quoted := sum(side.quoted_turns for side in sides(examples)):
        _logger.warning(
            "%s: %d actions hold control tokens such as <|im_end|> in their text; the policy learns them as plain "
            "text, not as the tokens. perturn inspect --check names the rows.",
            name,
            quoted,
        )


def check_lengths(examples: Sequence[Example], limit: int | None, names: Sequence[str] = ()) -> None:
    """Reject sequences longer than the model's context.

    Args:
        examples: Rows.
        limit: The context, in tokens; None for none.
        names: Name of each row, for the error; empty: its index.

    Raises:
        DataError: For the longest one.
    """
    lengths = [max(side.longest for side in example.sides) for example in examples]
    longest = max(lengths, default=0)
    if limit is not None and longest > limit:
        index = lengths.index(longest)
        raise DataError(
            f"the longest sequence has {longest} tokens ({names[index] if names else f'row {index}'}), but the model's "
            f"context is {limit}; set max_length to {limit} or less to drop whole turns from the end."
        )


def sides(examples: Sequence[Example]) -> Iterator[Encoded]:
    """Yield all sides of all examples, in order."""
    for example in examples:
        yield from example.sides
