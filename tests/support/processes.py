"""Run `perturn` or a script in processes that start quickly, because their parent has imported the libraries.

Importing torch and transformers takes longer than a small run. A child is a complete `perturn` with its own session,
working directory, environment and output. Children share only the imported modules.
"""

import functools
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

from .budget import uncharged

_IMPORTED = [
    "perturn.cli",
    "perturn.run.execute",
    "perturn.run.stages.train_stage",
    "perturn.engines.local.engine",
    "perturn.report.report_page",
    "accelerate",
    "support.preloaded",
]


class Started:
    """A started `perturn`, with the part of `subprocess.Popen` that tests use."""

    def __init__(
        self, words: Sequence[str], cwd: Path, environment: Mapping[str, str], program: str = "perturn"
    ) -> None:
        """Start `program`, which is `perturn` or a Python file, with the arguments `words`."""
        self._files = Path(tempfile.mkdtemp(prefix="perturn-", dir=cwd))
        self._process = _server().Process(
            target=_run, args=(program, [*words], str(cwd), dict(environment), str(self._files))
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """Id of the process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process, and return its exit code."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("perturn", timeout or 0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the process, and return standard output and standard error."""
        self.wait(timeout)
        output, error = ((self._files / name).read_text() for name in ("out", "err"))
        return output, error

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


@functools.cache
def _server() -> ForkServerContext:
    """Return the fork server, after it has imported the modules of a run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *_IMPORTED])
    with uncharged():
        first = context.Process(target=_nothing)
        first.start()
        first.join()
    return context


def _nothing() -> None:
    """End as soon as the modules of a run are imported."""


def _run(program: str, words: list[str], cwd: str, environment: dict[str, str], files: str) -> None:
    """Run a program in this process, with standard output and standard error in files."""
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, "out"), (2, "err")):
        with open(Path(files, name), "w") as file:
            os.dup2(file.fileno(), number)
    importlib.import_module("torch").set_num_threads(1)
    sys.argv = [program, *words]
    if program == "perturn":
        importlib.import_module("perturn.cli").main()
    else:
        runpy.run_path(program, run_name="__main__")
