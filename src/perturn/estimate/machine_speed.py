"""Measurement of this machine's speed at matrix products of a model's size, and at whole passes of small models."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from perturn.chat.tokens import NO_TURN, Encoded
from perturn.estimate.memory import ModelShape, model_shape
from perturn.policy.logprobs import action_logprobs, prepare
from perturn.policy.models import compute_dtype, context_length, device
from perturn.policy.packing import lay_out

_SMALL = 30_000_000
"""Largest number of parameters of a model whose whole passes are timed."""
_MEASURED = 8192
"""Largest number of tokens in the timed pass."""
_MANY, _FEW = 2**24, 2**26
"""Largest number of weights in a timed matrix product on a CPU, for 1024 tokens and for 16 tokens. With 16 tokens, the
weights must come from main memory. Larger products take the same time per weight, but seconds for a 70B model."""


@dataclass(frozen=True)
class Machine:
    """Measured speed of this machine for a model, with the model's sizes."""

    shape: ModelShape
    device: str
    bytes: int
    """Bytes of a number in the data type of the computation."""
    many: float
    """Floating-point operations per second in matrix products with 1024 tokens, as in training."""
    few: float
    """Bytes of weights read per second in matrix products with 16 tokens, one from each of 16 conversations."""
    base_gb: float
    """Memory of the process without a model, in gigabytes."""
    crowd: float = 1.0
    """Wall-clock seconds per second of computation in this process; above 1 if other programs use its cores."""
    passed: float | None = None
    """Measured seconds per token of a forward pass; None: the model is too large to measure."""
    trained: float | None = None
    """Measured seconds per token of a forward and backward pass; None: the model is too large to measure."""

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return self.shape.parameters

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return self.shape.layers


def measure_machine(model: Any, setting: str, process_gb: float) -> Machine:
    """Time matrix products of a model's size for about a second, without reading its weights.

    Args:
        model: The model, without weights.
        setting: The setting `model.dtype`.
        process_gb: Current memory of this process in gigabytes; used if models run on the CPU.
    """
    where = device()
    dtype = compute_dtype(setting, where, model.config)
    text = model.config.get_text_config()
    width, columns = text.hidden_size, [4 * text.hidden_size] * 2
    if where.type == "cpu":
        columns = [min(columns[0], max(1, most // width)) for most in (_MANY, _FEW)]
    weight = torch.randn(width, columns[1], device=where, dtype=dtype)
    part = weight if columns[0] == columns[1] else weight[:, : columns[0]].contiguous()
    many, few = (torch.randn(rows, width, device=where, dtype=dtype) for rows in (1024, 16))
    return Machine(
        shape=model_shape(model),
        device=where.type,
        bytes=dtype.itemsize,
        many=2 * 1024 * part.numel() / _seconds(lambda: many @ part),
        few=weight.nbytes / _seconds(lambda: few @ weight),
        base_gb=process_gb if where.type == "cpu" else 0.5,
        crowd=_crowd(),
    )


def measure_passes(machine: Machine, model: Any, turns: Sequence[int], token_budget: int) -> Machine:
    """Time a whole pass of a small model, forward and backward, for a few seconds at most.

    Matrix products are only a part of a small model's time, so a model with random weights is built and timed.

    Args:
        machine: Result of `measure_machine`.
        model: The model, without weights.
        turns: Numbers of tokens in an episode: the prompt, then alternately an action and the observation after it.
        token_budget: Largest number of tokens in a training pass.

    Returns:
        The machine with `passed` and `trained`; unchanged if the model is too large.
    """
    if machine.parameters > _SMALL:
        return machine
    where = device()
    with torch.random.fork_rng():
        made = type(model)(model.config).to(where)
    prepare(made)
    budget = min(token_budget, _MEASURED)
    length = max(2, min(sum(turns), budget, context_length(made) or budget))
    loss = [turn for at, count in enumerate(turns) for turn in [at // 2 if at % 2 else NO_TURN] * count]
    loss = [NO_TURN, *loss[1 : length - 1], 0][:length]
    one = Encoded(tuple(at % 64 for at in range(length)), tuple(loss), ("user",) * length)
    batch = {
        name: tensor.to(where)
        for name, tensor in lay_out([one] * max(1, budget // length), share=False).items()
    }
    best = [math.inf, math.inf]
    for _ in range(2):  # the first pass is a warm-up
        began = time.perf_counter()
        value = action_logprobs(made, batch).sum()
        float(value.detach())
        forward = time.perf_counter() - began
        value.backward()
        float(next(made.parameters()).grad.flatten()[0])
        best = [min(best[0], forward), min(best[1], time.perf_counter() - began)]
    passed, trained = (seconds / len(batch["ids"]) for seconds in best)
    return replace(machine, passed=passed, trained=trained)


def _crowd() -> float:
    """Return the wall-clock seconds per second of this thread's computation."""
    began, used = time.perf_counter(), time.thread_time()
    while time.thread_time() - used < 0.3 and time.perf_counter() - began < 5.0:
        sum(range(1000))
    return max(1.0, (time.perf_counter() - began) / max(time.thread_time() - used, 1e-3))


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    """Return the seconds of one call, in the fastest of many rounds, so that other programs do not count."""
    rounds: list[float] = []
    until = time.perf_counter() + 0.5
    while len(rounds) < 2 or time.perf_counter() < until:
        began = time.perf_counter()
        made = [work() for _ in range(5)]
        float(made[-1][0, 0])  # waits for the device
        rounds.append((time.perf_counter() - began) / 5)
    return min(rounds)
