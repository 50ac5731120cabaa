"""Show the state of a run in the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from perturn.data.run_paths import iteration_of
from perturn.io.plain_data import visible
from perturn.watch.alarms import RULES
from perturn.watch.iteration_view import LAST, Iteration
from perturn.watch.run_state import Score, Stage, State, Watcher

_COLOURS = {
    "done": "green",
    "finished": "green",
    "running": "cyan",
    "waiting": "dim",
    "idle": "yellow",
    "stopped": "yellow",
    "died": "bold red",
    "failed": "bold red",
}


_WRAPPED = {"stage": 12, "items": 8, "time": 6, "left": 6}
"""Columns of stages that are wrapped on a narrow screen, with their least width. Words other than names are whole."""
_TRAINED = ("trained", "kept")
"""Bins of episodes that are trained on."""
_BARS = "▁▂▃▄▅▆▇█"
_POINTS = 40
"""Maximum number of last iterations in the sparkline."""
_SCORES = 4
"""Maximum number of last scores that are shown besides the first two policies."""


def watch_live(watcher: Watcher, console: Console, every: float) -> State:
    """Show a run until it ends or the user stops watching.

    Returns:
        The last state that was shown.
    """
    state = watcher.look()
    with Live(render(state), console=console, auto_refresh=False) as live:
        try:
            while state.state == "running":
                time.sleep(every)
                state = watcher.look()
                live.update(render(state), refresh=True)
        except KeyboardInterrupt:  # the run itself continues
            pass
    return state


def render(state: State) -> RenderableType:
    """Return the state as a display of stages, scores, last metrics and alarms."""
    head = Text.assemble((visible(state.run), "bold"), "  ", (visible(state.says), _COLOURS[state.state]))
    if state.silent is not None and state.silent > 15:
        head.append(f"  (no progress written for {duration(state.silent)})", style="yellow")
    parts: list[RenderableType] = [head, _alarms(state), _Stages(_shown(state))]
    if state.planned > 1:
        parts += _iterations(state)
    if state.scores:
        parts.append(_scores(state))
    for stage, last in state.metrics.items():
        numbers = "  ".join(f"{key} {value:.4g}" for key, value in last.items())
        parts.append(Text.assemble((f"{visible(stage)}: ", "bold"), visible(numbers)))
    return Group(*parts)


@dataclass(frozen=True)
class _Stages:
    """Table of stages, without columns that are empty for all of them.

    On a narrow screen, names, items and times are wrapped, and the last columns are left out.
    """

    stages: list[Stage]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table. Its columns have fixed widths, since rich would cut numbers to fit all of them."""
        shown = {name: cells for name, cells in self._columns().items() if any(cells)}
        least = {name: _least_width(name, cells) for name, cells in shown.items()}
        while (spare := options.max_width - sum(least.values()) - 2 * len(least) + 2) < 0 and len(least) > 2:
            shown.popitem()
            least.popitem()
        table = Table(box=None, pad_edge=False)
        for name, cells in shown.items():
            more = _widest(name, cells) - least[name]
            if more > spare:  # half a time is no gain
                more = max(spare, 0) if name == "stage" else 0
            spare -= more
            justify: JustifyMethod = "left" if name in ("stage", "") else "right"
            table.add_column(name, width=least[name] + more, overflow="fold", justify=justify)
        for row in zip(*shown.values(), strict=True):
            table.add_row(*row)
        yield table

    def _columns(self) -> dict[str, list[Text]]:
        memory = ("" if one.memory_gb is None else f"{one.memory_gb:.1f} GB" for one in self.stages)
        return {
            "stage": [Text(visible(one.name)) for one in self.stages],
            "": [Text(one.state, style=_COLOURS[one.state]) for one in self.stages],
            "items": [Text(visible(_items(one))) for one in self.stages],
            "rate": [Text(_rate(one.rate)) for one in self.stages],
            "time": [Text(duration(one.seconds)) for one in self.stages],
            "left": [Text(duration(one.left)) for one in self.stages],
            "memory": [Text(each) for each in memory],
        }


def _widest(name: str, cells: Sequence[Text]) -> int:
    return max(cell_len(name), *(cell.cell_len for cell in cells))


def _least_width(name: str, cells: Sequence[Text]) -> int:
    widest = _widest(name, cells)
    if name not in _WRAPPED:
        return widest
    words = [] if name == "stage" else " ".join(map(str, cells)).split()
    return min(widest, max([_WRAPPED[name], *map(cell_len, words)]))


