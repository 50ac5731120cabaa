"""Progress bars with rates and time left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

T = TypeVar("T")

console = Console(stderr=True)
"""Where progress and notices go, so that standard output stays for results."""


class _Rate(ProgressColumn):
    """Items a second, or seconds an item where that is below one."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        return Text(f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each", style="dim")


@contextmanager
def bar(description: str, total: int, done: int = 0) -> Iterator[_Bar]:
    """Show a bar while the block runs.

    Args:
        description: What is being worked on.
        total: Number of items, finished ones included.
        done: Items that were finished before.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield _Bar(progress, progress.add_task(description, total=total, completed=done))


class _Bar:
    """A bar on the screen."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def advance(self) -> None:
        """One item more is finished."""
        self._progress.advance(self._task)

    def set(self, done: int) -> None:
        """This many items are finished."""
        self._progress.update(self._task, completed=done)


def track(work: Iterable[T], description: str) -> Iterator[T]:
    """Hand the items on and show a bar that counts them."""
    work = list(work)
    with bar(description, len(work)) as shown:
        for item in work:
            yield item
            shown.advance()
