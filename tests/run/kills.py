"""Kill a run at random moments, start it again until it ends, and compare it with one that nothing interrupted.

Importing torch and transformers takes longer than a small run. So a process that has imported them forks a child for
each start; the child is a whole `perturn run` that shares nothing with the others but what was imported.
"""

import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

IMPORTED = (
    "perturn.cli",
    "perturn.run.loop",
    "perturn.run.train",
    "perturn.engines.local.engine",
    "accelerate",
)


class Forks:
    """`perturn` as children of a process that has imported all it needs; one at a time."""

    def __init__(self, place):
        """Children work in the folder `place`."""
        self.place = place
        self._parent = subprocess.Popen(
            [sys.executable, __file__],
            cwd=place,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._hear() == "ready"

    def run(self, name, *words, kill_after=None, kill_at=None):
        """Do `perturn run` of the words under a name; its seconds, and whether it was killed before it ended.

        It is killed after so many seconds, or as soon as it has a file, by its path in the run.
        """
        kills = kill_after is not None or kill_at is not None
        asked = {
            "argv": ["perturn", "run", *words, f"name={name}"],
            "cache": str(self.place / "caches" / name),
        }
        asked |= {"output": str(self.place / f"{name}.txt"), "kills": kills}
        self._parent.stdin.write(json.dumps(asked) + "\n")
        self._parent.stdin.flush()
        child, began = int(self._hear()), time.monotonic()
        if kills:
            while kill_at is not None and not (self.place / "runs" / name / kill_at).exists():
                time.sleep(0.02)
            time.sleep(kill_after or 0)
            os.kill(
                child, signal.SIGKILL
            )  # its parent reaps it after the next line, so the number is its own
            self._parent.stdin.write("\n")
            self._parent.stdin.flush()
        status = int(self._hear())
        assert status in (0, -signal.SIGKILL), Path(asked["output"]).read_text()
        return time.monotonic() - began, status != 0

    def _hear(self):
        return self._parent.stdout.readline().strip()

    def close(self):
        """End the parent."""
        self._parent.stdin.close()
        self._parent.wait()
        self._parent.stdout.close()


def kill_at_random(forks, whole, words, kills, seed=0):
    """Kill `kills` runs once each, one in each part of the time that the uninterrupted run `whole` takes.

    A run that ends before its moment, on a machine that has become faster, is done anew with an earlier one.

    Returns:
        Names of the runs.
    """
    seconds, _ = forks.run(whole, *words)
    draw, names = random.Random(seed), []
    for number in range(kills):
        names.append(f"{whole}-{number:02d}")
        moment = seconds * (number + draw.random()) / kills
        while not forks.run(names[-1], *words, kill_after=moment)[1]:
            shutil.rmtree(forks.place / "runs" / names[-1])
            moment *= 0.8
        forks.run(names[-1], *words)
    return names


def differing(one, other, patterns):
    """Files of a run, by patterns, that another has not with the same bytes."""
    found = {
        file.relative_to(each) for each in (one, other) for pattern in patterns for file in each.glob(pattern)
    }
    assert found
    read = lambda file: file.read_bytes() if file.is_file() else None  # noqa: E731
    return sorted(str(file) for file in found if read(one / file) != read(other / file))


def _serve():
    """Fork a child for each line; say its number, and how it ended."""
    for module in IMPORTED:
        importlib.import_module(module)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(asked)
        print(child, flush=True)
        if asked.get("kills"):
            sys.stdin.readline()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(asked):
    """Be a `perturn` of its own, in this process."""
    os.environ["PERTURN_CACHE"] = asked["cache"]
    with open(asked["output"], "a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.argv, code = asked["argv"], 1
    try:
        importlib.import_module("perturn.cli").main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
