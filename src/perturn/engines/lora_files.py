"""Reading of adapter folders in the format of peft, without importing peft or torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Names of the two files in an adapter folder."""
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
"""Settings of peft that make an adapter something other than one product of two matrices per linear layer."""
_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base weights unchanged; PiSSA, for example, changes them."""


@dataclass(frozen=True)
class LowRank:
    """Adapters that add `scale` times a product of two matrices of rank `rank` to the weights of linear layers."""

    rank: int
    scale: float


def adapter_config(folder: Path) -> dict[str, Any]:
    """Return the peft settings of an adapter folder.

    Raises:
        ValueError: If the settings file is not a JSON object.
    """
    found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"expected an object, got {found!r:.80}")
    return found


def low_rank(folder: Path) -> LowRank | None:
    """Return rank and scale of the adapters in a folder; None if they are not plain LoRA."""
    config = adapter_config(folder)
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        return None
    if config.get("init_lora_weights", True) not in _STARTS or any(config.get(name) for name in _OTHER):
        return None
    return LowRank(int(config["r"]), config["lora_alpha"] / config["r"])
