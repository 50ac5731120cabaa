"""The output layer at chosen places: log-probabilities without ever holding all logits.

Logits are made for one block of rows at a time, forward and backward. The first blocks, up to a bound, wait for the
backward pass; those of later blocks are computed again, which adds a third to their share of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK_BYTES = 2**27
"""Size of a block of float32 logits."""

KEPT_BYTES = 2**29
"""The most that waits for the backward pass, in blocks."""


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


def token_logprobs(hidden: Tensor, target: Tensor, head: Head) -> Tensor:
    """Log-probability of one token a row.

    Args:
        hidden: Last hidden states [rows, features].
        target: Token ids [rows].
        head: The output layer.

    Returns:
        Log-probabilities in nats, float32 [rows].
    """
    device = hidden.device.type
    weight, bias = head.weight, head.bias
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    found = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, target, head.scale, head.softcap, torch.is_grad_enabled()
    )
    return cast(Tensor, found)


class _TokenLogprobs(torch.autograd.Function):
    """log softmax(W h + b) at one token a row, block by block.

    With p the softmax, g the incoming gradient and t the target:  d/dlogits = g (onehot(t) - p).
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
    ) -> Tensor:
        ctx.scale, ctx.softcap = scale, softcap
        ctx.rows = max(1, BLOCK_BYTES // (4 * weight.shape[0]))
        logprobs = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        lse = torch.empty_like(logprobs)
        waiting = KEPT_BYTES // (4 * weight.shape[0] * ctx.rows)
        ctx.kept = []
        for number, block in enumerate(_blocks(len(hidden), ctx.rows)):
            logits = _logits(hidden[block], weight, bias, scale, softcap)
            lse[block] = logits.logsumexp(-1)
            logprobs[block] = logits.gather(-1, target[block, None]).squeeze(-1) - lse[block]
            if keep and number < waiting:
                ctx.kept.append(logits)
        ctx.save_for_backward(hidden, weight, bias, target, lse)
        return logprobs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, lse = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for block in _blocks(len(hidden), ctx.rows):
            waited = ctx.kept.pop(0) if ctx.kept else None
            logits = (
                _logits(hidden[block], weight, bias, ctx.scale, ctx.softcap) if waited is None else waited
            )
            slope = _grad_logits(logits, lse[block], target[block], grad[block], ctx.scale, ctx.softcap)
            slope = slope.to(weight.dtype)
            torch.mm(slope, weight, out=grad_hidden[block])
            if grad_weight is not None:
                grad_weight.addmm_(slope.t(), hidden[block])
            if grad_bias is not None:
                grad_bias += slope.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _blocks(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Logits of a block in float32 at least [rows, vocabulary]."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if scale != 1.0:
        logits *= scale
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _grad_logits(
    logits: Tensor, lse: Tensor, target: Tensor, grad: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """Gradient at the product of weight and hidden state [rows, vocabulary]; the logits are overwritten."""
    capped = None if softcap is None else 1 - (logits / softcap).square()
    slope = logits.sub_(lse[:, None]).exp_().mul_(-grad[:, None])
    slope.scatter_add_(-1, target[:, None], grad[:, None])
    if capped is not None:
        slope *= capped
    return slope if scale == 1.0 else slope.mul_(scale)
