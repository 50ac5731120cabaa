"""Log-probabilities from the last layer and the output layer, without storing all logits.

In the last layer, only tokens that predict a loss token need queries and the feed-forward block, since nothing reads
the outputs of the others. So both modules are told which tokens are wanted, and return zeros for the rest. Keys and
values are computed for all tokens. If an architecture names these modules differently, all tokens are computed.

The logits are computed in tiles: a part of the vocabulary at a time, forward and backward. A tile fits into a CPU's
caches, and the sum of a row's exponentials is updated from tile to tile. The first tiles, up to a bound, are stored for
the backward pass. The other tiles are computed again, which adds a third to their time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from perturn.free_memory import return_waste

CACHED_BYTES = 2**22
"""Bytes of a tile of float32 logits on a CPU, so that a tile fits into the caches."""

TILE_BYTES = 2**27
"""Bytes of a tile on other devices, large enough to keep the device busy."""

LEAST_WORDS = 256
"""Smallest number of tokens of the vocabulary in a tile, for any number of rows."""

KEPT_BYTES = 2**28
"""Largest number of bytes of logits that are stored for the backward pass."""


@dataclass(frozen=True)
class Head:
    """A model's output layer."""

    weight: Tensor
    """Weight matrix [vocabulary, features]."""
    bias: Tensor | None = None
    """Bias [vocabulary]; None: no bias."""
    scale: float = 1.0
    """Factor on the logits."""
    softcap: float | None = None
    """c in c tanh(logits / c), applied after the factor; None: no cap."""


