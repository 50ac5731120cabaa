"""The files by which a driver and its training processes speak with each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LaunchFiles:
    """Files of one launch."""

    folder: Path

    @property
    def recipe(self) -> Path:
        """The recipe, with the settings that this command was given."""
        return self.folder / "launched.yaml"

    @property
    def log(self) -> Path:
        """The output of torchrun and of the processes."""
        return self.folder / "log.txt"

    @property
    def stop(self) -> Path:
        """There once the driver asks for a checkpoint and the end."""
        return self.folder / "stop"

    @property
    def steps(self) -> Path:
        """Optimizer steps in total, and the steps that were done before."""
        return self.folder / "steps.json"

    @property
    def counts(self) -> Path:
        """Counts of the training data; there once the policy is saved."""
        return self.folder / "counts.json"

    @property
    def error(self) -> Path:
        """The first error of a process: its kind and its message."""
        return self.folder / "error.json"
