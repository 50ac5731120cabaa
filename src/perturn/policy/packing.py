"""Examples as packed batches: sequences laid end to end as a forest, where tokens that several begin with are once.

A batch of n tokens in s sequences is packed in O(n) time. The forest is stored depth first, so that what descends
from a segment follows it without a gap: three numbers a segment say all that attention needs to know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from perturn.errors import DataError
from perturn.losses import TurnLogprobs
from perturn.policy.rendering import first_difference
from perturn.policy.tokens import NO_TURN, Encoded, Example

Batch = dict[str, Tensor]
"""A packed batch: see `lay_out`."""

Ids = NDArray[np.int64]

OTHERS = ("reference", "behavior", "proximal")
"""Log-probabilities beside the policy's, of an example and of a batch."""

WORTH_SHARING = 32
"""Tokens saved below which a shared beginning is computed twice instead: an attention call costs about as much."""


def lay_out(sequences: Sequence[Encoded], *, share: bool = True) -> Batch:
    """Sequences -> one flat batch without padding.

    Args:
        sequences: Trajectories as tokens; tokens after the last one that carries loss are left out.
        share: Compute once what several sequences begin with; False lays each out on its own.

    Returns:
        `ids` and `position` [tokens]; `segments` [segments, 3]: start, end, and the end of what descends from it;
        `predictor` and `target` [predictions]: the token at `predictor` predicts `target`;
        `prediction`, `turn` and `sequence` [loss tokens], ordered by sequence, then position.

    Raises:
        DataError: If a sequence carries no loss, or carries it on its first token.
    """
    targets = [_targets(encoded) for encoded in sequences]
    inputs = [
        np.asarray(encoded.ids[: at[-1]], np.int64) for encoded, at in zip(sequences, targets, strict=True)
    ]
    forest = _Forest(inputs)
    for rows in forest.by_token(range(len(inputs)), 0) if share else ([i] for i in range(len(inputs))):
        forest.add(rows, 0)
    predictors = np.concatenate([forest.where[i][at - 1] for i, at in enumerate(targets)])
    words = np.concatenate([np.asarray(one.ids)[at] for one, at in zip(sequences, targets, strict=True)])
    distinct, prediction = np.unique(np.stack([predictors, words]), axis=1, return_inverse=True)
    turns = [np.asarray(one.turn)[at] for one, at in zip(sequences, targets, strict=True)]
    return {
        "ids": torch.from_numpy(np.concatenate(forest.ids)),
        "position": torch.from_numpy(np.concatenate(forest.position)),
        "segments": torch.tensor(forest.segments),
        "predictor": torch.from_numpy(distinct[0]),
        "target": torch.from_numpy(distinct[1]),
        "prediction": torch.from_numpy(prediction.reshape(-1)),
        "turn": torch.from_numpy(np.concatenate(turns)),
        "sequence": torch.repeat_interleave(torch.tensor([len(at) for at in targets])),
    }


def by_budget(groups: Sequence[Sequence[Encoded]], budget: int) -> list[list[int]]:
    """Divide groups of sequences into packs of bounded size; those that begin alike come together.

    Args:
        groups: Sequences that must share a pack, such as the two sides of a pair.
        budget: Tokens of a pack, counted after sharing; a larger group is a pack of its own.

    Returns:
        Indices of the groups of each pack.
    """
    packs: list[list[int]] = []
    size = 0
    for index in sorted(range(len(groups)), key=lambda index: groups[index][0].ids):
        own = count_tokens(groups[index])
        added = own - first_difference(groups[index][0].ids, groups[packs[-1][-1]][0].ids) if packs else own
        if packs and size + added <= budget:
            packs[-1].append(index)
            size += added
        else:
            packs.append([index])
            size = own
    return packs


def count_tokens(sequences: Sequence[Encoded]) -> int:
    """Tokens of a pack when all that can be shared is; `lay_out` may repeat a few short beginnings."""
    ordered = sorted(encoded.ids for encoded in sequences)
    return sum(map(len, ordered)) - sum(first_difference(a, b) for a, b in pairwise(ordered))


def _targets(encoded: Encoded) -> Ids:
    """Positions of the tokens that carry loss."""
    positions = np.flatnonzero(np.asarray(encoded.turn) != NO_TURN)
    if not len(positions):
        raise DataError("a sequence carries no loss; it needs at least one action.")
    if positions[0] == 0:
        raise DataError(
            "a sequence carries loss on its first token, which nothing predicts; give it a prompt."
        )
    return positions


