"""Rotary position encodings that depend on how long the longest sequence of a pass is.

`longrope` (Phi-3-128k, Phi-4-mini) turns by one set of factors up to the length that the model was first trained on,
and by another beyond it; `dynamic` turns slower with each token beyond the trained context. In a pass over several
sequences, or over the turns of a growing conversation, a token then gets another log-probability than in its sequence
alone. Up to that length nothing depends on it, so that is as far as we go.
"""

from __future__ import annotations

from typing import Any


def steady_length(config: Any) -> int | None:
    """Return tokens up to which a sequence's length does not change how its positions are encoded; None: it never does.

    Args:
        config: Of a transformers model.
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
    """Return the longest sequence that a model was made for and whose length changes nothing, in tokens; None: any.

    Args:
        config: Of a transformers model.
    """
    made_for = getattr(config.get_text_config(), "max_position_embeddings", None)
    limits = (made_for, steady_length(config))
    return min((int(limit) for limit in limits if limit), default=None)


def too_long(config: Any) -> str:
    """Return why a model is not used beyond its steady length, and the remedy: the end of a sentence.

    Args:
        config: Of a transformers model that has a steady length.
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
