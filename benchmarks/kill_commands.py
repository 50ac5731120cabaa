"""The command `perturn` in a process of its own, and the processes that it has started."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from zlib import crc32

import kill_endpoint
import psutil

_MARK = "KILLS_TRIAL"
"""Variable by which the processes that a command has started are found again."""
_PARENT_DEATH = 1
"""Of `prctl`: the signal that a process gets when its parent ends."""
_GONE = 60.0
"""Seconds in which the processes of a killed run have to end."""


class Command:
    """`perturn` in a process of its own."""

    def __init__(
        self, context: ForkServerContext, words: list[str], place: Path, trial: str, pause: float
    ) -> None:
        """Start it in a folder."""
        self.log, self.trial = place / "logs" / f"{trial}.txt", trial
        temporary = temporary_of(place, trial)
        temporary.mkdir(parents=True, exist_ok=True)
        variables = {
            **os.environ,
            "PERTURN_CACHE": str(place / "caches" / trial),
            "TMPDIR": str(temporary),
            "TALK_PAUSE": str(pause),
            "OMP_NUM_THREADS": "1",
            "PERTURN_API_KEY": kill_endpoint.KEY,
            _MARK: trial,
        }
        self._process: BaseProcess = context.Process(
            target=_perturn, args=(words, str(place), variables, str(self.log))
        )
        self._process.start()
        self.driver = psutil.Process(self._process.pid)

    def wait(self, seconds: float) -> int | None:
        """Return its exit code once it has ended; None if it has not after so many seconds."""
        self._process.join(seconds)
        return self._process.exitcode

    def left(self) -> list[int]:
        """Processes that it has started and that have not ended."""
        found = []
        for process in psutil.process_iter(["status"]):
            with suppress(psutil.Error):
                known = process.environ().get(_MARK) == self.trial and process.pid != self.driver.pid
                if known and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    def orphans(self) -> list[int]:
        """Processes that it has left, once it has ended and they had their time."""
        until = time.monotonic() + _GONE
        while (found := self.left()) and time.monotonic() < until:
            time.sleep(0.1)
        return found


def temporary_of(place: Path, trial: str) -> Path:
    """The folder for temporary files of a trial; a short one, since Ray's sockets lie in it."""
    return place / "t" / f"{crc32(trial.encode()):08x}"


def _perturn(words: list[str], place: str, variables: dict[str, str], log: str) -> None:
    """Be `perturn`."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGKILL)  # it ends with the benchmark
    os.chdir(place)
    os.environ.clear()
    os.environ.update(variables)
    import tempfile

    tempfile.tempdir = None
    with open(log, "a") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    importlib.import_module("torch").set_num_threads(1)
    sys.path.insert(0, place)
    sys.argv = ["perturn", *words]
    try:
        importlib.import_module("perturn.cli").main()
    finally:
        atexit._run_exitfuncs()  # which a child of multiprocessing leaves out