@dataclass
class _Forest:
    """Segments as they are laid out, depth first."""

    inputs: list[Ids]
    ids: list[Ids] = field(default_factory=list)
    position: list[Ids] = field(default_factory=list)
    segments: list[list[int]] = field(default_factory=list)
    where: list[Ids] = field(default_factory=list)
    """Index of each token of each sequence in the batch."""
    size: int = 0

    def __post_init__(self) -> None:
        self.where = [np.empty_like(ids) for ids in self.inputs]

    def add(self, rows: Sequence[int], start: int) -> None:
        """Lay out rows that are equal before `start`, where what precedes `start` is laid out already."""
        end = self._common_end(rows, start)
        ended = [row for row in rows if len(self.inputs[row]) == end]
        branches = list(self.by_token([row for row in rows if len(self.inputs[row]) > end], end))
        copies = len(branches) + bool(ended)
        if copies > 1 and (copies - 1) * (end - start) < WORTH_SHARING:
            for branch in [ended, *branches] if ended else branches:
                self.add(branch, start)
            return
        segment = [self.size, self.size + end - start, 0]
        self.ids.append(self.inputs[rows[0]][start:end])
        self.position.append(np.arange(start, end))
        for row in rows:
            self.where[row][start:end] = np.arange(*segment[:2])
        self.segments.append(segment)
        self.size = segment[1]
        for branch in branches:
            self.add(branch, end)
        segment[2] = self.size

    def by_token(self, rows: Sequence[int], at: int) -> Iterator[list[int]]:
        """Group rows by their token at a position."""

        def token(row: int) -> int:
            return int(self.inputs[row][at])

        for _, group in groupby(sorted(rows, key=token), token):
            yield list(group)

    def _common_end(self, rows: Sequence[int], start: int) -> int:
        """Where the first difference between rows is, or the shortest one ends."""
        first = self.inputs[rows[0]]
        end = min(len(self.inputs[row]) for row in rows)
        for row in rows[1:]:
            differs = np.flatnonzero(self.inputs[row][start:end] != first[start:end])
            end = start + int(differs[0]) if len(differs) else end
        return end


class Examples(Dataset[Example | None]):
    """Encoded rows, as the Trainer reads them; at the index `None` there is none."""

    def __init__(self, rows: list[Example]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int | None) -> Example | None:
        return None if index is None else self.rows[index]


class Filled(Sampler[int | None]):
    """Rows in the order of another sampler, then `None` until they divide evenly.

    So every process gets equally many batches and no row twice: the last batches hold fewer rows, or none.
    """

    def __init__(self, sampler: Sampler[int], multiple: int) -> None:
        self.sampler = sampler
        self.multiple = multiple

    def __len__(self) -> int:
        rows = len(self.sampler)  # type: ignore[arg-type]
        return rows + -rows % self.multiple

    def __iter__(self) -> Iterator[int | None]:
        yield from self.sampler
        yield from [None] * (len(self) - len(self.sampler))  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Tell a sampler that shuffles by epoch which one it is."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


@dataclass(frozen=True)
class Collator:
    """Examples -> packs of bounded size, each one pass through the model."""

    token_budget: int
    """Tokens of a pack, counted after sharing; an example with more is a pack of its own."""

    def __call__(self, examples: Sequence[Example | None]) -> dict[str, list[Batch]]:
        """Pack the examples there are; which pack holds which changes memory and speed, not the loss."""
        present = [example for example in examples if example is not None]
        packs = by_budget([example.sides for example in present], self.token_budget)
        return {"packs": [collate([present[index] for index in pack]) for pack in packs]}


def empty_pack() -> Batch:
    """A pack of no pairs: the shortest pass there is, for a process that has fewer packs than another."""
    token = Encoded(ids=(0, 0), turn=(NO_TURN, 0), role=("user", "assistant"))
    return lay_out([token]) | {"pairs": torch.tensor([0])}


def collate(examples: Sequence[Example]) -> Batch:
    """Examples -> one packed batch: all chosen sides, then all rejected sides.

    Adds `pairs`, the number of examples [1], and where the examples have them `reference`, `behavior` and `proximal`
    [loss tokens], `weight` [turns] and `statistic` [pairs].
    """
    order = [(example, 0) for example in examples]
    order += [(example, 1) for example in examples if example.rejected is not None]
    batch = lay_out([example.sides[side] for example, side in order])
    batch["pairs"] = torch.tensor([len(examples)])
    for name in (*OTHERS, "weight"):
        if getattr(examples[0], name):
            batch[name] = torch.cat([getattr(example, name)[side] for example, side in order])
    if examples[0].statistic is not None:
        batch["statistic"] = torch.tensor([example.statistic for example in examples])
    return batch


def both_sides(batch: Batch, logprobs: Tensor) -> tuple[TurnLogprobs, TurnLogprobs | None]:
    """A batch from `collate` with the log-probabilities of its loss tokens -> chosen and rejected trajectories.

    Args:
        batch: At least one example, with the weight of each turn.
        logprobs: Of the policy, in nats [loss tokens].

    Returns:
        Both sides; None for the rejected one where the examples have none.
    """
    turn, trajectory = batch["turn"], batch["sequence"]
    pairs, sequences = int(batch["pairs"]), int(trajectory[-1]) + 1
    starts_turn = torch.ones_like(turn, dtype=torch.bool)
    starts_turn[1:] = (turn.diff() != 0) | (trajectory.diff() != 0)

    def side(mask: Tensor, first: int) -> TurnLogprobs:
        others = {name: batch[name][mask] if name in batch else None for name in OTHERS}
        return TurnLogprobs(
            policy=logprobs[mask],
            **others,
            turn=turn[mask],
            trajectory=trajectory[mask] - first,
            weight=batch["weight"][mask[starts_turn]],
        )

    is_chosen = trajectory < pairs
    return side(is_chosen, 0), side(~is_chosen, pairs) if sequences > pairs else None
