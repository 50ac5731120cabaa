"""Attention over a forest of sequences: a token attends to itself and to the tokens before it on its path to the root.

On the CPU, each segment needs two calls of torch's flash attention: a causal call for its own tokens, and a call for
the queries of all its descendants. There is no mask, and nothing is computed in vain. On a GPU, the forest becomes a
block mask of FlexAttention.

With activation checkpointing, the outputs of attention are stored, since attention costs the most per byte of output.
The backward pass computes the rest of a layer again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from perturn.errors import ModelError
from perturn.policy.shared_prefix import behind_beginning

NAME = "perturn"
"""Name of our attention among transformers' implementations."""

PIECES = "flash attention, a piece for each segment"
FLEX = "FlexAttention"
MASK = "scaled dot products under a mask"

_BLOCK = 128
"""Number of tokens in a block of FlexAttention's mask."""
_VARIANTS = 64
"""Number of variants for which FlexAttention may be compiled. After torch's limit of 8 it would store all scores."""
_LEAST_FEATURES = 16
"""Smallest number of features per head that FlexAttention's kernels support."""

Piece = tuple[slice, slice, bool]
"""An attention call: query rows, key rows, and whether attention is causal (queries and keys are the same tokens)."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def kernel(device: torch.device) -> str:
    """Return the attention implementation for packed sequences on a device, with the installed packages."""
    if device.type == "cpu":
        return PIECES
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS)
    return FLEX if device.type == "cuda" and find_spec("triton") else MASK


def forest_mask(segments: Tensor, ahead: int = 0) -> Tensor | BlockMask:
    """Return the attention mask of a packed batch; every layer passes it to `forest_attention`.

    Args:
        segments: Segments from `lay_out`, on the device of the computation [segments, 3].
        ahead: Length of the common prefix that the batch continues, in tokens; all tokens attend to all of it.

    Returns:
        For `PIECES` the segments themselves [1, 1, segments, 3]; for `FLEX` a block mask; for `MASK` True where a
        query attends to a key [1, 1, tokens, ahead + tokens].
    """
    how = kernel(segments.device)
    if how is PIECES:
        return segments[None, None]
    if how is FLEX:
        return block_mask(segments, ahead)
    tokens, sees = int(segments[-1, 1]), _sees(segments, ahead)
    query, key = (torch.arange(size, device=segments.device) for size in (tokens, ahead + tokens))
    return sees(query, query, query[:, None], key)[None, None]


def block_mask(segments: Tensor, ahead: int = 0) -> BlockMask:
    """Make FlexAttention's block mask from the segments, in O(n + b^2) time for n tokens in b blocks of 128.

    torch's `create_block_mask` evaluates every pair of tokens, which takes O(n^2).

    Args:
        segments: Segments from `lay_out` [segments, 3].
        ahead: Length of the common prefix that the batch continues, in tokens.
    """
    tokens, reach = int(segments[-1, 1]), _reach(segments, ahead)
    padded = F.pad(reach, (0, -len(reach) % _BLOCK)).view(-1, _BLOCK)
    starts = torch.arange(0, tokens, _BLOCK, device=segments.device)[:, None]
    first, last = starts + ahead, (starts + _BLOCK).clamp(max=tokens) - 1 + ahead
    keys = torch.arange(0, len(reach), _BLOCK, device=segments.device)
    seen = (keys <= last) & (padded.amax(1) > first)
    whole = (keys + _BLOCK - 1 <= first) & (padded.amin(1) > last) & (starts + _BLOCK <= tokens)
    return BlockMask.from_kv_blocks(
        *_ordered(seen & ~whole),
        *_ordered(whole),
        BLOCK_SIZE=_BLOCK,
        mask_mod=_sees(segments, ahead),
        seq_lengths=(tokens, len(reach)),
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of set blocks in each row of blocks, and the indices of each row's blocks, set blocks first."""
    indices = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], indices.int()[None, None]


def _reach(segments: Tensor, ahead: int) -> Tensor:
    """Return, for each key, the index of the first later token that does not attend to it [ahead + tokens].

    Indices count from the start of the common prefix, to which all tokens attend.
    """
    reach = torch.repeat_interleave(segments[:, 2], segments[:, 1] - segments[:, 0]) + ahead
    return torch.cat([reach.new_full((ahead,), int(segments[-1, 1]) + ahead), reach])


