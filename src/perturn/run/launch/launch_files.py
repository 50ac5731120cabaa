"""The files through which a driver and its training processes communicate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LaunchFiles:
    """Paths of the files of one launch."""

    folder: Path

    @property
    def recipe(self) -> Path:
        """The recipe with the overrides of the command."""
        return self.folder / "launched.yaml"

    @property
    def log(self) -> Path:
        """The output of torchrun and of the processes."""
        return self.folder / "log.txt"

    @property
    def stop(self) -> Path:
        """Empty file. The driver creates it to ask the processes to save a checkpoint and stop."""
        return self.folder / "stop"

    @property
    def steps(self) -> Path:
        """Total number of optimizer steps, and number of steps done before."""
        return self.folder / "steps.json"

    @property
    def counts(self) -> Path:
        """Counts of the training data. The file exists once the policy is saved."""
        return self.folder / "counts.json"

    @property
    def error(self) -> Path:
        """The first error of a process: its class and its message."""
        return self.folder / "error.json"
