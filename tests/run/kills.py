"""Kill a run at random moments, start it again until it ends, and compare it with one that nothing interrupted."""

import os
import random
import shutil
import signal
import time

from support.processes import Started


class Forks:
    """Runs of `perturn` in one folder, each with a cache of its own."""

    def __init__(self, place):
        """Runs work in the folder `place`."""
        self.place = place

    def run(self, name, *words, kill_after=None, kill_at=None):
        """Do `perturn run` of the words under a name; its seconds, and whether it was killed before it ended.

        It is killed after so many seconds, or as soon as it has a file, by its path in the run.
        """
        environment = os.environ | {"PERTURN_CACHE": str(self.place / "caches" / name)}
        began, process = time.monotonic(), Started(["run", *words, f"name={name}"], self.place, environment)
        if kill_after is not None or kill_at is not None:
            while kill_at is not None and not (self.place / "runs" / name / kill_at).exists():
                time.sleep(0.02)
            time.sleep(kill_after or 0)
            process.kill()
        printed = "".join(process.communicate())
        (self.place / f"{name}.txt").write_text(printed)
        assert process.returncode in (0, -signal.SIGKILL), printed
        return time.monotonic() - began, process.returncode != 0


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