def _sees(segments: Tensor, ahead: int = 0) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return FlexAttention's `mask_mod`: whether a query attends to a key. Keys count from the prefix's start."""
    reach = _reach(segments, ahead)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query + ahead) & (query + ahead < reach[key])

    return sees


def forest_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention with the signature that transformers expects of an attention function.

    Args:
        module: The attention layer.
        query: Queries [1, heads, tokens, features].
        key: Keys [1, key heads, tokens, features].
        value: Values [1, key heads, tokens, features].
        attention_mask: Result of `forest_mask`; any other mask leads to transformers' `sdpa` attention.
        scaling: Factor of the dot products; None: 1 / sqrt(features).
        dropout: Dropout of the attention weights; must be 0 for packed sequences.
        others: Other arguments of the layer.

    Returns:
        Outputs [1, tokens, heads, features], and None for the attention weights.
    """
    packed = attention_mask is not None and (
        isinstance(attention_mask, BlockMask) or attention_mask.dtype == torch.long
    )
    _refuse(module, dropout if packed else 0.0, others)
    own = key.shape[2]
    key, value = behind_beginning(module, key, value)
    if not packed:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if isinstance(attention_mask, BlockMask):
        features = value.shape[-1]
        if features < _LEAST_FEATURES:  # zeros do not change a dot product
            scaling = features**-0.5 if scaling is None else scaling
            query, key, value = (F.pad(each, (0, _LEAST_FEATURES - features)) for each in (query, key, value))
        output, _ = flex_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return output[..., :features], None
    # The kernel assumes contiguous features without checking.
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    segments, wanted = attention_mask[0, 0].tolist(), getattr(module, "perturn_wanted", None)
    tokens = query.shape[2]
    if wanted is not None:
        query = query.index_select(2, wanted)
    pieces = _pieces(segments) if wanted is None else _wanted_pieces(segments, wanted.tolist())
    pieces = _behind(pieces, key.shape[2] - own, query.shape[2])
    found: Tensor = _ForestAttention.apply(query, key, value, pieces, scaling)  # type: ignore[no-untyped-call]
    if wanted is not None:
        found = found.new_zeros(1, tokens, *found.shape[2:]).index_copy(1, wanted, found)
    return found, None


def _refuse(module: torch.nn.Module, dropout: float, others: dict[str, Any]) -> None:
    """Raise a `ModelError` if the layer asks for a kind of attention that packed sequences do not support."""
    asked = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if dropout:
        asked.append("attention dropout")
    if asked:
        raise ModelError(
            f"{type(module).__name__} asks for {', '.join(asked)}, which packed sequences do not support; "
            "take a model without it."
        )


class _ForestAttention(torch.autograd.Function):
    """Flash attention in several calls, whose outputs are merged by their log-sum-exps.

    Attention over the union of two sets of keys is the mean of the two outputs, weighted by the softmax of the two
    log-sum-exps. The backward pass of a call needs only the merged output and the merged log-sum-exp.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pieces: list[Piece],
        scale: float | None,
    ) -> Tensor:
        output, lse = _take() or _attend(*_grouped(query, key, value), pieces, scale)
        _keep(output, lse)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.pieces, ctx.scale = pieces, scale
        return output.flatten(1, 2)[None]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        q, k, v = _grouped(query, key, value)
        joined = output.permute(1, 2, 0, 3)
        grad = grad_output.view(output.shape).permute(1, 2, 0, 3)
        # If all tokens are queries, each is in one causal call: it comes first and is assigned; the others are added.
        all_ask = q.shape[2] == k.shape[2]
        make = torch.empty if all_ask else torch.zeros
        grads = [make(each.shape, dtype=each.dtype) for each in (q, k, v)]
        for rows, keys, causal in sorted(ctx.pieces, key=lambda piece: not piece[2]):
            piece = _flash_backward(
                grad[:, :, rows],
                q[:, :, rows],
                k[:, :, keys],
                v[:, :, keys],
                joined[:, :, rows],
                lse[:, :, rows],
                0.0,
                causal,
                scale=ctx.scale,
            )
            for total, part, at in zip(grads, piece, (rows, keys, keys), strict=True):
                if causal and all_ask:
                    total[:, :, at] = part
                else:
                    total[:, :, at] += part
        return grads[0].view(query.shape), grads[1].sum(1)[None], grads[2].sum(1)[None], None, None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, pieces: list[Piece], scale: float | None
) -> tuple[Tensor, Tensor]:
    """Run all calls: output [tokens, key heads, group, features] and log-sum-exps [key heads, group, tokens]."""
    key_heads, group, tokens, features = q.shape
    output = q.new_empty(tokens, key_heads, group, features)
    joined = output.permute(1, 2, 0, 3)
    lse = q.new_empty(key_heads, group, tokens, dtype=torch.promote_types(q.dtype, torch.float32))
    written = 0  # rows before this index already hold results
    for rows, keys, causal in pieces:
        piece = _flash(q[:, :, rows], k[:, :, keys], v[:, :, keys], 0.0, causal, scale=scale)
        if rows.start < written:
            _join(joined[:, :, rows], lse[:, :, rows], *piece)
        else:
            joined[:, :, rows], lse[:, :, rows] = piece
            written = rows.stop
    return output, lse


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views [key heads, group, tokens, features], where a group is the heads that share a key head."""
    q = query[0].unflatten(0, (key.shape[1], -1))
    return q, *(each[0, :, None].expand(-1, q.shape[1], -1, -1) for each in (key, value))


