"""The tokens that all packs of an optimizer step begin with: computed once, forward and backward, for all of them.

A pass over the beginning leaves each layer's keys and values. Every pack that continues it attends to copies of them,
which gather the packs' gradients; at the end those go back through the beginning together. So the time for a worked
example does not depend on the number of packs, and packs do not share memory for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

KeyValue = tuple[Tensor, Tensor]
"""Keys and values of one layer, each [1, key heads, tokens, features]."""

_open: list[tuple[Beginning, bool]] = []
"""The beginnings that passes are made of now, and whether passes come after each, the innermost last."""


def behind_beginning(module: nn.Module, key: Tensor, value: Tensor) -> KeyValue:
    """Return keys and values that a layer attends to: the beginning's, then its own."""
    if not _open:
        return key, value
    beginning, behind = _open[-1]
    return beginning.extend(module, (key, value)) if behind else beginning.keep(module, (key, value))


def tokens_ahead() -> int:
    """Return tokens of the beginning that passes continue now; 0 where they begin themselves."""
    beginning, behind = _open[-1] if _open else (None, False)
    return beginning.tokens if beginning is not None and behind else 0


class Beginning:
    """Keys and values of a beginning, layer by layer, and their gradients."""

    def __init__(self) -> None:
        """Make an empty prefix; a pass `within` it fills it."""
        self._made: dict[nn.Module, KeyValue] = {}
        self._copies: dict[nn.Module, KeyValue] = {}

    @property
    def tokens(self) -> int:
        """Number of shared tokens."""
        return next((key.shape[2] for key, _ in self._made.values()), 0)

    @contextmanager
    def within(self) -> Iterator[None]:
        """Run the passes of the shared beginning inside this block."""
        with _as(self, behind=False):
            yield

    @contextmanager
    def behind(self) -> Iterator[None]:
        """Continue the shared beginning in the passes of this block, forward and backward."""
        with _as(self, behind=True):
            yield

    def backward(self) -> None:
        """Send the gradients that the passes after it have left through the beginning."""
        known: list[tuple[Tensor, Tensor]] = []
        for module, copies in self._copies.items():
            for made, copy in zip(self._made[module], copies, strict=True):
                if made.requires_grad and copy.grad is not None:
                    known.append((made, copy.grad.to(made.dtype)))
        if known:
            with self.within():  # a checkpointed layer is computed again
                torch.autograd.backward([made for made, _ in known], [grad for _, grad in known])

    def keep(self, module: nn.Module, own: KeyValue) -> KeyValue:
        """Remember the keys and values that a layer attends to in the pass that makes the beginning."""
        self._made.setdefault(module, own)
        return own

    def extend(self, module: nn.Module, own: KeyValue) -> KeyValue:
        """Return keys and values that a layer attends to in a pass after it."""
        if module not in self._copies:
            key, value = (_leaf(each) for each in self._made[module])
            self._copies[module] = key, value
        pairs = zip(self._copies[module], own, strict=True)
        key, value = (torch.cat([ahead.to(each.dtype), each], 2) for ahead, each in pairs)
        return key, value


def _leaf(made: Tensor) -> Tensor:
    """Return a copy that gathers gradients, in float32 at least, however many packs add theirs."""
    exact = torch.promote_types(made.dtype, torch.float32)
    return made.detach().to(exact).requires_grad_(made.requires_grad)


@contextmanager
def _as(beginning: Beginning, behind: bool) -> Iterator[None]:
    _open.append((beginning, behind))
    try:
        yield
    finally:
        _open.pop()
