"""Common prefix of all packs of an optimizer step: computed once, forward and backward.

A first pass over the prefix stores the keys and values of each layer. Every pack attends to copies of them, which
accumulate the packs' gradients. At the end, one backward pass sends these gradients through the prefix. So a long
prefix, such as an example in the prompt, takes the same time and memory for any number of packs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

KeyValue = tuple[Tensor, Tensor]
"""Keys and values of one layer, each [1, key heads, tokens, features]."""

_open: list[tuple[Beginning, bool]] = []
"""Stack of the prefixes in use, the innermost last. The flag says whether passes now continue the prefix, or compute
the prefix itself."""


def behind_beginning(module: nn.Module, key: Tensor, value: Tensor) -> KeyValue:
    """Return the keys and values that a layer attends to: the prefix's, followed by the layer's own.

    Args:
        module: The attention layer.
        key: Keys of the current pass [1, key heads, tokens, features].
        value: Values of the current pass [1, key heads, tokens, features].
    """
    if not _open:
        return key, value
    beginning, behind = _open[-1]
    return beginning.extend(module, (key, value)) if behind else beginning.keep(module, (key, value))


def tokens_ahead() -> int:
    """Return the number of tokens of the prefix that passes currently continue; 0 if there is no prefix."""
    beginning, behind = _open[-1] if _open else (None, False)
    return beginning.tokens if beginning is not None and behind else 0


class Beginning:
    """A common prefix: keys and values of each layer, and their gradients."""

    def __init__(self) -> None:
        """Make an empty prefix, which a pass inside `within` fills."""
        self._made: dict[nn.Module, KeyValue] = {}
        self._copies: dict[nn.Module, KeyValue] = {}

    @property
    def tokens(self) -> int:
        """Number of tokens of the prefix."""
        return next((key.shape[2] for key, _ in self._made.values()), 0)

    @contextmanager
    def within(self) -> Iterator[None]:
        """Store the keys and values of the passes inside this context as the prefix's."""
        with _as(self, behind=False):
            yield

    @contextmanager
    def behind(self) -> Iterator[None]:
        """Let the passes inside this context, forward and backward, continue the prefix."""
        with _as(self, behind=True):
            yield

    def backward(self) -> None:
        """Backpropagate through the prefix the gradients that the later passes accumulated."""
        known: list[tuple[Tensor, Tensor]] = []
        for module, copies in self._copies.items():
            for made, copy in zip(self._made[module], copies, strict=True):
                if made.requires_grad and copy.grad is not None:
                    known.append((made, copy.grad.to(made.dtype)))
        if known:
            with self.within():  # a checkpointed layer is computed again
                torch.autograd.backward([made for made, _ in known], [grad for _, grad in known])

    def keep(self, module: nn.Module, own: KeyValue) -> KeyValue:
        """Store and return the keys and values of a layer in the pass over the prefix."""
        self._made.setdefault(module, own)
        return own

    def extend(self, module: nn.Module, own: KeyValue) -> KeyValue:
        """Return the prefix's keys and values followed by the layer's own, in a pass that continues the prefix."""
        if module not in self._copies:
            key, value = (_leaf(each) for each in self._made[module])
            self._copies[module] = key, value
        pairs = zip(self._copies[module], own, strict=True)
        key, value = (torch.cat([ahead.to(each.dtype), each], 2) for ahead, each in pairs)
        return key, value


def _leaf(made: Tensor) -> Tensor:
    """Return a copy that accumulates the gradients of all packs, in float32 or higher precision."""
    exact = torch.promote_types(made.dtype, torch.float32)
    return made.detach().to(exact).requires_grad_(made.requires_grad)


@contextmanager
def _as(beginning: Beginning, behind: bool) -> Iterator[None]:
    _open.append((beginning, behind))
    try:
        yield
    finally:
        _open.pop()
