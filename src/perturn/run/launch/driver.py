"""The driver of a training in several processes: it starts torchrun and follows the files that the processes write."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from perturn.config.parsing import to_yaml
from perturn.config.stages import Stage
from perturn.data.run_folder import Run
from perturn.display.progress_bars import Work, at_work
from perturn.errors import ConfigError, DataError, ModelError, PerturnError, RunError, StorageError
from perturn.io.atomic_write import write_whole, writing
from perturn.run.interrupts import Stopping
from perturn.run.launch.launch_files import LaunchFiles
from perturn.train_processes import DRIVER

_KINDS = {each.__name__: each for each in (ConfigError, DataError, ModelError, RunError, StorageError)}
"""Errors that the driver raises as a process reported them, by name. Any other error becomes a `RunError`."""
FREED = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
"""Environment variable with which glibc releases the memory of a layer that was gathered on a CPU. Without it, glibc
keeps freed blocks, up to the size of the whole model."""
_KILLED = re.compile(r"Root Cause.*?rank +: (\d+) .*?\((SIG[A-Z]+)\)", re.DOTALL)
"""Pattern of torchrun's report on the first failed process, if a signal has ended it."""
_PAUSE = 0.2
"""Seconds between two checks of the processes and their files."""
_TAIL = 12
"""Number of log lines that an error quotes, if no process has reported the fault."""


def train_in_processes(run: Run, stage: Stage) -> dict[str, Any]:
    """Train a policy in several processes (the setting `launch`), and return the counts of the training data.

    The processes read the files of the run and write the policy. They end when this process ends, for any reason.

    Raises:
        PerturnError: If a process failed: its own error, or a `RunError` if it was killed.
        KeyboardInterrupt: After Ctrl-C, once the processes have written a checkpoint.
    """
    files = LaunchFiles(run.paths.launch(stage.policy))
    shutil.rmtree(files.folder, ignore_errors=True)
    with writing(files.folder):
        files.folder.mkdir(parents=True)
    write_whole(files.recipe, to_yaml(run.recipe))
    with _started(run, stage, files) as torchrun, at_work(f"training {stage.policy}") as shown:
        run.follow(lambda: shown.seconds_left)
        with Stopping(lambda notice: setattr(shown, "what", notice)) as stopping:
            metrics = _Lines(run.paths.metrics(stage.name))
            while torchrun.poll() is None:
                time.sleep(_PAUSE)
                if stopping.asked:
                    files.stop.touch()
                _follow(run, shown, files, metrics)
            counts = _result(run, files, torchrun.returncode, stopping.asked)
        shown.total = None  # the stage prints its own line
    return counts


@contextmanager
def _started(run: Run, stage: Stage, files: LaunchFiles) -> Iterator[subprocess.Popen[bytes]]:
    """Start torchrun in a session that Ctrl-C does not reach, and kill all its processes at the end."""
    processes = run.recipe.launch.processes
    command = _command(processes, files, stage)
    threads = str(max(1, torch.get_num_threads() // processes))
    memory = FREED if run.recipe.launch.sharding == "fsdp2" else {}
    environment = {"OMP_NUM_THREADS": threads, **memory, **os.environ, DRIVER: str(os.getpid())}
    with files.log.open("wb") as log:
        torchrun = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    try:
        yield torchrun
    finally:
        with suppress(psutil.NoSuchProcess):
            for each in psutil.Process(torchrun.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        torchrun.kill()
        torchrun.wait()


def _command(processes: int, files: LaunchFiles, stage: Stage) -> list[str]:
    """Return the command that starts torchrun. Its own files go to the folder of the launch."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={processes}", "--max-restarts=0", f"--log-dir={files.folder}"]
    return [*command, "-m", "perturn.run.launch.training_process", str(files.folder), stage.name]


class _Lines:
    """Counts the lines of a growing file; each count reads only what is new."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lines = self._bytes = 0

    def count(self) -> int:
        """Return the number of lines. A file that has become shorter is counted anew."""
        with self.file.open("rb") as stream:
            if stream.seek(0, os.SEEK_END) < self._bytes:
                self._lines = self._bytes = 0
            stream.seek(self._bytes)
            new = stream.read()
        self._lines += new.count(b"\n")
        self._bytes += len(new)
        return self._lines


def _follow(run: Run, shown: Work, files: LaunchFiles, metrics: _Lines) -> None:
    """Show the number of finished steps, once the processes have reported the total."""
    with suppress(FileNotFoundError):
        done = metrics.count()
        if shown.total is None:
            steps = json.loads(files.steps.read_text())
            shown.expect(steps["total"], steps["done"], "steps")
            run.expect(metrics.file, steps["total"], steps["done"], "steps")
        shown.done = done


def _result(run: Run, files: LaunchFiles, code: int, asked: bool) -> dict[str, Any]:
    """Return the counts of the training data; empty if the processes were asked to stop.

    Raises:
        PerturnError: If a process failed, or was stopped by a signal that this process did not get.
    """
    again = f"the same command goes on from the last checkpoint. Their log: {files.log}"
    if code == 0:
        with suppress(FileNotFoundError):
            counts: dict[str, Any] = json.loads(files.counts.read_text())
            return counts
        if asked:
            return {}
        raise RunError(f"a signal stopped a training process, so all of them stopped; {again}")
    log = files.log.read_text(encoding="utf-8", errors="replace")
    killed = _KILLED.search(log)
    with suppress(FileNotFoundError):
        error = json.loads(files.error.read_text())
        kind: type[PerturnError] | None = _KINDS.get(error["kind"])
        if kind is not None:
            raise kind(error["message"])
        if killed is None:  # else the others failed since they waited for the killed process
            raise RunError(
                f"a training process failed: {error['kind']}: {error['message']} Once that is mended, {again}"
            )
    several = run.recipe.launch.processes
    which = (
        f"one of the {several} training processes was killed"
        if killed is None
        else f"training process {killed[1]} (of 0 to {several - 1}) was killed by {killed[2]}"
    )
    raise RunError(
        f"{which}, perhaps for memory; {again}, which ends with: {' / '.join(log.splitlines()[-_TAIL:])}"
    )
