"""One of several processes that train a policy together. torchrun starts this module with `python -m`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import psutil

from perturn.config.recipe import read_recipe
from perturn.config.stages import stages
from perturn.data.run_folder import Run
from perturn.display.progress_bars import console
from perturn.errors import PerturnError
from perturn.io.atomic_write import write_whole
from perturn.io.plain_data import error_text
from perturn.run.launch.launch_files import LaunchFiles
from perturn.run.session import Session
from perturn.run.stages.train_stage import train_rows
from perturn.train_processes import DRIVER, leader_first, leads, leave

_PAUSE = 0.5
"""Seconds between two checks that the driver is alive."""


def main(folder: Path, name: str) -> None:
    """Train the policy of a stage together with the other processes."""
    _end_with_the_driver()
    files = LaunchFiles(folder)
    console.quiet = not leads()
    try:
        recipe = read_recipe(files.recipe)
        stage = next(each for each in stages(recipe) if each.name == name)
        with leader_first():  # from here on, the processes can communicate
            pass
        with Run(recipe) as run, Session(run) as session:
            counts = train_rows(session, stage, lambda **steps: _say(files.steps, steps), files.stop.exists)
    except KeyboardInterrupt:  # the driver asked for it, and a checkpoint is written
        return
    except Exception as error:  # noqa: BLE001  the driver raises it
        if not files.error.exists():
            message = str(error) if isinstance(error, PerturnError) else error_text(error)
            write_whole(files.error, json.dumps({"kind": type(error).__name__, "message": message}) + "\n")
        traceback.print_exc()
        leave(1)
    _say(files.counts, counts)


def _say(file: Path, facts: dict[str, int]) -> None:
    """Write facts for the driver, in the first process only."""
    if leads():
        write_whole(file, json.dumps(facts) + "\n")


def _end_with_the_driver() -> None:
    """Start a thread that kills this process when the driver or torchrun ends, even if it waits for other processes."""
    torchrun, driver = os.getppid(), int(os.environ[DRIVER])

    def watch() -> None:
        while is_driven(torchrun, driver):
            time.sleep(_PAUSE)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="driver watch", daemon=True).start()


def is_driven(torchrun: int, driver: int) -> bool:
    """Return whether torchrun is still this process's parent and the driver is torchrun's.

    A process gets another parent when its parent ends. The time at which the driver began would change with the clock.
    """
    try:
        return os.getppid() == torchrun and psutil.Process(torchrun).ppid() == driver
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    leave()
