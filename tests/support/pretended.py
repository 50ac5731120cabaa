"""Workers of a study that only pretend to work."""

import json
import time
from dataclasses import dataclass, field

from perturn.data.episode_outcomes import Outcome
from perturn.io.atomic_write import write_whole
from perturn.study.cells import Cell


def episode(success):
    return Outcome("t", float(success), success, False, 1, 0, None, "p")


@dataclass
class Pretended:
    """Worker that is done at once or fails. It writes a manifest for its run."""

    cell: Cell
    test: bool
    fails: bool
    began: float = field(default_factory=time.monotonic)
    has_ended = True
    weights = "1" * 64
    """Digest of the weights of each stage that it makes."""

    def error(self):
        """Return the error of the worker; None if it succeeded."""
        if self.fails:
            return "it broke"
        self._write(self.cell.folder, self.cell.stages, self.cell.policy)
        if self.test:
            self._write(self.cell.scored, ["evaluate-base"], "base")
        return None

    def _write(self, folder, stages, policy):
        notes = {name: {"done": True, "seconds": 2.0, "peak_memory_gb": 1.0} for name in stages}
        files = {
            f"checkpoints/{name}/model.safetensors": {
                "stage": name,
                "bytes": 1,
                "modified_ns": 1,
                "sha256": self.weights,
            }
            for name in stages
            if name in ("base", "sft")
        }
        for file in files:
            write_whole(folder / file, "w")
        write_whole(folder / "manifest.json", json.dumps({"stages": notes, "files": files}))
        best = self.cell.point.get("align.learning_rate", 0) > 0.005
        row = {"task": {"id": "t", "kind": "k"}, "success": best, "total_reward": float(best)}
        write_whole(folder / "evaluation" / f"{policy}.jsonl", json.dumps(row) + "\n")

    def stop(self):
        """Do nothing."""

    def end(self):
        """Do nothing."""


@dataclass
class PretendedCrew:
    """Pool that records which cells are started together."""

    fails: tuple = ()
    begun: list = field(default_factory=list)

    def most(self, peak_gb):
        """Return a limit of three cells."""
        return 3

    def start(self, cell, sources, test, log):
        """Start a cell."""
        self.begun[-1].append(cell)
        return Pretended(cell, test, any(word in cell.label for word in self.fails))

    def wait(self, workers, seconds):
        """Record that later cells are started after these."""

    def close(self):
        """Do nothing."""


def states(board):
    """Return the state of each cell by method, point, seed and task list."""
    return {
        (cell.method, *cell.point.values(), cell.seed, task_list): board.state(cell, task_list)
        for cell, task_list in board.cells()
    }
