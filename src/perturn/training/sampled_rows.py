"""Sampled episodes as training rows, with sampling log-probabilities and the turn weights of a group."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from perturn.chat.tokens import Encoded
from perturn.credit import Credit
from perturn.errors import DataError, check_fit
from perturn.formats.read_rows import Row, Tally, read_row
from perturn.formats.trl_rows import ONLY_KTO, label_of
from perturn.group import Group, counts, groups_of
from perturn.needs import Distance, reads
from perturn.policy.credit_weights import asked, asked_clips
from perturn.policy.examples import Example
from perturn.remaining import failed_as_lost, remaining_of
from perturn.training.credit_choice import carries_own_turns
from perturn.types import PreferencePair, Trajectory, WeightedTrajectory, failed

_logger = logging.getLogger(__name__)

P = TypeVar("P")

_ROUNDING = 1e-3
"""Largest log-probability of a token, in nats. Rounding of an engine can give more than 0."""

Needed = Mapping[str, Sequence[Any]]
"""Quantities that a policy computed for a credit, by keyword, one entry per trajectory."""


def as_row(row: Any, index: int, loss: Any, tally: Tally | None = None, *, filled: bool = False) -> Row:
    """Parse a row in any format that training accepts, and check that the loss can use it.

    If the loss reads one side only, a pair becomes its chosen side.

    Args:
        row: The row, or the error that occurred when it was read.
        index: Index of the row.
        loss: The loss.
        tally: Collects facts about rows that are reported to the user later.
        filled: Whether the row comes from Arrow, which adds missing keys as None.

    Raises:
        DataError: If the row is malformed, or the loss needs another kind of row.
    """
    if isinstance(row, WeightedTrajectory) and row.clip is not None and not loss.traits.reads_clip:
        raise DataError(
            "the row has factors on its clip range, and the loss has no such range; name a loss that has one, such as "
            "ppo-clip, or leave clip out."
        )
    if isinstance(row, DataError):
        raise row
    known = isinstance(row, Trajectory | WeightedTrajectory | PreferencePair)
    parsed: Row = row if known else read_row(row, index, tally, filled=filled)
    if loss.traits.needs_mismatched:
        return _labelled(parsed, row)
    if isinstance(parsed, WeightedTrajectory) and not known:  # its weights come from a label
        raise DataError(f"row: {ONLY_KTO}")
    if isinstance(parsed, PreferencePair):
        if loss.traits.needs_behavior:
            raise DataError(
                "the loss learns from single trajectories that a policy has sampled, but the row is a pair; give "
                "each trajectory by itself."
            )
        return parsed if loss.traits.needs_rejected else parsed.chosen
    if loss.traits.needs_rejected:
        raise DataError("the loss compares two trajectories, but the row has one; give chosen and rejected.")
    return parsed


def _labelled(row: Row, given: Any) -> WeightedTrajectory:
    """Return a row with a label, which is the sign of its turn weights; TRL's `label` gives weights of 1 or -1.

    Raises:
        DataError: If the row is a pair, has no label, or has weights of both signs.
    """
    if isinstance(row, PreferencePair):
        if isinstance(given, Mapping) and label_of(given) is not None:
            raise DataError("the row is a pair, and has a label; leave one of the two out.")
        raise DataError(
            "the loss learns from single trajectories that are desirable or not, and the row is a pair; make two rows "
            "of each pair: the completion chosen with label true, and the completion rejected with label false."
        )
    if not isinstance(row, WeightedTrajectory):
        label = given.get("label") if isinstance(given, Mapping) else None
        if label is not None:
            raise DataError(f"label must be true or false, got {label!r:.40}.")
        raise DataError(
            "the loss learns from single trajectories that are desirable or not, and the row does not say; give a "
            "WeightedTrajectory with weights of 1 or -1, or prompt, completion and label."
        )
    turns = zip(row.trajectory.turns, row.weight, strict=True)
    weights = [weight for turn, weight in turns if turn.carries_loss]
    if not (all(one > 0 for one in weights) or all(one < 0 for one in weights)):
        raise DataError(
            f"task {row.trajectory.task.id!r}: the weights of a trajectory must all be > 0 where it is desirable, "
            f"and all < 0 where it is not, except for turns without loss, got {row.weight!r:.200}."
        )
    return row


def behavior_logprobs(trajectory: Trajectory, encoded: Encoded) -> Tensor:
    """Return the log-probabilities of a trajectory's tokens at sampling.

    Args:
        trajectory: The trajectory as recorded.
        encoded: The trajectory as tokens; turns without loss are ignored.

    Returns:
        log mu of the loss tokens, in nats [loss tokens].

    Raises:
        DataError: If the policy was sharpened, or an action lacks the log-probability of a token, or one is none.
    """
    found: list[float] = []
    for index in sorted(set(encoded.loss_turns)):
        action, tokens = trajectory.turns[index].action, encoded.loss_turns.count(index)
        if action.token_ids is None or action.logprobs is None or len(action.logprobs) != tokens:
            held = "none" if action.token_ids is None or action.logprobs is None else len(action.logprobs)
            raise DataError(
                f"task {trajectory.task.id!r}: turns[{index}].action must hold the log-probability that each of its "
                f"{tokens} tokens was sampled with, and holds {held}; collect the episodes with an engine that gives "
                "token_ids and logprobs, such as local or vllm."
            )
        wrong = next((value for value in action.logprobs if not -math.inf < value <= _ROUNDING), None)
        if wrong is not None:
            raise DataError(
                f"task {trajectory.task.id!r}: turns[{index}].action.logprobs must be finite numbers of at most 0, the "
                f"natural logarithms of probabilities, got {wrong}."
            )
        found += action.logprobs
    if trajectory.sharpened:
        raise DataError(
            f"task {trajectory.task.id!r}: an action was sampled at another temperature or top_p than 1, so its "
            "log-probabilities, at temperature 1, do not fit; play with temperature 1 and top_p 1."
        )
    return torch.tensor(found)


def with_weight(
    example: Example,
    weight: Sequence[float],
    clip: Sequence[float] | None = None,
    has_spread: bool | None = None,
) -> Example:
    """Return the example of one trajectory with weights and clip factors of its turns that carry loss.

    Args:
        example: The trajectory as tokens.
        weight: Weight of each turn of the trajectory, without unit [turns].
        clip: Factor on the clip range of each turn of the trajectory, without unit [turns]; None: 1.
        has_spread: Whether the weights of the trajectory's group differ from 0; None: True.
    """
    turns = sorted(set(example.chosen.loss_turns))
    weights, *clips = (
        torch.tensor([values[turn] for turn in turns], dtype=torch.float32)
        for values in (weight, clip)
        if values is not None
    )
    return replace(example, weight=(weights,), clip=tuple(clips), has_spread=has_spread is not False)


def unbroken(rows: Iterable[tuple[P, Any]], name: str, loss: Any) -> Iterator[tuple[P, Any]]:
    """Yield the rows of a dataset with their locations, without rows that contain a FAILED episode.

    An episode is FAILED if the environment or the engine raised an error; training must not learn from it. A warning
    reports the number of ignored rows. The rejected side of a pair is only checked if the loss reads it.

    Args:
        rows: Pairs of location and row, in any format that training accepts.
        name: Name of the dataset.
        loss: The loss.

    Raises:
        DataError: If there are rows, but each contains a FAILED episode.
    """
    number = left = 0
    for where, row in rows:
        number += 1
        if any(map(failed, _read_sides(row, loss))):
            left += 1
        else:
            yield where, row
    if left and left == number:
        raise DataError(
            f"the {name} dataset has {number} rows, and the episode of each FAILED in the environment or the engine: "
            "there is nothing to learn from. Their field error says why."
        )
    if left:
        _logger.warning(
            "%s: left out %d of %d rows, whose episodes FAILED in the environment or the engine",
            name,
            left,
            number,
        )


def _read_sides(row: Any, loss: Any) -> tuple[Trajectory, ...]:
    """Return the trajectories of a row that the loss reads; none if the row is not in Perturn's own format."""
    if isinstance(row, PreferencePair):
        return (row.chosen, row.rejected) if loss.traits.needs_rejected else (row.chosen,)
    if isinstance(row, WeightedTrajectory):
        return (row.trajectory,)
    return (row,) if isinstance(row, Trajectory) else ()


