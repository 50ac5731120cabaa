"""Low-rank adapters on a model."""

from __future__ import annotations

from typing import Any

import torch

from perturn.errors import ConfigError


def add_adapters(model: Any, peft_config: Any, seed: int) -> Any:
    """Wrap the model; equal seeds give equal adapters.

    Args:
        model: A causal language model; it may have no weights (`policy.models.empty_model`).
        peft_config: What peft adds.
        seed: Of the adapters' first weights.

    Raises:
        ConfigError: If peft is missing, cannot add them, a module that is to have one is not there, or the output layer
            gets one.
    """
    try:
        from peft import get_peft_model
    except ImportError as error:
        raise ConfigError('peft_config needs peft; run: pip install "perturn[lora]"') from error
    wanted = getattr(peft_config, "target_modules", None)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            adapted = get_peft_model(model, peft_config)
    except Exception as error:  # peft is code of others, as are the models it looks through
        reason = " ".join(str(error).split())
        raise ConfigError(f"adapters cannot be added: {type(error).__name__}: {reason}") from error
    if isinstance(wanted, list | tuple | set):
        _refuse_unmatched(wanted, adapted)
    if hasattr(adapted.get_output_embeddings(), "base_layer"):
        raise ConfigError(
            "the output layer gets an adapter, which packed training would pass over; take it out of target_modules, "
            "or train all of it with modules_to_save."
        )
    return adapted


def _refuse_unmatched(wanted: list[str] | tuple[str, ...] | set[str], adapted: Any) -> None:
    """Refuse names that no module has; peft passes over them where another one matches."""
    found = adapted.targeted_module_names
    missing = [name for name in wanted if not any(f".{each}".endswith(f".{name}") for each in found)]
    if missing:
        known = sorted({each.rpartition(".")[2] for each in found})
        raise ConfigError(
            f"target_modules names {', '.join(map(repr, sorted(missing)))}, which the model does not have; adapters "
            f"were added to {', '.join(known)} alone."
        )
