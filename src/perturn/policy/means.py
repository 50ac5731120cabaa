"""Means of metrics whose values several passes and processes have parts of."""

from __future__ import annotations

from collections import defaultdict

import torch
from accelerate.utils import gather_object
from torch import Tensor


class Means:
    """Sums and counts by name, kept on the device of each process until they are asked for."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, name: str, values: Tensor) -> None:
        """Keep the values of one pass of this process; processes need not add the same names, or equally often."""
        part = torch.stack([values.float().sum(), values.new_tensor(values.numel(), dtype=torch.float)])
        self._parts[name].append(part)

    def take(self) -> dict[str, float]:
        """Mean of all values of all processes since the last call; every process makes it, and waits for the others."""
        own = {name: torch.stack(parts).sum(0).tolist() for name, parts in self._parts.items()}
        self._parts.clear()
        sums: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for process in gather_object([own]):
            for name, part in process.items():
                sums[name].append(part)
        return {
            name: sum(total for total, _ in parts) / sum(count for _, count in parts)
            for name, parts in sums.items()
        }
