"""Examples as tensors: a dataset, its order, and packed batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset, Sampler

from perturn.losses import TurnLogprobs
from perturn.policy.packing import Batch, by_budget, lay_out
from perturn.policy.tokens import NO_TURN, Encoded, Example


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

    Adds `pairs`, the number of examples [1], and where the examples have them `reference` [loss tokens], `weight`
    [turns] and `statistic` [pairs].
    """
    order = [(example, 0) for example in examples]
    order += [(example, 1) for example in examples if example.rejected is not None]
    batch = lay_out([example.sides[side] for example, side in order])
    batch["pairs"] = torch.tensor([len(examples)])
    if examples[0].reference:
        batch["reference"] = torch.cat([example.reference[side] for example, side in order])
    if examples[0].weight:
        batch["weight"] = torch.cat([example.weight[side] for example, side in order])
    if examples[0].statistic is not None:
        batch["statistic"] = torch.tensor([example.statistic for example in examples])
    return batch


def chosen_reference(examples: Sequence[Example]) -> TurnLogprobs:
    """The chosen sides where nothing is trained yet: the policy is the reference."""
    reference = torch.cat([example.reference[0] for example in examples])
    turn = torch.tensor([turn for example in examples for turn in example.chosen.turn if turn != NO_TURN])
    lengths = torch.tensor([len(example.reference[0]) for example in examples])
    trajectory = torch.arange(len(examples)).repeat_interleave(lengths)
    weight = torch.cat([example.weight[0] for example in examples])
    return TurnLogprobs(reference, reference, turn, trajectory, weight)