def _pieces(segments: list[list[int]]) -> list[Piece]:
    """Return the attention calls of segments. A segment is [start, end, end of its descendants]."""
    pieces = []
    for start, end, reach in segments:
        pieces.append((slice(start, end), slice(start, end), True))
        if reach > end:
            pieces.append((slice(end, reach), slice(start, end), False))
    return pieces


def _wanted_pieces(segments: list[list[int]], wanted: list[int]) -> list[Piece]:
    """Return the attention calls if only the tokens at the sorted indices `wanted` are queries, in this order."""
    pieces: list[Piece] = []
    for start, end, reach in segments:
        first, last, far = (bisect_left(wanted, bound) for bound in (start, end, reach))
        for low, high in _runs(wanted, first, last):
            rows, begin = slice(low, high), wanted[low]
            if begin > start:
                pieces.append((rows, slice(start, begin), False))
            pieces.append((rows, slice(begin, begin + high - low), True))
        if far > last:
            pieces.append((slice(last, far), slice(start, end), False))
    return pieces


def _behind(pieces: list[Piece], ahead: int, rows: int) -> list[Piece]:
    """Return the attention calls if `ahead` keys of a common prefix precede all others; all `rows` attend to it."""
    if not ahead:
        return pieces
    moved = [(own, slice(keys.start + ahead, keys.stop + ahead), causal) for own, keys, causal in pieces]
    return [*moved, (slice(0, rows), slice(0, ahead), False)] if rows else moved


def _runs(positions: list[int], first: int, last: int) -> list[tuple[int, int]]:
    """Return the bounds of the runs of consecutive numbers in `positions[first:last]`."""
    cuts = [index for index in range(first + 1, last) if positions[index] != positions[index - 1] + 1]
    return list(pairwise([first, *cuts, last])) if last > first else []


def _join(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge the output of another call [key heads, group, rows, features] into the rows' output, in place."""
    total = torch.logaddexp(lse, other_lse)
    output.mul_((lse - total).exp_().unsqueeze(-1)).add_(other * (other_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


_Kept = tuple[Tensor, Tensor]
"""Output and log-sum-exps of one layer's attention."""

_open: list[_Computing] = []
"""Stack of the checkpointed layers that are being computed, the innermost last."""


class _Computing:
    """Context in which a checkpointed layer is computed, in the forward pass or again in the backward pass.

    It may be entered several times.
    """

    def __init__(self, kept: list[_Kept], again: bool) -> None:
        self.kept, self.again = kept, again

    def __enter__(self) -> None:
        _open.append(self)

    def __exit__(self, *_: object) -> None:
        _open.pop()


def _take() -> _Kept | None:
    """Return the stored attention output if the layer is being recomputed; None if there is no stored output."""
    layer = _open[-1] if _open else None
    return layer.kept.pop(0) if layer and layer.again and layer.kept else None


def _keep(output: Tensor, lse: Tensor) -> None:
    """Store the output of this attention if its layer will be computed again."""
    if _open and not _open[-1].again:
        _open[-1].kept.append((output, lse))


def keep_attention(model: Any) -> Callable[[], None]:
    """Make activation checkpointing, if it is enabled later, store attention outputs; return an undo function."""
    name = _method(model)
    model.perturn_plain_checkpointing = getattr(model, name)
    setattr(model, name, MethodType(_enable, model))

    def undo() -> None:
        delattr(model, name)
        del model.perturn_plain_checkpointing

    return undo


def _method(model: Any) -> str:
    """Return the name of the model's method that enables checkpointing; transformers before 5 has an older name."""
    new = "activation_checkpointing_enable"
    return new if hasattr(model, new) else "gradient_checkpointing_enable"


def _enable(model: Any, settings: dict[str, Any] | None = None, **others: Any) -> None:
    """Call the model's own method with our contexts; its settings are the first argument or `..._kwargs`."""
    given = others.pop(_method(model).replace("enable", "kwargs"), settings)
    how = {"use_reentrant": False} | (given or {})
    if not how["use_reentrant"]:  # reentrant checkpointing supports no contexts
        how.setdefault("context_fn", _contexts)
    model.perturn_plain_checkpointing(how, **others)


def _contexts() -> tuple[_Computing, _Computing]:
    """Return the contexts of one layer in one pass: for the forward computation and the recomputation."""
    kept: list[_Kept] = []
    return _Computing(kept, again=False), _Computing(kept, again=True)


AttentionInterface.register(NAME, forest_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
