"""Folders that are expensive to make, made once for all workers of a session and copied by the tests that use them."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from .budget import uncharged


class Recordings:
    """The recordings of a session of tests, in one folder for all its workers."""

    def __init__(self, base: Path) -> None:
        """`base` is the folder for temporary files of this worker."""
        self._folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "recorded"
        self._folder.mkdir(exist_ok=True)

    def __call__(self, make: Callable[[Path], object], *key: object) -> Path:
        """Return the folder that `make` filled; nobody may change what is in it.

        Args:
            make: Fills the empty folder it is called with. Called by one worker, and not charged to the test that asks.
            key: All that decides what `make` writes, such as its name, the recipe and the overrides.
        """
        name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        made, complete = self._folder / name, self._folder / f"{name}.complete"
        with uncharged(), FileLock(self._folder / f"{name}.lock"):
            if not complete.exists():
                shutil.rmtree(made, ignore_errors=True)  # left by a `make` that failed
                made.mkdir()
                make(made)
                complete.touch()
        return made

    def copy(self, to: Path, make: Callable[[Path], object], *key: object) -> Path:
        """Return a copy of a recording at a path, to change or to damage."""
        return Path(shutil.copytree(self(make, *key), to))