class Weighed(NamedTuple):
    """Numbers that a credit gives the turns of one trajectory."""

    weight: Tensor
    """Weight of each turn, without unit [turns]."""
    clip: Tensor | None = None
    """Factor on the clip range of each turn, without unit [turns]; None: 1."""
    own_turns: bool | None = None
    """Whether only the turns after the branching point carry loss; None: the trajectory is no branch."""

    def row(self, trajectory: Trajectory) -> WeightedTrajectory:
        """Return the trajectory as a row with these weights and clip factors."""
        clip = None if self.clip is None else tuple(self.clip.tolist())
        return WeightedTrajectory(trajectory, tuple(self.weight.tolist()), clip, self.own_turns)


def weigh_groups(
    trajectories: Sequence[Trajectory],
    groups: Iterable[Group],
    credit: Credit,
    needed: Needed,
    failures: str = "leave_out",
) -> dict[int, Weighed]:
    """Ask a credit for the turn weights of each group, and for factors on the clip range if it gives any.

    A credit whose statistics run across tasks is called once for all groups. The function
    `perturn.data.group_account.counts` decides which trajectories count in the statistics of their group. The others
    are not passed to the credit, and get weights of 0.

    Args:
        trajectories: Episodes.
        groups: Groups of the trajectories, from `perturn.group.groups_of`.
        credit: The credit.
        needed: Inputs of the credit by keyword, each with one entry per trajectory that counts.
        failures: One of `perturn.data.group_account.FAILURES`.

    Returns:
        Numbers of each trajectory, by its index.

    Raises:
        ConfigError: If the credit raises an error, or does not return one finite number per turn. Clip factors must
            also be > 0. Also if an input does not have one entry per trajectory that counts.
    """
    compared: list[Sequence[int]] = [group.indices for group in groups]
    if credit.traits.across_tasks:
        compared = [[index for members in compared for index in members]]
    counting = [index for index, one in enumerate(trajectories) if counts(one, failures)]
    position = {index: number for number, index in enumerate(counting)}
    _check_lengths(needed, len(counting))
    found = {
        index: Weighed(torch.zeros(len(one.turns), dtype=torch.float64))
        for index, one in enumerate(trajectories)
        if index not in position
    }
    for of_group in compared:
        members = [index for index in of_group if index in position]
        if not members:
            continue
        theirs = {name: [values[position[index]] for index in members] for name, values in needed.items()}
        group = [failed_as_lost(trajectories[index]) for index in members]
        weights, clips = asked(credit, group, **theirs), asked_clips(credit, group, **theirs)
        own = [carries_own_turns(credit, one) for one in group]
        found |= zip(members, map(Weighed, weights, clips, own), strict=True)
    return found


