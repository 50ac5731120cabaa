"""In the last layer, only tokens that predict a loss token have to attend and to pass the feed-forward block.

Nothing reads what the others would become there. So the layer's attention and its feed-forward block are told which
tokens are wanted and give zeros for the rest, whose keys and values still serve. An architecture whose last layer has
other names computes all tokens, as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def spare_last_layer(model: Any) -> Callable[[], None]:
    """Make the last layer ask for `want`; until it is called, all tokens are wanted.

    Args:
        model: A causal language model of transformers.

    Returns:
        What undoes it.
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
    """Say which tokens are wanted of the last layer, for the passes that follow and their backward passes.

    Args:
        model: As above.
        tokens: Positions, in order, each once [tokens]; None: all.
    """
    for part in _parts(model):
        part.perturn_wanted = tokens


def _last_layer(model: Any) -> Any:
    layers = getattr(model.get_decoder(), "layers", None)
    return layers[-1] if isinstance(layers, torch.nn.ModuleList) else None


def _parts(model: Any) -> list[Any]:
    """The attention and the feed-forward block of the last layer."""
    found = [getattr(_last_layer(model), name, None) for name in ("self_attn", "mlp")]
    return [part for part in found if isinstance(part, torch.nn.Module)]


def _select(block: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Only the wanted tokens go in."""
    if block.perturn_wanted is None:
        return None
    block.perturn_tokens = inputs[0].shape[1]
    return inputs[0].index_select(1, block.perturn_wanted), *inputs[1:]


def _spread(block: Any, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
    """The output at the wanted tokens, zeros elsewhere."""
    if block.perturn_wanted is None:
        return None
    zeros = output.new_zeros(output.shape[0], block.perturn_tokens, output.shape[2])
    return zeros.index_copy(1, block.perturn_wanted, output)
