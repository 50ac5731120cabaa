"""Record sessions on disk: a trajectory for each ended session, and a note for each opened session."""

from __future__ import annotations

import json
import os
from pathlib import Path

from perturn.data.run_paths import RunPaths
from perturn.data.store import TrajectoryStore, read_trajectories
from perturn.errors import RunError, StorageError
from perturn.io.atomic_write import append_whole, writing
from perturn.io.read_input import complete_lines, parse_object
from perturn.types import Status, Task, Trajectory

LOST = "SessionLost: the endpoint ended before the session did."
"""Error in the trajectory of a session that was open when the endpoint ended."""


class SampleNumbers:
    """Numbers of the episodes of each task, so that no two sessions of a task have the same number and seed."""

    def __init__(self) -> None:
        """Start without episodes."""
        self._next: dict[str, int] = {}
        self._taken: set[tuple[str, int]] = set()

    def reserve(self, task: str) -> int:
        """Reserve the next free number of a task, and return it."""
        sample = self._next.get(task, 0)
        self.take(task, sample)
        return sample

    def take(self, task: str, sample: int) -> bool:
        """Reserve a number of a task; return False if the number was reserved before."""
        if (task, sample) in self._taken:
            return False
        self._taken.add((task, sample))
        self._next[task] = max(self._next.get(task, 0), sample + 1)
        return True


class Record:
    """A folder in which one endpoint at a time records its sessions."""

    def __init__(self, folder: Path, environment: str) -> None:
        """Open the folder, or make it.

        Sessions that a killed endpoint left open are recorded as FAILED trajectories without turns.

        Raises:
            PerturnError: If another endpoint uses the folder, it is a run folder, or a file is malformed.
        """
        paths = RunPaths(folder)
        if paths.is_run and not paths.is_recorded:
            raise RunError(
                f"{folder} is the folder of a run, whose episodes are its own; record in another folder."
            )
        self.folder = folder
        self._file = paths.sessions
        self.episodes = paths.trajectories("explore")
        """File of the trajectories."""
        self._environment = environment
        self._store = TrajectoryStore(self.episodes)
        self._is_broken = False
        self.samples = SampleNumbers()
        self.lost = self._mark_lost()
        for task, sample in sorted(self._store.keys()):
            self.samples.take(task, sample)
        with writing(self._file):
            self._notes = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)

    def begun(self, task: Task, sample: int, seed: int, policy: str) -> None:
        """Write a note that a session was opened, so that it is not forgotten if the process is killed."""
        note = {"task": task.id, "kind": task.kind, "sample": sample, "seed": seed, "policy": policy}
        line = json.dumps(note)
        with writing(self._file):
            append_whole(self._notes, line.encode() + b"\n")

    def ended(self, trajectory: Trajectory) -> None:
        """Store an episode. On return, it is on the disk.

        Raises:
            StorageError: If the episode cannot be written. The caller may try again.
        """
        try:
            if self._is_broken:
                self._store.close()
                self._store = TrajectoryStore(self.episodes)
                # The line may have been written although that call failed.
                self._store.drop(lambda one: one.key == trajectory.key)
                self._is_broken = False
            self._store.append(trajectory)
        except StorageError:
            self._is_broken = True  # the store has closed itself, since its last line may be incomplete
            raise

    def close(self) -> None:
        """Close the files."""
        self._store.close()
        os.close(self._notes)

    def _mark_lost(self) -> int:
        """Record a FAILED trajectory for each session with a note but no trajectory; return their number."""
        file, lost = self._file, 0
        if not file.is_file():
            return 0
        held = {trajectory.key for trajectory in read_trajectories(self.episodes)}
        for number, line in complete_lines(file, RunError):
            note = parse_object(line, f"{file}:{number}", RunError, "Delete the file.")
            key = str(note["task"]), int(note["sample"])
            if key not in held:
                task = Task(key[0], str(note.get("kind", "")))
                self._store.append(
                    Trajectory(
                        task,
                        (),
                        environment=self._environment,
                        protocol="agent",
                        status=Status.FAILED,
                        error=LOST,
                        sample=key[1],
                        seed=int(note["seed"]),
                        policy=str(note.get("policy", "")),
                    )
                )
                held.add(key)
                lost += 1
        return lost
