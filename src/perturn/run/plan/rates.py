"""How fast this machine is at the matrices of a model, measured in about a second; and how large the model is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from perturn.policy.models import compute_dtype, device, empty_model
from perturn.run.plan.estimate import Machine, Rates, Shape
from perturn.settings.recipe import ModelSettings

_MEASURE_SECONDS = 0.5


def measure_machine(settings: ModelSettings, lora_rank: int | None, process_gb: float) -> Machine:
    """The model on this machine.

    Args:
        settings: Of the model.
        lora_rank: See `model_shape`.
        process_gb: Memory of this process now, which stays where models run on the CPU.
    """
    where = device()
    dtype = compute_dtype(settings.dtype, where)
    shape = model_shape(settings.name, lora_rank)
    base = process_gb if where.type == "cpu" else 0.5
    return Machine(shape, measure(shape, where, dtype), where.type, dtype.itemsize, base)


def model_shape(name: str, lora_rank: int | None) -> Shape:
    """Size of a model.

    Args:
        name: Hub id, local folder, or a bundled name.
        lora_rank: Rank of the adapters that are trained; None: all weights are.
    """
    model = empty_model(name)
    parameters = sum(each.numel() for each in model.parameters())
    text = model.config.get_text_config()
    hidden, layers = int(text.hidden_size), int(text.num_hidden_layers)
    heads = int(text.num_attention_heads)
    width = int(getattr(text, "head_dim", None) or hidden // heads)
    linear = [
        each
        for key, each in model.named_modules()
        if isinstance(each, torch.nn.Linear) and "lm_head" not in key
    ]
    adapters = sum((each.in_features + each.out_features) * (lora_rank or 0) for each in linear)
    return Shape(
        parameters=parameters,
        layers=layers,
        hidden=hidden,
        inner=int(getattr(text, "intermediate_size", None) or 4 * hidden),
        vocabulary=int(text.vocab_size),
        key_value_width=2 * width * int(getattr(text, "num_key_value_heads", None) or heads),
        trained=parameters if lora_rank is None else adapters,
    )


def measure(shape: Shape, device: torch.device, dtype: torch.dtype) -> Rates:
    """Time matrix products of the model's own sizes."""
    weight = torch.randn(shape.hidden, shape.inner, device=device, dtype=dtype)
    many = torch.randn(1024, shape.hidden, device=device, dtype=dtype)
    few = torch.randn(16, shape.hidden, device=device, dtype=dtype)
    size = weight.numel()
    return Rates(
        many=2 * 1024 * size / _seconds(lambda: many @ weight, device),
        few=size * weight.element_size() / _seconds(lambda: few @ weight, device),
    )


def _seconds(work: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Seconds of one call, in the best of many rounds: what else runs on the machine is not to count."""
    work()
    _wait(device)
    until, best = time.perf_counter() + _MEASURE_SECONDS, math.inf
    while time.perf_counter() < until:
        began = time.perf_counter()
        for _ in range(5):
            work()
        _wait(device)
        best = min(best, (time.perf_counter() - began) / 5)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
