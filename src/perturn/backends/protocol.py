"""An entry of `BACKENDS`: settings that say where policies are trained, check that before work, and open it."""

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
"""Things that a backend may provide, each with its description."""


@dataclass(frozen=True)
class BackendTraits:
    """Traits of a backend, in the attribute `traits` of its settings."""

    provides: frozenset[str] = frozenset()
    """Names from `PROVIDED` that the backend has, besides log-probabilities of tokens and steps by their gradient."""
    stores: str = "files"
    """The form in which it keeps policies: `files` of weights, or a form that an engine has as `EngineTraits.reads`."""
    distributions: tuple[str, ...] = ()
    """Installed packages that training depends on; the run's manifest keeps their versions."""


class Backend(Protocol):
    """A frozen dataclass: the section `backend:` of a recipe."""

    @property
    def traits(self) -> BackendTraits:
        """Traits of the backend; a class attribute if they do not depend on the settings."""

    def check(self, trainings: Mapping[str, Train], model: str, goes_on: bool) -> None:
        """Find out before work whether the trainings could be done; nothing of the run is changed.

        Args:
            trainings: Settings of each training, by the name of its section.
            model: The setting `model.name`.
            goes_on: Whether the next iteration continues with the optimizer of the last one.

        Raises:
            PerturnError: With the fault.
        """

    def open(self, model: str) -> Training:
        """Open it, for all trainings of a run.

        Args:
            model: The setting `model.name`.

        Raises:
            PerturnError: If it cannot be opened.
        """


class Training(Protocol):
    """An open backend."""

    def begin(
        self, start: str, told: Sequence[str], seed: int, lora: Lora | None, resumes: bool
    ) -> tuple[Any, Any]:
        """Return the model that a training begins with, and its tokenizer.

        Args:
            start: Name or folder of the policy that it starts from.
            told: Texts that the tokenizer must have tokens for.
            seed: Of the random choices.
            lora: Adapters to train; None: all weights.
            resumes: Whether the optimizer of that policy continues.
        """

    def trainer(self, model: Any, reference: str | None, lora: Lora | None, **settings: Any) -> Any:
        """Return the `TurnTrainer` of a model from `begin`.

        Args:
            model: The model.
            reference: Name or folder of the reference; None: the model in its current state.
            lora: Adapters to train; None: all weights.
            settings: Further arguments of `TurnTrainer`.
        """

    def save(self, trainer: Any, target: Path, with_optimizer: bool, merged: bool) -> None:
        """Keep the trained policy as a folder, written whole or not at all.

        Args:
            trainer: From `trainer`.
            target: The folder.
            with_optimizer: Whether the optimizer is kept next to it.
            merged: Whether adapters are merged into the weights. Otherwise they are kept alone, and name a whole model.
        """

    def keep(
        self, start: str, target: Path, lora: Lora | None, optimizer: Sequence[Path], merged: bool
    ) -> None:
        """Keep the policy that a training without rows was to start from, as the policy that it makes.

        Args:
            start: Name or folder of the policy.
            target: Folder of the policy that the training would have made.
            lora: Adapters that were to be trained.
            optimizer: Files of the optimizer of the policy, to be kept next to it.
            merged: As in `save`.
        """

    def close(self) -> None:
        """Release what is held."""
