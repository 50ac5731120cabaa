"""Linear layers on a CPU, multiplied by a packed copy of their weights.

The products of a few rows, one for each conversation that is being answered, then take about a third of the time in
float32: a plain weight is rearranged in each product. Compiled models do the same. A copy takes as much memory as the
weights.

oneDNN keeps a program of about half a megabyte for each shape it has multiplied, a thousand and more of them, and the
rows of a call are ever others. So they are padded to one of a few numbers, and left to the plain product where that
keeps nothing and is as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_ROWS = 16
"""Rows that the packed form is made for; it serves any number."""
_FEW = 64
"""In float32, more rows than this are multiplied as fast by the plain weight, of which no program is kept."""


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
        module.forward = partial(_multiply, weight, module.weight.detach(), module.bias)

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


def _multiply(packed: Any, plain: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    flat = rows.reshape(-1, rows.shape[-1])
    count = len(flat)
    if count > _FEW and plain.dtype == torch.float32:
        return F.linear(rows, plain, bias)
    if spare := _rounded(count) - count:
        flat = F.pad(flat, (0, 0, 0, spare))
    found: Tensor = torch.ops.mkldnn._linear_pointwise(flat, packed, bias, "none", [], "")
    return found[:count].view(*rows.shape[:-1], len(plain))


def _rounded(count: int) -> int:
    """The next of four numbers between two powers of two; up to 8, every number."""
    step = 1 << max(0, (count - 1).bit_length() - 3)
    return -(-count // step) * step
