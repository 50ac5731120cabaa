"""Linear layers on a CPU, multiplied by a packed copy of their weights.

The products of a few rows, one for each conversation that is being answered, then take about a third of the time in
float32: a plain weight is rearranged in each product. Compiled models do the same. A copy takes as much memory as the
weights.

A gated feed-forward block is three products then: oneDNN applies the gate while it writes the second.

oneDNN keeps a program of about half a megabyte for each shape it has multiplied, a thousand and more of them, and the
rows of a call are ever others. So they are padded to one of a few numbers, or left to the plain product if that is as
fast and keeps no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import SiLUActivation

_ROWS = 16
"""Rows that the packed form is made for; it serves any number."""
_GATED = ("gate_proj", "up_proj", "down_proj")
"""Names of the linear layers of a gated feed-forward block."""
_SILU = (nn.SiLU, SiLUActivation)
_Plain = Callable[[Tensor], Tensor]
_FEW = 64
"""In float32, more rows than this are multiplied as fast by the plain weight, of which no program is kept."""


def pack_linears(model: nn.Module) -> Callable[[], None]:
    """Let the linear layers of a model that is not trained multiply by packed weights, where that can be done.

    Args:
        model: Whose weights stay as they are until the packing is undone.

    Returns:
        What undoes it.
    """
    linears: list[Any] = [module for module in model.modules() if _can_be_packed(module)]
    packed = {module: _Packed(module) for module in linears}
    blocks = {module: _gated(module, packed) for module in model.modules()}
    changed: dict[Any, Any] = packed | {module: block for module, block in blocks.items() if block}
    for module, forward in changed.items():
        module.forward = forward

    def undo() -> None:
        for module in changed:
            module.__dict__.pop("forward", None)

    return undo


def _can_be_packed(module: nn.Module) -> bool:
    """Return plain linear layers that nothing has been done to, in a type that oneDNN multiplies here."""
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


def _gated(module: Any, packed: Mapping[Any, _Packed]) -> _Gated | None:
    """Return a block of three packed layers, if a module is one."""
    if not isinstance(getattr(module, "act_fn", None), _SILU):
        return None
    gate, up, down = (packed.get(getattr(module, name, None)) for name in _GATED)
    if gate is None or up is None or down is None:
        return None
    block = _Gated(gate, up, down, module.forward)
    return block if block.agrees() else None


class _Packed:
    """A linear layer by its packed weight."""

    def __init__(self, layer: nn.Linear) -> None:
        self.plain, self.bias = layer.weight.detach(), layer.bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(self.plain, _ROWS)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return [..., inputs] to [..., outputs]."""
        if self.keeps_nothing(rows):
            return F.linear(rows, self.plain, self.bias)
        found = self.multiply(_padded(rows))
        return found[: rows[..., 0].numel()].view(*rows.shape[:-1], len(self.plain))

    def keeps_nothing(self, rows: Tensor) -> bool:
        """Return whether the unpacked weight is as fast for these rows, without a program in oneDNN's cache."""
        return rows[..., 0].numel() > _FEW and self.plain.dtype == torch.float32

    def multiply(self, rows: Tensor, then: str = "none") -> Tensor:
        """Return [rows, inputs] to [rows, outputs], which go through a function."""
        found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self.bias, then, [], "")
        return found

    def multiply_times(self, rows: Tensor, other: Tensor) -> Tensor:
        """Return [rows, inputs] to [rows, outputs], each times the output of another layer."""
        found: Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, other, self._weight, self.bias, "mul")
        return found


class _Gated:
    """A feed-forward block: down(SiLU(gate(x)) * up(x))."""

    def __init__(self, gate: _Packed, up: _Packed, down: _Packed, plain: _Plain) -> None:
        self._gate, self._up, self._down, self._plain = gate, up, down, plain

    def __call__(self, rows: Tensor) -> Tensor:
        """Return [..., features] to [..., features]."""
        if self._gate.keeps_nothing(rows):
            return self._plain(rows)
        flat = _padded(rows)
        found = self._down.multiply(self._up.multiply_times(flat, self._gate.multiply(flat, "swish")))
        return found[: rows[..., 0].numel()].view(*rows.shape[:-1], -1)

    @torch.inference_mode()
    def agrees(self) -> bool:
        """Return whether the block does just that, up to rounding."""
        weight = self._gate.plain
        rows = torch.linspace(-4, 4, 2 * weight.shape[1], dtype=weight.dtype).view(2, -1)
        found, expected = self(rows).float(), self._plain(rows).float()
        return bool((found - expected).norm() <= 4 * torch.finfo(weight.dtype).eps * expected.norm())


def _padded(rows: Tensor) -> Tensor:
    """Return [..., features] to [rows, features], with rows of zeros up to one of a few numbers."""
    flat = rows.reshape(-1, rows.shape[-1])
    spare = _rounded(len(flat)) - len(flat)
    return F.pad(flat, (0, 0, 0, spare)) if spare else flat


def _rounded(count: int) -> int:
    """Return the next of four numbers between two powers of two; up to 8, every number."""
    step = 1 << max(0, (count - 1).bit_length() - 3)
    return -(-count // step) * step
