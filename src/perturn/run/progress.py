"""Progress bars with rates and time left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
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
def bar(description: str, total: int, done: int = 0) -> Iterator[Callable[..., None]]:
    """Show a bar while the block runs.

    Args:
        description: What is being worked on.
        total: Number of items, finished ones included.
        done: Items that were finished before.

    Yields:
        What moves it: to be called with `advance`, the items that are finished since, or with `completed`, all of them.
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
        yield partial(progress.update, progress.add_task(description, total=total, completed=done))


def track(work: Iterable[T], description: str) -> Iterator[T]:
    """Hand the items on and show a bar that counts them."""
    work = list(work)
    with bar(description, len(work)) as shown:
        for item in work:
            yield item
            shown(advance=1)