def _shown(state: State) -> list[Stage]:
    """Return the stages to list. With several iterations, these are the stages of the running or last iteration."""
    if state.planned == 1:
        return state.stages
    numbers = {stage.name: iteration_of(stage.name) for stage in state.stages}
    busy = [number for stage in state.stages if stage.state != "done" and (number := numbers[stage.name])]
    now = min(busy) if busy else max((number for number in numbers.values() if number), default=None)
    return [stage for stage in state.stages if numbers[stage.name] in (None, now)]


def _iterations(state: State) -> list[RenderableType]:
    """Return the display of the current iteration, a sparkline of all iterations, and the numbers of the last few."""
    done = state.iterations
    numbers = [n for stage in state.stages if stage.state != "waiting" and (n := iteration_of(stage.name))]
    head = Text.assemble((f"iteration {max(numbers, default=1)} of {state.planned}", "bold"))
    busy = {iteration_of(stage.name) for stage in state.stages if stage.state != "done"}
    whole = [one.seconds for one in done if one.number not in busy]
    if whole and state.state == "running":
        head.append(f", about {duration(fmean(whole) * (state.planned - len(whole)))} left", style="dim")
    success = [one.success_rate for one in done if one.success_rate is not None][-_POINTS:]
    if not success:
        return [head]
    line = Text.assemble(
        "success ", (sparkline(success), "cyan"), f" {success[-1]:.0%} now, {success[0]:.0%} at first"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("", "success [95 %]", "reward", "entropy", "KL", "clipped"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column(Text(visible(next((one.unit for one in done[-LAST:] if one.bins), "episodes"))))
    for one in done[-LAST:]:
        numbers_of = (one.mean_score, one.entropy, one.kl, one.clip_share)
        shown = ["" if value is None else f"{value:.3g}" for value in numbers_of]
        table.add_row(str(one.number), Text(rate(one, digits=0)), *shown, Text(visible(ledger(one))))
    return [head, line, table]


def sparkline(values: Sequence[float]) -> str:
    """Return shares as a sparkline of block characters. A share of 1 has the highest block."""
    return "".join(_BARS[max(0, min(len(_BARS) - 1, int(value * len(_BARS))))] for value in values)


def rate(one: Iteration, digits: int = 1) -> str:
    """Return success of explored episodes with its 95 % interval, such as `41.4% [33.0%, 50.2%]`; empty if unknown."""
    if one.success_rate is None:
        return ""
    ends = one.success_interval
    found = f"{one.success_rate:.{digits}%}"
    return found + (f" [{ends[0]:.{digits}%}, {ends[1]:.{digits}%}]" if ends else "")


def ledger(one: Iteration) -> str:
    """Return the bins of an iteration, trained bins first, and the requested number if the bins add up to less.

    The text is empty until the bins are counted.
    """
    bins = sorted(((n, name) for name, n in one.bins.items() if n), key=lambda each: each[1] not in _TRAINED)
    said = ", ".join(f"{n} {name.replace('_', ' ')}" for n, name in bins)
    return said if not one.bins or sum(one.bins.values()) == one.asked else f"{said} of {one.asked}"


def _scores(state: State) -> Table:
    table = Table(box=None, pad_edge=False)
    drawn = ("best of",) if any(row.drawn is not None for row in state.scores) else ()
    for name in ("policy", "episodes", "average score", "success rate", "failed", *drawn):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in state.scores[:2] + state.scores[2:][-_SCORES:]:
        numbers = f"{row.mean_score:.3f}", f"{row.success_rate:.3f}", str(row.failed)
        of_all = [_drawn(row)] if drawn else []
        n = f"{row.n} so far" if row.unfinished else str(row.n)
        table.add_row(Text(visible(row.policy)), n, *numbers, *of_all)
    return table


def _drawn(row: Score) -> str:
    """Return the number of episodes from which the best were scored, and the requested number if some are missing."""
    if row.drawn is None:
        return ""
    return f"{row.drawn} episodes" if row.drawn == row.asked else f"{row.drawn} of {row.asked} episodes"


def _alarms(state: State) -> RenderableType:
    if not state.alarms:
        return Text(f"no alarms ({len(RULES)} checks)", style="dim")
    lines = [Text.assemble((f"{alarm.rule}: ", "bold"), visible(alarm.message)) for alarm in state.alarms]
    return Panel(Group(*lines), title="alarms", border_style="red")


def _items(stage: Stage) -> str:
    if stage.done is None:
        return ""
    of = f"/{stage.total}" if stage.total is not None and stage.state != "done" else ""
    return f"{stage.done}{of} {stage.unit}".rstrip()


def _rate(rate: float | None) -> str:
    if not rate:
        return ""
    return f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s each"


def duration(seconds: float | None) -> str:
    """Return a time in words, such as `2 min 05 s`; empty if it is unknown."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
    )
