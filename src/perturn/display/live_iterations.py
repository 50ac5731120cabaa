"""Show the iterations of a running online run: success with its interval, a sparkline, and the time left."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from statistics import fmean
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from perturn.config.stages import Stage
from perturn.data.run_folder import Run
from perturn.data.run_paths import iteration_of
from perturn.display.progress_bars import at_work, clock, console, screen
from perturn.train_processes import leads
from perturn.watch import Watcher, ledger, rate, sparkline
from perturn.watch.iteration_view import Iteration

_RECENT = 3
"""Number of latest stages of a kind whose mean time predicts the next stage."""


def shows_iterations(run: Run, planned: Sequence[Stage]) -> bool:
    """Return whether to show iterations: only in the leading process, and only for a call that explores repeatedly."""
    explored = {iteration_of(stage.name) for stage in planned if stage.name.startswith("explore")}
    return leads() and len(explored - {None}) > 1


@contextmanager
def doing(stage: Stage, iterations: Iterations | None) -> Iterator[None]:
    """Show the running stage while the block runs, by its name or by its place in the iteration."""
    number = iteration_of(stage.name)
    if iterations is None or number is None:
        console.print(stage.name, style="bold")
    with iterations.doing(stage) if iterations is not None else nullcontext(), at_work(stage.name):
        yield


class Iterations:
    """Display of the iterations in a call."""

    def __init__(self, run: Run, planned: Sequence[Stage]) -> None:
        """Read the iterations that are already done.

        Args:
            run: The open run.
            planned: Stages of this call, in order.
        """
        self._run, self._planned = run, planned
        self._watcher = Watcher(run.folder)
        self._now, self._since, self._number = "", time.monotonic(), 1
        self._done: list[Iteration] = []

    @contextmanager
    def doing(self, stage: Stage) -> Iterator[None]:
        """Show the iterations while one of their stages runs, and print a line at the end of each iteration."""
        number = iteration_of(stage.name)
        self._now, self._since = stage.name, time.monotonic()
        if number is None:
            yield
            return
        self._number = number
        self._done = self._watcher.iterations(self._stages)
        with screen.part_of(self):
            yield
        self._done = self._watcher.iterations(self._stages)
        last = [each.name for each in self._planned if iteration_of(each.name) == number][-1]
        if stage.name == last:
            self._now = ""
            console.print(self._summary(number), markup=False, highlight=False, soft_wrap=True)

    def picture(self) -> RenderableType:
        """Return the line that a terminal shows above the bar."""
        known = self._done[-1:] if self._done and rate(self._done[-1]) else []
        parts = [(f"iteration {self._number} of {self._run.recipe.iterations}", "bold")]
        for one in known:
            policy = f" (iteration {one.number})" if one.number != self._number else ""
            parts += [("  success ", ""), (rate(one), "cyan"), (policy, "dim"), ("  ", "")]
            parts.append((self._sparkline(), "cyan"))
        return Text.assemble(*parts, (f"  {self._left()}", "dim"))

    def line(self) -> str:
        """Return the text that a log line appends to the progress of the current work."""
        return f"iteration {self._number} of {self._run.recipe.iterations}, {self._left()}"

    def _summary(self, number: int) -> str:
        """Return the line that is printed at the end of an iteration."""
        head = f"iteration {number} of {self._run.recipe.iterations}"
        one = next((each for each in self._done if each.number == number), None)
        if one is None:
            return f"{head}: nothing was explored"
        parts = [f"success {rate(one)}", self._sparkline()] if rate(one) else ["no episode is over yet"]
        parts += [f"{key} {value:.3g}" for key, value in (("KL", one.kl), ("entropy", one.entropy)) if value]
        parts += [f"held-out success {held:.1%}" for held in self._held_out(number)]
        parts += [ledger(one)] if one.bins else []
        return f"{head}: {', '.join(parts)}, {clock(one.seconds)}, {self._left()}"

    def _sparkline(self) -> str:
        return sparkline([one.success_rate for one in self._done if one.success_rate is not None][-40:])

    def _held_out(self, number: int) -> Iterator[float]:
        """Yield the success rate of the policy that an iteration trained, if it was evaluated."""
        for stage in self._planned:
            if stage.command == "evaluate" and iteration_of(stage.name) == number:
                counts = self._stages.get(stage.name, {}).get("counts", {})
                if counts.get("episodes"):
                    yield counts["success"] / counts["episodes"]

    @property
    def _stages(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._run.manifest["stages"]
        return found

    def _left(self) -> str:
        """Return the expected time left for all stages of the call, from the latest times of each kind of stage."""
        spent: dict[str, list[float]] = {}
        for stage in self._planned:
            if self._run.is_done(stage.name):
                spent.setdefault(_kind(stage), []).append(float(self._stages[stage.name]["seconds"]))
        left, unknown = 0.0, False
        for stage in self._planned:
            if self._run.is_done(stage.name):
                continue
            known = spent.get(_kind(stage), [])[-_RECENT:]
            if stage.name == self._now:
                left += self._left_of_now(fmean(known) if known else None)
            elif known:
                left += fmean(known)
            else:
                unknown = True
        if unknown and self._number == 1:
            return "time left of the run known after iteration 1"
        return f"{'more than' if unknown else 'about'} {clock(left)} left of the run"

    def _left_of_now(self, whole: float | None) -> float:
        """Return the time left of the running stage in seconds, by its bar or else by its expected duration."""
        shown = screen.seconds_left
        if shown is not None:
            return shown
        return max(0.0, (whole or 0.0) - (time.monotonic() - self._since))


def _kind(stage: Stage) -> str:
    """Return the kind of a stage. Stages of one kind take about equally long."""
    return "evaluate" if stage.command == "evaluate" else stage.name.removesuffix(stage.mark)
