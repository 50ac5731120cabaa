"""Stop a training whose loss or gradient is no finite number, since its weights are lost."""

from __future__ import annotations

import math
from collections.abc import Mapping

from perturn.errors import RunError

_WATCHED = {"loss": "loss", "train_loss": "mean loss", "grad_norm": "gradient's norm"}
"""Metric -> its name in words."""


def refuse_not_finite(logs: Mapping[str, float], step: int, *, scaled: bool = False) -> None:
    """Check the logged metrics of a training.

    Args:
        logs: Metrics by name.
        step: Number of optimizer steps so far.
        scaled: Whether the loss is scaled, as with fp16. Steps whose gradient then overflows are skipped, so the norm
            of the gradient is not checked.

    Raises:
        RunError: If the loss or the norm of the gradient is not finite.
    """
    for key, what in _WATCHED.items():
        if not math.isfinite(logs.get(key, 0.0)) and not (scaled and key == "grad_norm"):
            first = "no update came before, so check the model, its dtype, and your own loss or credit."
            remedy = "lower the learning rate." if step > 1 else first
            raise RunError(f"the {what} is {logs[key]} at step {step}; {remedy}")
