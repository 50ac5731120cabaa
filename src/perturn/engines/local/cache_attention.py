"""Attention of a few tokens to keys and values that lie somewhere, and how what they find is joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from perturn.engines.local.prefix_tree import Beginning

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Ask(NamedTuple):
    """The rest of what a layer asks for."""

    layer: int
    scaling: float | None
    window: int | None
    sums: bool
    """Whether the log-sum-exps of scores are needed too."""


def masks(last: Sequence[int], tokens: int, device: torch.device) -> Callable[..., Tensor]:
    """Makes masks, once for all layers of a pass: 0 up to the last token that a row sees, else minus infinity."""
    ends = torch.tensor(last, device=device)[:, None]

    @cache
    def mask(window: int | None, dtype: torch.dtype, times: int = 1) -> Tensor:
        key = torch.arange(tokens, device=device)
        hidden = key > ends
        if window is not None:
            hidden |= key <= ends - window
        return (
            torch.zeros(hidden.shape, dtype=dtype, device=device)
            .masked_fill_(hidden, -torch.inf)
            .repeat(times, 1)
        )

    return mask


def dot_products(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, ask: Ask
) -> tuple[Tensor, Tensor | None]:
    """Attention by torch's kernel, causal without a mask, and the log-sum-exps of the scores if they are asked for."""
    if ask.sums:
        found, sums = _flash(query, keys, values, 0.0, mask is None, attn_mask=mask, scale=ask.scaling)
        return found, sums
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=mask is None, scale=ask.scaling
    ), None


def by_products(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, ask: Ask
) -> tuple[Tensor, Tensor | None]:
    """The same for one row a head, with scores that are rounded to the type of the keys."""
    scaled = query * (query.shape[-1] ** -0.5 if ask.scaling is None else ask.scaling)
    scores = (keys @ scaled.transpose(-1, -2)).transpose(-1, -2) + mask
    shares = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    return shares @ values, scores.float().logsumexp(-1) if ask.sums else None


class Shared:
    """All tokens whose conversations go on from a node, side by side."""

    def __init__(
        self, node: Beginning, readers: Sequence[tuple[int, int]], tokens: int, device: torch.device
    ) -> None:
        """Of a batch of so many tokens, some: the index of each in the batch and in its conversation."""
        start = sum(each.tokens for each in node.path[:-1])
        last = [index - start for _, index in readers]
        self._held, self._tokens = node.held, node.tokens
        everyone = len(readers) == tokens
        self._rows = None if everyone else torch.tensor([row for row, _ in readers], device=device)
        self._nearest, self._farthest = min(last), max(last)
        self._mask = masks(last, node.tokens, device)

    def join(self, query: Tensor, found: Tensor, sums: Tensor, ask: Ask) -> tuple[Tensor, Tensor]:
        """Join to what was found elsewhere [tokens, heads, features], and its log-sum-exps [tokens, heads]."""
        window = ask.window
        if window is not None and self._nearest - window >= self._tokens - 1:
            return found, sums
        rows = self._rows
        mask = None if window is None or self._farthest < window else self._mask(window, query.dtype)
        own, own_sums = (found, sums) if rows is None else (found[rows], sums[rows])
        more, more_sums = self._attend(query[0] if rows is None else query[0][:, rows], mask, ask)
        if mask is not None:  # a token that sees none of them
            more_sums = more_sums.masked_fill(mask[:, -1:].isneginf(), -torch.inf)
        share = (more_sums - own_sums).sigmoid()[..., None]
        joined = torch.lerp(own.float(), more.float(), share.float()).to(found.dtype)
        total = torch.logaddexp(own_sums, more_sums)
        if rows is None:
            return joined, total
        return found.index_copy(0, rows, joined), sums.index_copy(0, rows, total)

    def _attend(self, query: Tensor, mask: Tensor | None, ask: Ask) -> tuple[Tensor, Tensor]:
        """Attend to the node alone: [heads, tokens, features] to [tokens, heads, features] and log-sum-exps."""
        keys, values = self._held[ask.layer]
        tokens, wide = query.shape[1], (len(keys), -1)
        asking = query.unflatten(0, wide).flatten(1, 2)[None]
        if mask is not None:
            mask = mask.repeat(asking.shape[2] // tokens, 1)[None, None]
        found, sums = _flash(asking, keys[None], values[None], 0.0, False, attn_mask=mask, scale=ask.scaling)
        found, sums = (each[0].unflatten(1, (-1, tokens)).flatten(0, 1) for each in (found, sums))
        return found.transpose(0, 1), sums.T
