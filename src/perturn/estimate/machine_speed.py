"""Size of a model, and the speed of this machine at matrices of its size."""

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
"""Parameters of a model that is made and asked, at most."""
_MEASURED = 8192
"""Tokens of the pass that is timed, at most."""
_MANY, _FEW = 2**24, 2**26
"""Weights of a product that is timed on a CPU, at most: with a thousand tokens, and with 16, which must read them from
memory. A larger product is as fast for each weight, but for a model of 70B it takes seconds."""


@dataclass(frozen=True)
class Machine:
    """A model on this machine: its size, and the speed of matrix products of that size."""

    shape: ModelShape
    device: str
    bytes: int
    """Of a number in the type that is computed in."""
    many: float
    """Operations a second where a thousand tokens pass together, as in training."""
    few: float
    """Bytes of weights a second where one token of each of 16 conversations passes."""
    base_gb: float
    """Memory of the process without a model."""
    crowd: float = 1.0
    """Seconds that pass per second of computing in this process; above 1 where other work runs on its cores."""
    passed: float | None = None
    """Seconds that a token takes in a forward pass, measured with a model of this shape; None: it is too large."""
    trained: float | None = None
    """Seconds that a token takes in a forward and a backward pass, measured likewise."""

    @property
    def parameters(self) -> int:
        """Of the model."""
        return self.shape.parameters

    @property
    def layers(self) -> int:
        """Of the model."""
        return self.shape.layers


def measure_machine(model: Any, setting: str, process_gb: float) -> Machine:
    """Time matrix products of a model's size for about a second, without reading its weights.

    Args:
        model: Without weights.
        setting: `model.dtype`.
        process_gb: Memory of this process now, which stays where models run on the CPU.
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

    What a small model takes is not the time of its matrix products, so it is made with other weights and asked.

    Args:
        machine: As it was measured.
        model: Without weights.
        turns: Tokens of an episode: before the first action, then by turns an action and the observation after it.
        token_budget: Tokens of a pass in training.
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
    for _ in range(2):  # the first one warms up
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
    """Return seconds that pass while this thread computes for one."""
    began, used = time.perf_counter(), time.thread_time()
    while time.thread_time() - used < 0.3 and time.perf_counter() - began < 5.0:
        sum(range(1000))
    return max(1.0, (time.perf_counter() - began) / max(time.thread_time() - used, 1e-3))


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    """Return seconds of one call, in the best of many rounds: other work on the machine is not to count."""
    rounds: list[float] = []
    until = time.perf_counter() + 0.5
    while len(rounds) < 2 or time.perf_counter() < until:
        began = time.perf_counter()
        made = [work() for _ in range(5)]
        float(made[-1][0, 0])  # waits for the device
        rounds.append((time.perf_counter() - began) / 5)
    return min(rounds)