def _check_lengths(needed: Needed, counting: int) -> None:
    """Reject inputs of a credit that do not have one entry for each trajectory that counts.

    Raises:
        ConfigError: If there is such an input; the message names it.
    """
    for name, values in needed.items():
        must = f"have one entry for each of the {counting} trajectories that count in their groups"
        remedy = "Trajectories that FAILED have none (see perturn.data.group_account.counted)."
        check_fit(len(values) == counting, name, must, len(values), remedy)


def weigh_rows(examples: Sequence[Example], rows: Sequence[Row], credit: Credit) -> list[Example]:
    """Return the examples with the turn weights of a credit that compares the episodes of a group.

    A group is the rows of one task and one policy. The credit gets all turns of each row, even turns that a length
    limit drops.

    Args:
        examples: The rows as tokens.
        rows: The rows: either all are plain trajectories, or all have weights, which are kept.
        credit: The credit; see `weigh_groups`.

    Raises:
        DataError: If only some rows have weights.
        ConfigError: If the credit does not return one finite number per turn.
    """
    played = [row for row in rows if isinstance(row, Trajectory)]
    if not played:
        return list(examples)
    if len(played) < len(rows):
        raise DataError(
            f"{len(rows) - len(played)} of {len(rows)} rows have weights, and the others have none; the credit "
            f"{type(credit).__name__} compares whole groups, so give all rows weights, or none."
        )
    groups: dict[str, list[Group]] = {}
    for group in groups_of(played):
        groups.setdefault(group.policy, []).append(group)
    needed: dict[str, Sequence[Any]] = {}
    if reads(credit.needs, Distance):
        needed[Distance.name] = [remaining_of(one) for one in played if counts(one)]
    found = list(examples)
    for of_policy in groups.values():
        for index, weighed in weigh_groups(played, of_policy, credit, needed).items():
            own = weighed.row(played[index])
            found[index] = with_weight(examples[index], own.weight, own.clip)
    return found
