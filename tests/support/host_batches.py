"""Random token batches like other trainers': several turns, groups of unequal size, equal rewards."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Batch:
    """Token sequences of another trainer's batch."""

    mask: Tensor
    """1 at tokens of turns [sequences, tokens]."""
    rewards: Tensor
    """Rewards at the ends of turns [sequences, tokens]."""
    values: Tensor
    """Value estimates [sequences, tokens]."""
    groups: list[str]
    turns: list[int]
    """Number of turns [sequences]."""
    states: list[list[str]]
    """State keys `[sequences][turns]`."""

    @property
    def response(self) -> Tensor:
        """Mask with 1 at turns and at the observations between them [sequences, tokens]."""
        return (self.mask.flip(1).cumsum(1).flip(1) > 0).double()

    @property
    def outcome(self) -> Tensor:
        """Whole score at the last token of the last turn [sequences, tokens]."""
        found = torch.zeros_like(self.rewards)
        found[torch.arange(len(found)), self.response.sum(1).long() - 1] = self.rewards.sum(1)
        return found


def random_batch(seed: int, longest_turn: int = 4, sizes: tuple[int, ...] = (1, 2, 3, 5)) -> Batch:
    """Return a batch of three groups, of which one may have equal rewards."""
    draw = random.Random(seed)
    groups = [f"g{number}" for number in range(3) for _ in range(draw.choice(sizes))]
    turns = [draw.randint(1, 4) for _ in groups]
    equal = {f"g{number}": draw.random() < 0.3 for number in range(3)}
    mask, rewards = torch.zeros(len(groups), 40).double(), torch.zeros(len(groups), 40).double()
    for row, (group, count) in enumerate(zip(groups, turns, strict=True)):
        at = 0
        for turn in range(count):
            length = draw.randint(1, longest_turn)
            mask[row, at : at + length] = 1
            last = turn == count - 1
            reward = 0.7 * last if equal[group] else draw.choice([0.0, 1.0, draw.gauss(0, 1)])
            rewards[row, at + length - 1] = reward
            at += length + draw.randint(1, 4)
    states = [[draw.choice("abc") for _ in range(count)] for count in turns]
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(mask.shape, generator=generator, dtype=torch.float64) * mask
    return Batch(mask, rewards, values, groups, turns, states)
