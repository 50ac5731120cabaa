"""Checkpoints of the trainer on a disk that may be full or damaged, as errors for the user."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perturn.errors import ModelError, PerturnError
from perturn.io.writing import writing


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Write a checkpoint in the block; what a full disk leaves of it is removed, which makes room again.

    Raises:
        StorageError: If it cannot be written. torch, safetensors and tokenizers have errors of their own for that.
    """
    with writing(folder, foreign=(Exception,)):
        try:
            yield
        except Exception:
            shutil.rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def resuming(checkpoint: str | None) -> Iterator[None]:
    """Read a checkpoint in the block.

    Raises:
        ModelError: If it is damaged, which the libraries that read it say in many ways.
    """
    try:
        yield
    except PerturnError:
        raise
    except Exception as error:
        raise ModelError(
            f"checkpoint {checkpoint!r} cannot be read: {type(error).__name__}: {error} Remove that folder; training "
            "then goes on from an earlier one, or begins anew."
        ) from error
