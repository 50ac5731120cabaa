"""The output layer in chunks of rows, for losses that read more than the log-probability of each token.

Additional inputs of a loss, such as an entropy, depend on all logits of a row. So the logits are computed for some rows
at a time. The backward pass computes them again, except the logits of the first chunks. Autograd differentiates the
additional inputs. Memory is bounded by one chunk plus `KEPT_BYTES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from perturn.errors import check_fit
from perturn.free_memory import return_waste
from perturn.losses.token_entropy import TokenEntropy
from perturn.losses.token_inputs import Chunk, PolicyInput
from perturn.policy.head import KEPT_BYTES, TILE_BYTES, Head, as_autocast, logits_of, to_products

_ENTROPY = TokenEntropy()
"""Entropy of each token's distribution; always computed, since it is logged."""


def token_inputs(
    hidden: Tensor, target: Tensor, head: Head, inputs: Mapping[str, PolicyInput]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the result of `token_logprobs`, and the additional inputs of the loss.

    Args:
        hidden: Last hidden states [rows, features].
        target: Token ids [rows].
        head: The output layer.
        inputs: Functions that compute the loss's additional inputs, by name.

    Returns:
        Log-probabilities in nats, float32 [rows]; entropies in nats, float32, without gradient [rows]; the inputs by
        name, each [rows].

    Raises:
        ConfigError: If a function does not return one number per row.
    """
    hidden, weight, bias = as_autocast(hidden, head)
    functions = tuple(dict.fromkeys((_ENTROPY, *inputs.values())))  # computes the entropy once
    logprobs, *values = _TokenInputs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, target, head.scale, head.softcap, functions, torch.is_grad_enabled()
    )
    found = dict(zip(functions, values, strict=True))
    return logprobs, found[_ENTROPY].detach(), {name: found[each] for name, each in inputs.items()}


class _TokenInputs(torch.autograd.Function):
    """Log-probabilities and additional inputs of a loss, computed chunk by chunk.

    In each chunk, autograd computes the gradient of the logits. The gradient of the output layer is computed by hand,
    so that all chunks add to one gradient tensor of the weight.
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
        inputs: tuple[PolicyInput, ...],
        keep: bool,
    ) -> tuple[Tensor, ...]:
        if not keep and hidden.device.type == "cpu":
            return_waste()
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.softcap, ctx.inputs = scale, softcap, inputs
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.kept, left = [], KEPT_BYTES if keep else 0
        found: list[list[Tensor]] = []
        for rows in _rows(hidden, weight):
            products = F.linear(hidden[rows], weight, bias)
            left -= products.nbytes
            if left >= 0:
                ctx.kept.append(products)
            chunk = Chunk(hidden[rows], _exact(products, scale, softcap), target[rows])
            found.append(_values(chunk, inputs))
        return tuple(map(torch.cat, zip(*found, strict=True)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target = ctx.saved_tensors
        if hidden.device.type == "cpu":
            return_waste()
        grad_hidden = torch.zeros_like(hidden)
        exact = torch.promote_types(weight.dtype, torch.float32)  # a sum over chunks in bfloat16 loses digits
        grad_weight = torch.zeros_like(weight, dtype=exact) if ctx.needs_input_grad[1] else None
        grad_bias = (
            torch.zeros_like(bias, dtype=exact) if bias is not None and ctx.needs_input_grad[2] else None
        )
        for rows in _rows(hidden, weight):
            products = ctx.kept.pop(0) if ctx.kept else F.linear(hidden[rows], weight, bias)
            logits = _exact(products, ctx.scale, ctx.softcap)
            chunk = Chunk(
                hidden[rows].detach().requires_grad_(), logits.detach().requires_grad_(), target[rows]
            )
            slope, grad_hidden[rows] = _slopes(
                chunk, ctx.inputs, [g if g is None else g[rows] for g in grads]
            )
            to_products(slope, logits, ctx.scale, ctx.softcap)
            if grad_bias is not None:
                grad_bias += slope.sum(0)
            slope = slope.to(weight.dtype)
            grad_hidden[rows] += slope @ weight
            if grad_weight is not None and weight.dtype == exact:
                grad_weight.addmm_(slope.t(), hidden[rows])
            elif grad_weight is not None:
                grad_weight += slope.t() @ hidden[rows]
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _rows(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    """Yield the rows of each chunk; at least one chunk, which may be empty."""
    size = max(1, TILE_BYTES // (4 * len(weight)))
    for start in range(0, max(1, len(hidden)), size):
        yield slice(start, start + size)


def _exact(products: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return the logits in float32 or higher precision."""
    return logits_of(products, scale, softcap).to(torch.promote_types(products.dtype, torch.float32))


def _values(chunk: Chunk, inputs: tuple[PolicyInput, ...]) -> list[Tensor]:
    """Return the log-probabilities of a chunk's target tokens, and the additional inputs, each [rows].

    Raises:
        ConfigError: If an input is not one floating-point number per row.
    """
    with torch.autocast(chunk.logits.device.type, enabled=False):
        found = [chunk.logprobs.gather(-1, chunk.target[:, None]).squeeze(-1)]
        for each in inputs:
            value = each(chunk)
            fits = value.shape == chunk.target.shape and value.is_floating_point()
            must = f"return a floating-point number for each of the {len(chunk.target)} tokens of a chunk"
            check_fit(fits, f"token input {each.name!r}", must, (value.dtype, list(value.shape)))
            found.append(value)
    return found


@torch.enable_grad()
def _slopes(
    chunk: Chunk, inputs: tuple[PolicyInput, ...], grads: list[Tensor | None]
) -> tuple[Tensor, Tensor | float]:
    """Return the gradient with respect to a chunk's logits, and its direct gradient with respect to hidden states.

    The second gradient is 0 unless an input reads the hidden states without going through the logits.

    Args:
        chunk: A chunk of rows.
        inputs: Functions that compute the additional inputs.
        grads: Incoming gradients of log-probabilities and inputs, each [rows]; None: no gradient.
    """
    pairs = zip(_values(chunk, inputs), grads, strict=True)
    moved = [(value, grad) for value, grad in pairs if grad is not None and value.requires_grad]
    if not moved:
        return torch.zeros_like(chunk.logits), 0.0
    values, given = zip(*moved, strict=True)
    slope, direct = torch.autograd.grad(values, (chunk.logits, chunk.hidden), given, allow_unused=True)
    return torch.zeros_like(chunk.logits) if slope is None else slope, 0.0 if direct is None else direct
