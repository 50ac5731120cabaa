"""Folders of adapters as peft writes them, read without peft and without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of a folder of adapters."""
_OTHER = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "monteclora_config",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "use_rslora",
    "velora_config",
)
"""Settings of peft with which adapters are no longer a product of two matrices for each linear layer."""
_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` with which peft does not change the base weights; PiSSA changes them."""


@dataclass(frozen=True)
class LowRank:
    """Adapters that add a product of two matrices, times one number, to the weights of linear layers."""

    rank: int
    scale: float


def adapter_config(folder: Path) -> dict[str, Any]:
    """Return the settings of a folder of adapters.

    Raises:
        ValueError: If the file cannot be read.
    """
    found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"expected an object, got {found!r:.80}")
    return found


def low_rank(folder: Path) -> LowRank | None:
    """Return rank and scale of the adapters in a folder; None if they do more than add one product."""
    config = adapter_config(folder)
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        return None
    if config.get("init_lora_weights", True) not in _STARTS or any(config.get(name) for name in _OTHER):
        return None
    return LowRank(int(config["r"]), config["lora_alpha"] / config["r"])