def token_logprobs(hidden: Tensor, target: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Return the log-probability of one token per row, and the entropy of each row's distribution.

    Args:
        hidden: Last hidden states [rows, features].
        target: Token ids [rows].
        head: The output layer.

    Returns:
        Log-probabilities in nats, float32 [rows]; entropies in nats, float32, without gradient [rows].
    """
    hidden, weight, bias = as_autocast(hidden, head)
    found = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, target, head.scale, head.softcap, torch.is_grad_enabled()
    )
    return cast(tuple[Tensor, Tensor], found)


def as_autocast(hidden: Tensor, head: Head) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return hidden states, weight and bias in autocast's data type, or unchanged if autocast is off."""
    weight, bias, device = head.weight, head.bias, hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return hidden, weight, bias


class _TokenLogprobs(torch.autograd.Function):
    """log softmax(W h + b) at one token per row, tile by tile over the vocabulary.

    With p the softmax, g the incoming gradient and t the target:  d/dlogits = g (onehot(t) - p). The entropy is
    log sum exp(z) - sum p z, with z the logits. It costs one product and one sum per tile in the cache.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        scale: float,
        softcap: float | None,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        if not keep and hidden.device.type == "cpu":
            return_waste()
        ctx.scale, ctx.softcap, ctx.words = scale, softcap, _words(hidden)
        exact = torch.promote_types(hidden.dtype, torch.float32)
        largest = hidden.new_full((len(hidden),), torch.finfo(exact).min, dtype=exact)
        total, chosen, moment = (torch.zeros_like(largest) for _ in range(3))
        buffer = largest.new_empty(len(hidden) * ctx.words)
        ctx.kept, left = [], KEPT_BYTES if keep else 0
        for tile in _tiles(len(weight), ctx.words):
            products = _products(hidden, weight, bias, tile)
            left -= products.nbytes
            if left >= 0:
                ctx.kept.append(products)
            logits = logits_of(products, scale, softcap)
            before, largest = largest, torch.maximum(largest, logits.amax(-1))
            shares = torch.sub(logits, largest[:, None], out=_like(buffer, logits)).exp_()
            shrink = (before - largest).exp()
            total = total * shrink + shares.sum(-1)
            moment = moment * shrink + shares.mul_(logits).sum(-1)
            inside, column = _column(target, tile)
            chosen = torch.where(inside, logits.gather(-1, column[:, None]).squeeze(-1), chosen)
        lse = largest + total.log()
        ctx.save_for_backward(hidden, weight, bias, target, lse)
        entropy = lse - moment / total
        ctx.mark_non_differentiable(entropy)
        return chosen - lse, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, lse = ctx.saved_tensors
        if hidden.device.type == "cpu":
            return_waste()
        grad_hidden = torch.zeros_like(hidden, dtype=lse.dtype)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        buffer = lse.new_empty(len(hidden) * ctx.words)
        for tile in _tiles(len(weight), ctx.words):
            products = ctx.kept.pop(0) if ctx.kept else _products(hidden, weight, bias, tile)
            logits = logits_of(products, ctx.scale, ctx.softcap)
            slope = torch.sub(logits, lse[:, None], out=_like(buffer, logits)).exp_().mul_(-grad[:, None])
            inside, column = _column(target, tile)
            slope.scatter_add_(-1, column[:, None], (grad * inside)[:, None])
            to_products(slope, logits, ctx.scale, ctx.softcap)
            if grad_bias is not None:
                grad_bias[tile] = slope.sum(0)
            slope = slope.to(weight.dtype)
            if grad_weight is not None:
                torch.mm(slope.t(), hidden, out=grad_weight[tile])
            if slope.dtype == grad_hidden.dtype:
                grad_hidden.addmm_(slope, weight[tile])
            else:
                grad_hidden += slope @ weight[tile]
        return grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None, None, None


def to_products(slope: Tensor, logits: Tensor, scale: float, softcap: float | None) -> None:
    """Convert the gradient of the logits, in place, into the gradient of the products before scale and softcap."""
    if softcap is not None:
        slope *= 1 - (logits / softcap).square()
    if scale != 1.0:
        slope *= scale


def _words(hidden: Tensor) -> int:
    """Return the number of tokens of the vocabulary in a tile."""
    size = CACHED_BYTES if hidden.device.type == "cpu" else TILE_BYTES
    return max(LEAST_WORDS, size // (4 * max(1, len(hidden))))


def _tiles(vocabulary: int, words: int) -> list[slice]:
    return [slice(start, min(start + words, vocabulary)) for start in range(0, vocabulary, words)]


def _like(buffer: Tensor, tile: Tensor) -> Tensor:
    """Return the first part of a flat buffer, in the shape of a tile."""
    return buffer[: tile.numel()].view_as(tile)


def _column(target: Tensor, tile: slice) -> tuple[Tensor, Tensor]:
    """Return whether each row's target is in a tile, and its column there; any valid column if it is not."""
    column = target - tile.start
    within = column.clamp(0, tile.stop - tile.start - 1)
    return column == within, within


def _products(hidden: Tensor, weight: Tensor, bias: Tensor | None, tile: slice) -> Tensor:
    """Return the products of hidden states with a tile of the output layer [rows, tokens of the tile]."""
    return F.linear(hidden, weight[tile], None if bias is None else bias[tile])


def logits_of(products: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return the logits: the products after scale and softcap."""
    if scale == 1.0 and softcap is None:
        return products
    logits = products.to(torch.promote_types(products.dtype, torch.float32), copy=True)
    if scale != 1.0:
        logits *= scale
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def spare_last_layer(model: Any) -> Callable[[], None]:
    """Make a model's last layer compute only the tokens set by `want`; return a function that undoes this.

    Until `want` is called, the layer computes all tokens.
    """
    want(model, None)
    block = getattr(_last_layer(model), "mlp", None)
    hooks: list[Any] = []
    if isinstance(block, torch.nn.Module):
        hooks = [block.register_forward_pre_hook(_select), block.register_forward_hook(_spread)]

    def undo() -> None:
        want(model, None)
        for hook in hooks:
            hook.remove()

    return undo


def want(model: Any, tokens: Tensor | None) -> None:
    """Set which tokens the last layer computes, in later forward passes and their backward passes.

    Args:
        model: The transformers model.
        tokens: Indices of the wanted tokens, in increasing order [tokens]; None: all tokens.
    """
    for name in ("self_attn", "mlp"):
        part = getattr(_last_layer(model), name, None)
        if isinstance(part, torch.nn.Module):
            part.perturn_wanted = tokens  # type: ignore[assignment]


def _last_layer(model: Any) -> Any:
    layers = getattr(model.get_decoder(), "layers", None)
    return layers[-1] if isinstance(layers, torch.nn.ModuleList) else None


def _select(block: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook: pass only the wanted tokens to the block."""
    if block.perturn_wanted is None:
        return None
    block.perturn_tokens = inputs[0].shape[1]
    return inputs[0].index_select(1, block.perturn_wanted), *inputs[1:]


def _spread(block: Any, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
    """Forward hook: put the block's outputs at the wanted tokens, and zeros at all others."""
    if block.perturn_wanted is None:
        return None
    zeros = output.new_zeros(output.shape[0], block.perturn_tokens, output.shape[2])
    return zeros.index_copy(1, block.perturn_wanted, output)
