"""Workers of a study that only pretend."""

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
    """A worker that is done at once, or fails; its run gets a manifest that says so."""

    cell: Cell
    test: bool
    fails: bool
    began: float = field(default_factory=time.monotonic)
    has_ended = True

    def error(self):
        """Why it failed."""
        if self.fails:
            return "it broke"
        self._write(self.cell.folder, self.cell.stages, self.cell.policy)
        if self.test:
            self._write(self.cell.scored, ["evaluate-base"], "base")
        return None

    def _write(self, folder, stages, policy):
        notes = {name: {"done": True, "seconds": 2.0, "peak_memory_gb": 1.0} for name in stages}
        write_whole(folder / "manifest.json", json.dumps({"stages": notes}))
        best = self.cell.point.get("align.learning_rate", 0) > 0.005
        row = {"task": {"id": "t", "kind": "k"}, "success": best, "total_reward": float(best)}
        write_whole(folder / "evaluation" / f"{policy}.jsonl", json.dumps(row) + "\n")

    def stop(self):
        """Nothing runs."""

    def end(self):
        """Nothing runs."""


@dataclass
class PretendedCrew:
    """Notes which cells are begun together."""

    fails: tuple = ()
    begun: list = field(default_factory=list)

    def most(self, peak_gb):
        """Three at a time."""
        return 3

    def start(self, cell, sources, test, log):
        """Begin a cell."""
        self.begun[-1].append(cell)
        return Pretended(cell, test, any(word in cell.label for word in self.fails))

    def wait(self, workers, seconds):
        """The cells that follow are begun after these."""

    def close(self):
        """Nothing is held."""


def states(board):
    """(method, point, seed, panel) -> state."""
    return {
        (cell.method, *cell.point.values(), cell.seed, panel): board.state(cell, panel)
        for cell, panel in board.cells()
    }
