"""Sequences laid end to end as a forest: tokens that several of them begin with are there, and computed, once.

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

from perturn.errors import DataError
from perturn.policy.tokens import NO_TURN, Encoded

Batch = dict[str, Tensor]
"""A packed batch: see `lay_out`."""

Ids = NDArray[np.int64]

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
        added = own - _common(groups[index][0].ids, groups[packs[-1][-1]][0].ids) if packs else own
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
    return sum(map(len, ordered)) - sum(_common(a, b) for a, b in pairwise(ordered))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of tokens with which both begin."""
    differs = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differs, min(len(a), len(b)))


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
        segment = self._lay(rows, start, end)
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

    def _lay(self, rows: Sequence[int], start: int, end: int) -> list[int]:
        """Add the tokens from `start` to `end`, which the rows share, as one segment."""
        segment = [self.size, self.size + end - start, self.size + end - start]
        self.ids.append(self.inputs[rows[0]][start:end])
        self.position.append(np.arange(start, end))
        for row in rows:
            self.where[row][start:end] = np.arange(*segment[:2])
        self.segments.append(segment)
        self.size = segment[1]
        return segment
