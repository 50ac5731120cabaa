"""Linear layers on a CPU, multiplied by a packed copy of their weights.

The products of a few rows, one for each conversation that is being answered, then take about a third of the time in
float32: a plain weight is rearranged in each product. Compiled models do the same. A copy takes as much memory as the
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_ROWS = 16
"""Rows that the packed form is made for; it serves any number."""


def pack_linears(model: nn.Module) -> Callable[[], None]:
    """Let the linear layers of a model that is not trained multiply by packed weights, where that can be done.

    Args:
        model: Whose weights stay as they are until the packing is undone.

    Returns:
        What undoes it.
    """
    packed: list[Any] = [module for module in model.modules() if _can_be_packed(module)]
    for module in packed:
        weight = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), _ROWS)
        module.forward = partial(_multiply, weight, module.bias)

    def undo() -> None:
        for module in packed:
            module.__dict__.pop("forward", None)

    return undo


def _can_be_packed(module: nn.Module) -> bool:
    """Plain linear layers that nothing has been done to, in a type that oneDNN multiplies here."""
    if (
        type(module) is not nn.Linear
        or "forward" in module.__dict__
        or not torch.backends.mkldnn.is_available()
    ):
        return False
    weight = module.weight
    fast = weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return weight.device.type == "cpu" and fast and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def _multiply(weight: Any, bias: Tensor | None, rows: Tensor) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return found
