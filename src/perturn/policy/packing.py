"""Examples as packed batches: sequences laid end to end as a forest, where tokens that several begin with are once.

A batch of n tokens in s sequences is packed in O(n) time. The forest is stored depth first, so that the descendants of
a segment follow it without a gap: three numbers per segment are enough for attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from perturn.chat.rendering import first_difference
from perturn.chat.tokens import NO_TURN, Encoded
from perturn.errors import DataError
from perturn.losses import TurnLogprobs
from perturn.policy.examples import Example

Batch = dict[str, Tensor]
"""A packed batch: see `lay_out`."""

Ids = NDArray[np.int64]

OTHERS = ("reference", "behavior", "proximal")
"""Log-probabilities besides the policy's, of an example and of a batch."""

_INPUT = "inputs/"
"""Begins the key of a batch's log-probabilities under a further frozen policy."""

WORTH_A_PASS = 256
"""Tokens saved below which each pack computes the common beginning of all packs itself: a separate pass costs about as
much."""

WORTH_SHARING = 32
"""Tokens saved below which a shared beginning is computed twice instead: an attention call costs about as much."""


def lay_out(trajectories: Sequence[Encoded], *, share: bool = True, start: int = 0) -> Batch:
    """Pack trajectories into one flat batch without padding.

    Args:
        trajectories: As tokens. Sequences without loss, and tokens after the last loss token of a sequence, are left
            out.
        share: Compute the common beginning of several sequences once; False lays each out on its own.
        start: Tokens that all sequences begin with and that are computed elsewhere, from `common_beginning`.

    Returns:
        `ids` and `position` [tokens]; `segments` [segments, 3]: start, end, and the end of what descends from it;
        `predictor` and `target` [predictions]: the token at `predictor` predicts `target`;
        `prediction`, `turn` and `trajectory` [loss tokens], ordered by trajectory, then turn, then position.

    Raises:
        DataError: If a trajectory carries no loss, or carries it on the first token of a sequence.
    """
    parts = [list(loss_parts(encoded)) for encoded in trajectories]
    inputs, targets, words, turns = zip(*(part for own in parts for part in own), strict=True)
    forest = _Forest(inputs)
    for rows in forest.by_token(range(len(inputs)), start) if share else ([i] for i in range(len(inputs))):
        forest.add(rows, start)
    predictors = np.concatenate([forest.where[i][at - 1] for i, at in enumerate(targets)])
    asked = np.stack([predictors, np.concatenate(words)])
    distinct, prediction = np.unique(asked, axis=1, return_inverse=True)
    return {
        "ids": torch.from_numpy(np.concatenate(forest.ids)),
        "position": torch.from_numpy(np.concatenate(forest.position)),
        "segments": torch.tensor(forest.segments),
        "predictor": torch.from_numpy(distinct[0]),
        "target": torch.from_numpy(distinct[1]),
        "prediction": torch.from_numpy(prediction.reshape(-1)),
        "turn": torch.from_numpy(np.concatenate(turns)),
        "trajectory": torch.repeat_interleave(
            torch.tensor([sum(len(at) for _, at, _, _ in own) for own in parts])
        ),
    }


def by_budget(groups: Sequence[Sequence[Encoded]], budget: int) -> list[list[int]]:
    """Divide groups of trajectories into packs of bounded size; groups with the same beginning come together.

    Args:
        groups: Trajectories that must share a pack, such as the two sides of a pair.
        budget: Tokens of a pack, counted after sharing; a larger group is a separate pack.

    Returns:
        Indices of the groups of each pack.
    """
    firsts = [group[0].ids[group[0].sequences[0]] for group in groups]
    packs: list[list[int]] = []
    size = 0
    for index in sorted(range(len(groups)), key=firsts.__getitem__):
        own = count_tokens(groups[index])
        added = own - first_difference(firsts[index], firsts[packs[-1][-1]]) if packs else own
        if packs and size + added <= budget:
            packs[-1].append(index)
            size += added
        else:
            packs.append([index])
            size = own
    return packs


def count_tokens(trajectories: Sequence[Encoded]) -> int:
    """Return tokens of a pack when all that can be shared is; `lay_out` may repeat a few short beginnings."""
    ordered = sorted(encoded.ids[span] for encoded in trajectories for span in encoded.sequences)
    return sum(map(len, ordered)) - sum(first_difference(a, b) for a, b in pairwise(ordered))


def common_beginning(trajectories: Sequence[Encoded]) -> list[int]:
    """Return the tokens that all sequences begin with and that predict no loss token; `lay_out` may start there."""
    parts = [part for encoded in trajectories for part in loss_parts(encoded)]
    ordered = sorted(ids.tolist() for ids, _, _, _ in parts)
    silent = min(int(at[0]) - 1 for _, at, _, _ in parts)
    common: list[int] = ordered[0][: min(silent, first_difference(ordered[0], ordered[-1]))]
    return common


