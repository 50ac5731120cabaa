"""The section `backend:` of a recipe with `name: local`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from perturn.backends.protocol import PROVIDED, BackendTraits, Training
from perturn.config.sections import Train
from perturn.table import locate, require_library


@dataclass(frozen=True)
class LocalBackend:
    """Training with PyTorch, in this process or in the processes of `accelerate launch`."""

    traits: ClassVar[BackendTraits] = BackendTraits(provides=frozenset(PROVIDED))

    def check(self, trainings: Mapping[str, Train], model: str, goes_on: bool) -> None:
        """Check that the package peft is installed if a training uses adapters."""
        for name, settings in trainings.items():
            if settings.lora:
                require_library("peft", f"{name}.lora", "lora")

    def open(self, model: str) -> Training:
        """Return the backend; nothing is loaded yet."""
        opened: Training = locate("perturn.backends.local_training:LocalTraining")()
        return opened
