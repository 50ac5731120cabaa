"""The state of a run in the terminal."""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from perturn.watch.alarms import RULES
from perturn.watch.state import Stage, State, Watcher

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


def watch_live(watcher: Watcher, console: Console, every: float) -> State:
    """Show a run until it ends or the user has seen enough.

    Returns:
        What was seen last.
    """
    state = watcher.look()
    with Live(render(state), console=console, auto_refresh=False) as live:
        try:
            while state.state == "running":
                time.sleep(every)
                state = watcher.look()
                live.update(render(state), refresh=True)
        except KeyboardInterrupt:  # the run goes on
            pass
    return state


def render(state: State) -> RenderableType:
    """Stages, scores, the last metrics, alarms."""
    head = Text.assemble((state.run, "bold"), "  ", (state.says, _COLOURS[state.state]))
    if state.silent is not None and state.silent > 15:
        head.append(f"  (no sign of life for {_duration(state.silent)})", style="yellow")
    parts: list[RenderableType] = [head, _stages(state.stages)]
    if state.scores:
        parts.append(_scores(state))
    for stage, last in state.metrics.items():
        numbers = "  ".join(f"{key} {value:.4g}" for key, value in last.items())
        parts.append(Text.assemble((f"{stage}: ", "bold"), numbers))
    parts.append(_alarms(state))
    return Group(*parts)


def _stages(stages: list[Stage]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "", "items", "rate", "time", "left", "memory"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("stage", "") else "right")
    for stage in stages:
        table.add_row(
            stage.name,
            Text(stage.state, style=_COLOURS[stage.state]),
            _items(stage),
            _rate(stage.rate),
            _duration(stage.seconds),
            _duration(stage.left),
            "" if stage.memory_gb is None else f"{stage.memory_gb:.1f} GB",
        )
    return table


def _scores(state: State) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("policy", "n", "average score", "success rate", "failed"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in state.scores:
        table.add_row(
            row.policy, str(row.n), f"{row.mean_score:.3f}", f"{row.success_rate:.3f}", str(row.failed)
        )
    return table


def _alarms(state: State) -> RenderableType:
    if not state.alarms:
        return Text(f"no alarm ({len(RULES)} rules)", style="dim")
    lines = [Text.assemble((f"{alarm.rule}: ", "bold"), alarm.message) for alarm in state.alarms]
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


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
    )
