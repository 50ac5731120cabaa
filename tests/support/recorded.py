"""Expensive folders that are made once for all workers of a session, and copied by the tests that use them."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from .budget import uncharged


class Recordings:
    """Recordings of a test session, in one folder for all workers."""

    def __init__(self, base: Path) -> None:
        """Use the folder `base`, which holds the temporary files of this worker."""
        self._folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "recorded"
        self._folder.mkdir(exist_ok=True)

    def __call__(self, make: Callable[[Path], object], *key: object) -> Path:
        """Return the folder that `make` filled, which tests must not change.

        Args:
            make: Function that fills an empty folder. Only one worker calls it, and its time is charged to no test.
            key: Everything that affects the output of `make`, such as its name, the recipe and the overrides.
        """
        name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        made, complete = self._folder / name, self._folder / f"{name}.complete"
        with uncharged(), FileLock(self._folder / f"{name}.lock"):
            if not complete.exists():
                shutil.rmtree(made, ignore_errors=True)  # left by a failed `make`
                made.mkdir()
                make(made)
                complete.touch()
        return made

    def copy(self, to: Path, make: Callable[[Path], object], *key: object) -> Path:
        """Copy a recording to a path, so that a test can change or damage it."""
        return Path(shutil.copytree(self(make, *key), to))
