"""The last layer and the output layer at chosen tokens: log-probabilities without ever holding all logits.

In the last layer, only tokens that predict a loss token have to attend and to pass the feed-forward block,
since nothing reads the other positions. So both are told which tokens are wanted and give zeros for the rest,
whose keys and values still serve. An architecture whose last layer has other names computes all tokens, as
before.

Logits are made for a part of the vocabulary at a time, forward and backward, in tiles that stay in a CPU's caches; the
sum of a row's exponentials grows from tile to tile. The first tiles, up to a bound, wait for the backward pass; those
that follow are computed again, which adds a third to their share of a step.
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
"""Size of a tile of float32 logits on a CPU: the size of its caches."""

TILE_BYTES = 2**27
"""Elsewhere: a size that keeps a device busy."""

LEAST_WORDS = 256
"""Of a tile, however many rows there are: less than the hidden states of most models."""

KEPT_BYTES = 2**28
"""The most that waits for the backward pass, in tiles."""


@dataclass(frozen=True)
class Head:
    """A model's output layer."""

    weight: Tensor
    """[vocabulary, features]."""
    bias: Tensor | None = None
    """[vocabulary]."""
    scale: float = 1.0
    """Factor of the logits."""
    softcap: float | None = None
    """c in c tanh(logits / c), after the factor; None for none."""


def token_logprobs(hidden: Tensor, target: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Return the log-probability of one token a row, and the entropy of the row.

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
    """Return hidden states, weight and bias in the precision that autocast sets."""
    weight, bias, device = head.weight, head.bias, hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return hidden, weight, bias


class _TokenLogprobs(torch.autograd.Function):
    """log softmax(W h + b) at one token a row, a part of the vocabulary after the other.

    With p the softmax, g the incoming gradient and t the target:  d/dlogits = g (onehot(t) - p). The entropy is
    log sum exp(z) - sum p z, with z the logits; it costs a product and a sum where the tile is in cache.
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
    """Turn the gradient of logits into the gradient of the products that they are made from, in place."""
    if softcap is not None:
        slope *= 1 - (logits / softcap).square()
    if scale != 1.0:
        slope *= scale


def _words(hidden: Tensor) -> int:
    """Return words of a tile."""
    size = CACHED_BYTES if hidden.device.type == "cpu" else TILE_BYTES
    return max(LEAST_WORDS, size // (4 * max(1, len(hidden))))


def _tiles(vocabulary: int, words: int) -> list[slice]:
    return [slice(start, min(start + words, vocabulary)) for start in range(0, vocabulary, words)]


def _like(buffer: Tensor, tile: Tensor) -> Tensor:
    """Return a tile's worth of the buffer."""
    return buffer[: tile.numel()].view_as(tile)


def _column(target: Tensor, tile: slice) -> tuple[Tensor, Tensor]:
    """Return whether each row's target is in a tile, and where, or somewhere in it."""
    column = target - tile.start
    within = column.clamp(0, tile.stop - tile.start - 1)
    return column == within, within


def _products(hidden: Tensor, weight: Tensor, bias: Tensor | None, tile: slice) -> Tensor:
    """Return products with a part of the output layer [rows, words]."""
    return F.linear(hidden, weight[tile], None if bias is None else bias[tile])


def logits_of(products: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return the logits after the architecture's own change."""
    if scale == 1.0 and softcap is None:
        return products
    logits = products.to(torch.promote_types(products.dtype, torch.float32), copy=True)
    if scale != 1.0:
        logits *= scale
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def spare_last_layer(model: Any) -> Callable[[], None]:
    """Make the last layer ask for `want`; until it is called, all tokens are wanted. Returns what undoes it."""
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
    """Say which tokens are wanted of the last layer, for the passes that follow and their backward passes.

    They are positions, in order, each once [tokens]; None: all.
    """
    for name in ("self_attn", "mlp"):
        part = getattr(_last_layer(model), name, None)
        if isinstance(part, torch.nn.Module):
            part.perturn_wanted = tokens  # type: ignore[assignment]


def _last_layer(model: Any) -> Any:
    layers = getattr(model.get_decoder(), "layers", None)
    return layers[-1] if isinstance(layers, torch.nn.ModuleList) else None


def _select(block: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Pass only the wanted tokens on to the layer."""
    if block.perturn_wanted is None:
        return None
    block.perturn_tokens = inputs[0].shape[1]
    return inputs[0].index_select(1, block.perturn_wanted), *inputs[1:]


def _spread(block: Any, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
    """Return the output at the wanted tokens, zeros elsewhere."""
    if block.perturn_wanted is None:
        return None
    zeros = output.new_zeros(output.shape[0], block.perturn_tokens, output.shape[2])
    return zeros.index_copy(1, block.perturn_wanted, output)
