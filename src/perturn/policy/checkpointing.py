"""Activation checkpointing that keeps what attention gave: the backward pass computes all else of a layer again.

Attention's cost grows with the length of a sequence, its output does not: it is as large as the layer's input, which is
kept as well. So a checkpointed layer holds two activations a token instead of one, and attends once.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor

Kept = tuple[Tensor, Tensor]
"""Output and log-sum-exps of one attention."""

_open: list[_Layer] = []
"""Checkpointed layers that are being computed, the innermost last."""


class _Layer:
    """Attention output of one checkpointed layer."""

    def __init__(self) -> None:
        self.kept: list[Kept] = []
        self.again = False


class _Computing:
    """While a layer is computed, for the first time or again; may be entered several times."""

    def __init__(self, layer: _Layer, again: bool) -> None:
        self._layer, self._again = layer, again

    def __enter__(self) -> None:
        self._layer.again = self._again
        _open.append(self._layer)

    def __exit__(self, *_: object) -> None:
        _open.pop()


def take() -> Kept | None:
    """Output of this attention when its layer was computed before; None where it has to be computed."""
    layer = _open[-1] if _open else None
    return layer.kept.pop(0) if layer and layer.again and layer.kept else None


def keep(output: Tensor, lse: Tensor) -> None:
    """Keep what this attention gave, if its layer will be computed again."""
    if _open and not _open[-1].again:
        _open[-1].kept.append((output, lse))


def keep_attention(model: Any) -> Callable[[], None]:
    """Make the checkpointing that is switched on from now on keep attention's outputs.

    Args:
        model: A causal language model of transformers whose attention calls `take` and `keep`.

    Returns:
        What undoes it.
    """
    name = _method(model)
    model.perturn_plain_checkpointing = getattr(model, name)
    setattr(model, name, MethodType(_enable, model))

    def undo() -> None:
        delattr(model, name)
        del model.perturn_plain_checkpointing

    return undo


def _method(model: Any) -> str:
    """Name of the model's method that sets checkpointing up; it is older in transformers before 5, such as vLLM's."""
    new = "activation_checkpointing_enable"
    return new if hasattr(model, new) else "gradient_checkpointing_enable"


def _enable(model: Any, settings: dict[str, Any] | None = None, **others: Any) -> None:
    """The model's own method, with our contexts; its settings come as `..._kwargs` or first."""
    given = others.pop(_method(model).replace("enable", "kwargs"), settings)
    how = {"use_reentrant": False} | (given or {})
    if not how["use_reentrant"]:  # the other kind knows no contexts
        how.setdefault("context_fn", _contexts)
    model.perturn_plain_checkpointing(how, **others)


def _contexts() -> tuple[_Computing, _Computing]:
    """For one layer of one pass: when it is computed, and when it is computed again."""
    layer = _Layer()
    return _Computing(layer, again=False), _Computing(layer, again=True)