def loss_parts(encoded: Encoded) -> Iterator[tuple[Ids, Ids, Ids, Ids]]:
    """Yield, for each sequence that carries loss, its computed tokens, and tokens and turns of its loss."""
    turn = np.asarray(encoded.turn)
    spans = [(span, np.flatnonzero(turn[span] != NO_TURN)) for span in encoded.sequences]
    carrying = [(span, at) for span, at in spans if len(at)]
    if not carrying:
        raise DataError("a trajectory carries no loss; it needs at least one action.")
    for span, at in carrying:
        if at[0] == 0:
            raise DataError(
                "a sequence carries loss on its first token, which nothing predicts; give it a prompt."
            )
        ids = np.asarray(encoded.ids[span], np.int64)
        yield ids[: at[-1]], at, ids[at], turn[span][at]


@dataclass
class _Forest:
    """Segments as they are laid out, depth first."""

    inputs: Sequence[Ids]
    ids: list[Ids] = field(default_factory=list)
    position: list[Ids] = field(default_factory=list)
    segments: list[list[int]] = field(default_factory=list)
    where: list[Ids] = field(default_factory=list)
    """Index of each token of each sequence in the batch."""
    size: int = 0

    def __post_init__(self) -> None:
        self.where = [np.empty_like(ids) for ids in self.inputs]

    def add(self, rows: Sequence[int], start: int) -> None:
        """Lay out rows that are equal before `start`; the tokens before `start` are laid out already.

        A row that ends where the others continue with equal tokens needs no segment.
        """
        end = self._common_end(rows, start)
        ended = [row for row in rows if len(self.inputs[row]) <= end]
        branches = list(self.by_token([row for row in rows if len(self.inputs[row]) > end], end))
        if branches and (len(branches) - 1) * (end - start) < WORTH_SHARING:
            for index, branch in enumerate(branches):
                self.add(branch if index else [*ended, *branch], start)
            return
        segment = [self.size, self.size + end - start, 0]
        longest = max(rows, key=lambda row: len(self.inputs[row]))
        self.ids.append(self.inputs[longest][start:end])
        self.position.append(np.arange(start, end))
        for row in rows:
            own = self.where[row][start:end]
            own[:] = np.arange(segment[0], segment[0] + len(own))
        self.segments.append(segment)
        self.size = segment[1]
        for branch in branches:
            self.add(branch, end)
        segment[2] = self.size

    def by_token(self, rows: Sequence[int], at: int) -> Iterator[list[int]]:
        """Yield rows in groups of equal tokens at a position."""

        def token(row: int) -> int:
            return int(self.inputs[row][at])

        for _, group in groupby(sorted(rows, key=token), token):
            yield list(group)

    def _common_end(self, rows: Sequence[int], start: int) -> int:
        """Return where two rows first differ, or the longest one ends."""
        longest = max((self.inputs[row] for row in rows), key=len)
        end = len(longest)
        for row in rows:
            own = self.inputs[row][start:end]
            differs = np.flatnonzero(own != longest[start : start + len(own)])
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
    """Rows in the order of another sampler, with `None` where the rows of a batch do not divide evenly.

    So every process gets equally many batches and no row twice: some batches hold fewer rows, or none.
    """

    def __init__(self, sampler: Sampler[int], multiple: int, rows: int | None = None) -> None:
        """Take the sampler.

        Args:
            sampler: The rows.
            multiple: Places of a batch, over all processes.
            rows: Rows of a batch; the places that are left stay empty. None: a row in each place.
        """
        self.sampler = sampler
        self.multiple = multiple
        self.rows = rows or multiple

    def __len__(self) -> int:
        rows = len(self.sampler)  # type: ignore[arg-type]
        return -(-rows // self.rows) * self.multiple

    def __iter__(self) -> Iterator[int | None]:
        empty = [None] * (self.multiple - self.rows)
        made = 0
        for number, row in enumerate(self.sampler, start=1):
            yield row
            made += 1
            if number % self.rows == 0:
                yield from empty
                made += len(empty)
        yield from [None] * (len(self) - made)

    def set_epoch(self, epoch: int) -> None:
        """Tell a sampler that shuffles by epoch which one it is."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


@dataclass(frozen=True)
class Collator:
    """Examples -> packs of bounded size, each one pass through the model."""

    token_budget: int
    """Tokens of a pack, counted after sharing; an example with more is a separate pack."""

    begins: bool = False
    """Whether the common beginning of all packs may be computed in a separate pass that the packs continue."""

    def __call__(self, examples: Sequence[Example | None]) -> dict[str, Any]:
        """Pack the examples there are; which pack holds which changes memory and speed, not the loss.

        Returns:
            `packs`, with the indices of their examples as `row`; `mismatched`, packs of the rows whose actions are
            another's; and where all packs begin with many tokens and are laid out after them, these tokens as
            `beginning`.
        """
        present = [example for example in examples if example is not None]
        packs = by_budget([example.sides for example in present], self.token_budget)
        ahead = self._beginning(present, len(packs))
        found: dict[str, Any] = {
            "packs": [
                collate([present[index] for index in pack], len(ahead)) | {"row": torch.tensor(pack)}
                for pack in packs
            ]
        }
        found |= {"mismatched": mismatched_packs(present, self.token_budget)}
        return found | ({"beginning": torch.tensor(ahead)} if ahead else {})

    def _beginning(self, examples: Sequence[Example], packs: int) -> list[int]:
        """Return tokens of the pass that all packs continue; none where it saves less than it costs."""
        if not self.begins or packs < 2:
            return []
        ahead = common_beginning([side for example in examples for side in example.sides])
        return ahead if (packs - 1) * len(ahead) >= WORTH_A_PASS else []


def empty_pack() -> Batch:
    """Return a pack of no pairs: the shortest pass there is, for a process that has fewer packs than another."""
    token = Encoded(ids=(0, 0), turn=(NO_TURN, 0), role=("user", "assistant"))
    return lay_out([token]) | {"pairs": torch.tensor([0])}


def collate(examples: Sequence[Example], start: int = 0) -> Batch:
    """Pack examples into one batch: all chosen sides, then all rejected sides, after a common beginning.

    Adds `pairs`, the number of examples [1]. Where the examples have them, adds `reference`, `behavior` and `proximal`
    [loss tokens], `inputs/NAME` [loss tokens], `weight` [turns], and `statistic` [pairs] or [pairs, numbers]. Where
    some have it, adds `clip` [turns], 1 for the others. Where some example is without spread, `has_spread` [pairs].
    """
    order = [(example, 0) for example in examples]
    order += [(example, 1) for example in examples if example.rejected is not None]
    batch = lay_out([example.sides[side] for example, side in order], start=start)
    batch["pairs"] = torch.tensor([len(examples)])
    for name in (*OTHERS, "weight"):
        if getattr(examples[0], name):
            batch[name] = torch.cat([getattr(example, name)[side] for example, side in order])
    for name in examples[0].inputs:
        batch[_INPUT + name] = torch.cat([example.inputs[name][side] for example, side in order])
    if any(example.clip for example in examples):
        factors = [one.clip[side] if one.clip else torch.ones_like(one.weight[side]) for one, side in order]
        batch["clip"] = torch.cat(factors)
    if not all(example.has_spread for example in examples):
        batch["has_spread"] = torch.tensor([example.has_spread for example in examples])
    if examples[0].statistic is not None:
        batch["statistic"] = torch.tensor([example.statistic for example in examples])
    return batch


def inputs_of(batch: Batch) -> dict[str, Tensor]:
    """Return a batch's log-probabilities under further frozen policies, by the name of the input [loss tokens]."""
    return {key.removeprefix(_INPUT): values for key, values in batch.items() if key.startswith(_INPUT)}


def mismatched_packs(examples: Sequence[Example], token_budget: int) -> list[Batch]:
    """Return the mismatched rows of examples, as packed batches; none where they have none.

    Besides what `lay_out` gives, each has `reference` and `inputs/NAME`, in nats, as in the rows [loss tokens].
    """
    rows = [one for one in examples if one.mismatched is not None]
    sequences = [one.mismatched for one in rows if one.mismatched is not None]
    names = rows[0].mismatched_logprobs if rows else ()
    return [
        lay_out([sequences[index] for index in pack])
        | {
            name if name in OTHERS else _INPUT + name: torch.cat(
                [rows[index].mismatched_logprobs[name] for index in pack]
            )
            for name in names
        }
        for pack in by_budget([[one] for one in sequences], token_budget)
    ]


def both_sides(
    batch: Batch, logprobs: Tensor, inputs: Mapping[str, Tensor] = MappingProxyType({})
) -> tuple[TurnLogprobs, TurnLogprobs | None]:
    """Turn a batch from `collate` with the log-probabilities of its loss tokens into chosen and rejected trajectories.

    Args:
        batch: At least one example, with the weight of each turn.
        logprobs: Of the policy, in nats [loss tokens].
        inputs: Further values of the policy that the loss reads, by name [loss tokens].

    Returns:
        Both sides; None for the rejected one where the examples have none.
    """
    turn, trajectory = batch["turn"], batch["trajectory"]
    pairs, sequences = int(batch["pairs"]), int(trajectory[-1]) + 1
    starts_turn = torch.ones_like(turn, dtype=torch.bool)
    starts_turn[1:] = (turn.diff() != 0) | (trajectory.diff() != 0)
    inputs = {**inputs_of(batch), **inputs}

    def side(mask: Tensor, first: int) -> TurnLogprobs:
        others = {name: batch[name][mask] if name in batch else None for name in OTHERS}
        turns = mask[starts_turn]
        return TurnLogprobs(
            policy=logprobs[mask],
            **others,
            turn=turn[mask],
            trajectory=trajectory[mask] - first,
            weight=batch["weight"][turns],
            clip=batch["clip"][turns] if "clip" in batch else None,
            has_spread=batch.get("has_spread"),
            inputs={name: values[mask] for name, values in inputs.items()},
        )

    is_chosen = trajectory < pairs
    return side(is_chosen, 0), side(~is_chosen, pairs) if sequences > pairs else None
