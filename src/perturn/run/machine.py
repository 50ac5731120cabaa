"""Size of a model, and the speed of this machine at matrices of its size."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from perturn.policy.models import compute_dtype, device


@dataclass(frozen=True)
class Machine:
    """A model on this machine: its size, and the speed of matrix products of that size."""

    parameters: int
    layers: int
    hidden: int
    device: str
    bytes: int
    """Of a number in the type that is computed in."""
    many: float
    """Operations a second where a thousand tokens pass together, as in training."""
    few: float
    """Bytes of weights a second where one token of each of 16 conversations passes."""
    base_gb: float
    """Memory of the process without a model."""


def measure_machine(model: Any, setting: str, process_gb: float) -> Machine:
    """Time matrix products of a model's size for about a second; its weights are not read.

    Args:
        model: Without weights.
        setting: `model.dtype`.
        process_gb: Memory of this process now, which stays where models run on the CPU.
    """
    where = device()
    dtype = compute_dtype(setting, where, model.config)
    text = model.config.get_text_config()
    weight = torch.randn(text.hidden_size, 4 * text.hidden_size, device=where, dtype=dtype)
    many, few = (torch.randn(rows, len(weight), device=where, dtype=dtype) for rows in (1024, 16))
    return Machine(
        parameters=sum(each.numel() for each in model.parameters()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        device=where.type,
        bytes=dtype.itemsize,
        many=2 * 1024 * weight.numel() / _seconds(lambda: many @ weight),
        few=weight.nbytes / _seconds(lambda: few @ weight),
        base_gb=process_gb if where.type == "cpu" else 0.5,
    )


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    """Seconds of one call, in the best of many rounds: other work on the machine is not to count."""
    rounds: list[float] = []
    until = time.perf_counter() + 0.5
    while len(rounds) < 2 or time.perf_counter() < until:
        began = time.perf_counter()
        made = [work() for _ in range(5)]
        float(made[-1][0, 0])  # waits for the device
        rounds.append((time.perf_counter() - began) / 5)
    return min(rounds)
