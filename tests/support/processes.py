"""`perturn`, or a script, as processes that start quickly. Their parent has already imported the libraries of a run.

Importing torch and transformers takes longer than a small run. A child is a whole `perturn` with its own session,
working directory, environment and output. Children share nothing but what was imported.
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
    """A `perturn` that was started; the part of `subprocess.Popen` that tests use."""

    def __init__(
        self, words: Sequence[str], cwd: Path, environment: Mapping[str, str], program: str = "perturn"
    ) -> None:
        """Start `program` with the arguments `words`; it is `perturn`, or a Python file."""
        self._files = Path(tempfile.mkdtemp(prefix="perturn-", dir=cwd))
        self._process = _server().Process(
            target=_run, args=(program, [*words], str(cwd), dict(environment), str(self._files))
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """Number of the process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once it has ended."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("perturn", timeout or 0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return standard output and standard error once it has ended."""
        self.wait(timeout)
        output, error = ((self._files / name).read_text() for name in ("out", "err"))
        return output, error

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


@functools.cache
def _server() -> ForkServerContext:
    """The process that forks, once it has imported what a run needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *_IMPORTED])
    with uncharged():
        first = context.Process(target=_nothing)
        first.start()
        first.join()
    return context


def _nothing() -> None:
    """End as soon as what a run needs is imported."""


def _run(program: str, words: list[str], cwd: str, environment: dict[str, str], files: str) -> None:
    """Be a program, with standard output and standard error in files."""
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
