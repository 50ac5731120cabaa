"""Run the command `perturn` in a separate process, and find the processes that it has started."""

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
"""Environment variable that marks all processes started by a command."""
_PARENT_DEATH = 1
"""Option of `prctl` for the signal that a process gets when its parent ends."""
_GONE = 60.0
"""Time in which the processes of a killed run must end, in seconds."""


class Command:
    """The command `perturn` in a separate process."""

    def __init__(
        self, context: ForkServerContext, words: list[str], place: Path, trial: str, pause: float
    ) -> None:
        """Start the command in a folder."""
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
        """Return the exit code of the command; None if it has not ended after this number of seconds."""
        self._process.join(seconds)
        return self._process.exitcode

    def left(self) -> list[int]:
        """Return the ids of processes that the command has started and that have not ended."""
        found = []
        for process in psutil.process_iter(["status"]):
            with suppress(psutil.Error):
                known = process.environ().get(_MARK) == self.trial and process.pid != self.driver.pid
                if known and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    def orphans(self) -> list[int]:
        """Return the ids of processes that remain after the command has ended and their time is over."""
        until = time.monotonic() + _GONE
        while (found := self.left()) and time.monotonic() < until:
            time.sleep(0.1)
        return found


def temporary_of(place: Path, trial: str) -> Path:
    """Return the folder of a trial's temporary files. Its path is short, because Ray's sockets are in it."""
    return place / "t" / f"{crc32(trial.encode()):08x}"


def _perturn(words: list[str], place: str, variables: dict[str, str], log: str) -> None:
    """Run `perturn` in this process."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGKILL)  # ends with the benchmark
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
        atexit._run_exitfuncs()  # a child process of multiprocessing skips these
