"""Interfaces of training backends: the settings, which check and open a backend, and the open backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from perturn.config.sections import Lora, Train

PROVIDED = {
    "all-weights": "training of all weights; set its section `lora` to train adapters",
    "models": "a model in this process",
    "token-inputs": "numbers of whole distributions, such as the entropy",
}
"""Abilities that a backend may have, each with its description."""


@dataclass(frozen=True)
class BackendTraits:
    """Traits of a backend, in the attribute `traits` of its settings."""

    provides: frozenset[str] = frozenset()
    """Names from `PROVIDED`. Every backend also computes token log-probabilities, and steps along their gradient."""
    stores: str = "files"
    """Format of stored policies: `files` of weights, or another format that an engine names as `EngineTraits.reads`."""
    distributions: tuple[str, ...] = ()
    """Packages on which training depends; the run's manifest records their versions."""


class Backend(Protocol):
    """A frozen dataclass: the section `backend:` of a recipe."""

    @property
    def traits(self) -> BackendTraits:
        """Traits of the backend; a class attribute if the traits do not depend on the settings."""

    def check(self, trainings: Mapping[str, Train], model: str, goes_on: bool) -> None:
        """Check, before the run starts, whether the trainings are possible; nothing in the run is changed.

        Args:
            trainings: Settings of each training, by the name of its section.
            model: The setting `model.name`.
            goes_on: Whether each iteration continues the optimizer of the previous iteration.

        Raises:
            PerturnError: If a training is not possible; the message gives the reason.
        """

    def open(self, model: str) -> Training:
        """Open the backend for all trainings of a run.

        Args:
            model: The setting `model.name`.

        Raises:
            PerturnError: If the backend cannot be opened.
        """


class Training(Protocol):
    """An open backend."""

    def begin(
        self, start: str, texts: Sequence[str], seed: int, lora: Lora | None, resumes: bool
    ) -> tuple[Any, Any]:
        """Return the model with which a training starts, and its tokenizer.

        Args:
            start: Name or folder of the policy from which training starts.
            texts: Texts that the tokenizer must be able to read; a word tokenizer gets new tokens for them.
            seed: Seed of random choices.
            lora: Settings of the adapters to train; None: train all weights.
            resumes: Whether training continues the optimizer of this policy.
        """

    def trainer(self, model: Any, reference: str | None, lora: Lora | None, **settings: Any) -> Any:
        """Return the `TurnTrainer` for a model from `begin`.

        Args:
            model: The model.
            reference: Name or folder of the reference; None: the model in its current state.
            lora: Settings of the adapters to train; None: train all weights.
            settings: Other arguments of `TurnTrainer`.
        """

    def save(self, trainer: Any, target: Path, with_optimizer: bool, merged: bool) -> None:
        """Save the trained policy as a folder, written atomically.

        Args:
            trainer: Result of `trainer`.
            target: Folder to write.
            with_optimizer: Whether to save the optimizer in the same folder.
            merged: Whether to merge adapters into the weights. Otherwise adapters are saved without their base model.
        """

    def keep(
        self, start: str, target: Path, lora: Lora | None, optimizer: Sequence[Path], merged: bool
    ) -> None:
        """Save the starting policy unchanged as the result of a training that has no rows.

        Args:
            start: Name or folder of the starting policy.
            target: Folder to write.
            lora: Settings of the adapters that would have been trained; None: all weights.
            optimizer: Files of the starting policy's optimizer, which are copied to the folder.
            merged: As in `save`.
        """

    def close(self) -> None:
        """Release all resources of the backend."""
