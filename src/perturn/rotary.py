"""Lengths up to which a model's packed computation is exact: rotary embeddings and sliding windows.

Some rotary position embeddings depend on the length of the longest sequence in a pass. `longrope` (Phi-3-128k,
Phi-4-mini) uses one set of factors up to the length of the original training, and another set for longer sequences.
`dynamic` lowers the frequencies with each token beyond the trained context. In a pass over several sequences, or in a
growing conversation, the log-probability of a token then differs from its value in a pass over its sequence alone. Up
to a certain length, called the steady length, embeddings do not change. Perturn therefore limits sequences to this
length.
"""

from __future__ import annotations

from typing import Any


def steady_length(config: Any) -> int | None:
    """Return the steady length of a model in tokens; None: its position embeddings never depend on the length.

    Args:
        config: Config of a transformers model.
    """
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer = [each for each in (rope, *rope.values()) if isinstance(each, dict) and "rope_type" in each]
    limits = (_steady_length(each, config) for each in by_layer)
    return min((limit for limit in limits if limit is not None), default=None)


def _steady_length(rope: dict[str, Any], config: Any) -> int | None:
    if "dynamic" in rope["rope_type"]:
        return int(config.max_position_embeddings)
    alike = all(rope.get(f"short_{name}") == rope.get(f"long_{name}") for name in ("factor", "mscale"))
    if rope["rope_type"] == "longrope" and not alike:
        return int(rope["original_max_position_embeddings"])
    return None


def usable_length(config: Any) -> int | None:
    """Return the smaller of a model's context length and steady length, in tokens; None: no limit.

    Args:
        config: Config of a transformers model.
    """
    made_for = getattr(config.get_text_config(), "max_position_embeddings", None)
    limits = (made_for, steady_length(config))
    return min((int(limit) for limit in limits if limit), default=None)


def window(config: Any) -> int | None:
    """Return the size of a model's sliding attention window, in tokens; None if no layer has a window.

    Args:
        config: Config of a transformers model.
    """
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    if kinds is None and not getattr(config, "use_sliding_window", True):
        return None
    found: int | None = getattr(config, "sliding_window", None)
    return found


def trainable_length(config: Any) -> int | None:
    """Return the longest sequence in tokens whose packed computation equals the plain computation; None: no limit.

    Args:
        config: Config of a transformers model.
    """
    limits = (limit for limit in (window(config), usable_length(config)) if limit is not None)
    return min(limits, default=None)


def too_long(config: Any) -> str:
    """Return the end of an error message: why a model is not used beyond its steady length, and the remedy.

    Args:
        config: Config of a transformers model that has a steady length.
    """
    config = config.get_text_config()
    limit, remedy = steady_length(config), "or take another model"
    if limit != config.max_position_embeddings:
        remedy = "or give short_factor (and short_mscale) in its config.json the values of long_factor (long_mscale)"
    return (
        f"beyond {limit} tokens {config.model_type} encodes all positions of a pass by its longest sequence. Neither "
        f"packed sequences nor a conversation's turns would agree with a sequence alone. "
        f"Set max_length to {limit} or less, {remedy}."
    )
