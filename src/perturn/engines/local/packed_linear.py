"""Faster linear layers on a CPU, which multiply by a packed copy of their weights.

A decoding step multiplies few rows, one for each conversation. With plain weights, oneDNN rearranges the weights in
every product; with a packed copy, the product takes about a third of the time in float32. Compiled models pack their
weights too. The copy takes as much memory as the weights.

A gated feed-forward block then takes three products: oneDNN applies the gate while it writes the second product.

oneDNN caches a program of about half a megabyte for each shape, up to a thousand and more shapes. The number of rows
changes with every call. So rows are padded to one of a few numbers. Calls with many rows use the plain weights, which
are as fast in float32 and cache no program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import SiLUActivation

_ROWS = 16
"""Number of rows for which oneDNN optimizes the packed weight; other numbers of rows work too."""
_GATED = ("gate_proj", "up_proj", "down_proj")
"""Names of the linear layers of a gated feed-forward block."""
_SILU = (nn.SiLU, SiLUActivation)
_Plain = Callable[[Tensor], Tensor]
_FEW = 64
"""Largest number of rows for which packing pays in float32; with more rows, the plain weight is as fast."""


def pack_linears(model: nn.Module) -> Callable[[], None]:
    """Make the linear layers of a model multiply by packed weights, where oneDNN supports it.

    Args:
        model: Model for inference. Its weights must not change until the packing is undone.

    Returns:
        Function that undoes the packing.
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
    """Return whether a module is an unmodified `nn.Linear` on the CPU with a data type that oneDNN supports."""
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
    """Return a module as a gated feed-forward block of three packed layers; None if it is no such block."""
    if not isinstance(getattr(module, "act_fn", None), _SILU):
        return None
    gate, up, down = (packed.get(getattr(module, name, None)) for name in _GATED)
    if gate is None or up is None or down is None:
        return None
    block = _Gated(gate, up, down, module.forward)
    return block if block.agrees() else None


class _Packed:
    """A linear layer with a packed copy of its weight."""

    def __init__(self, layer: nn.Linear) -> None:
        self.plain, self.bias = layer.weight.detach(), layer.bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(self.plain, _ROWS)

    def __call__(self, rows: Tensor) -> Tensor:
        """Apply the layer: [..., inputs] to [..., outputs]."""
        if self.keeps_nothing(rows):
            return F.linear(rows, self.plain, self.bias)
        found = self.multiply(_padded(rows))
        return found[: rows[..., 0].numel()].view(*rows.shape[:-1], len(self.plain))

    def keeps_nothing(self, rows: Tensor) -> bool:
        """Return whether to use the plain weight, which is as fast for many rows and caches no oneDNN program."""
        return rows[..., 0].numel() > _FEW and self.plain.dtype == torch.float32

    def multiply(self, rows: Tensor, then: str = "none") -> Tensor:
        """Apply the layer, then an activation function: [rows, inputs] to [rows, outputs].

        Args:
            rows: Inputs [rows, inputs].
            then: oneDNN's name of the activation function.
        """
        found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self.bias, then, [], "")
        return found

    def multiply_times(self, rows: Tensor, other: Tensor) -> Tensor:
        """Apply the layer to `rows` [rows, inputs]; return its outputs times `other`, both [rows, outputs]."""
        found: Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, other, self._weight, self.bias, "mul")
        return found


class _Gated:
    """A gated feed-forward block of packed layers: down(SiLU(gate(x)) * up(x))."""

    def __init__(self, gate: _Packed, up: _Packed, down: _Packed, plain: _Plain) -> None:
        self._gate, self._up, self._down, self._plain = gate, up, down, plain

    def __call__(self, rows: Tensor) -> Tensor:
        """Apply the block: [..., features] to [..., features]."""
        if self._gate.keeps_nothing(rows):
            return self._plain(rows)
        flat = _padded(rows)
        found = self._down.multiply(self._up.multiply_times(flat, self._gate.multiply(flat, "swish")))
        return found[: rows[..., 0].numel()].view(*rows.shape[:-1], -1)

    @torch.inference_mode()
    def agrees(self) -> bool:
        """Return whether the block gives the same outputs as the original module on two test rows, up to rounding."""
        weight = self._gate.plain
        rows = torch.linspace(-4, 4, 2 * weight.shape[1], dtype=weight.dtype).view(2, -1)
        found, expected = self(rows).float(), self._plain(rows).float()
        return bool((found - expected).norm() <= 4 * torch.finfo(weight.dtype).eps * expected.norm())


def _padded(rows: Tensor) -> Tensor:
    """Flatten [..., features] to [rows, features], and append rows of zeros up to the number from `_rounded`."""
    flat = rows.reshape(-1, rows.shape[-1])
    spare = _rounded(len(flat)) - len(flat)
    return F.pad(flat, (0, 0, 0, spare)) if spare else flat


def _rounded(count: int) -> int:
    """Round up a count; only four numbers between two powers of two are used, and every number up to 8."""
    step = 1 << max(0, (count - 1).bit_length() - 3)
    return -(-count // step) * step
