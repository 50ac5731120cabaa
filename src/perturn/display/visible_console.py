"""A console that shows text of others, such as names in a run folder, without the power to control the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from perturn.io.plain_data import visible


class VisibleConsole(Console):
    """Console that prints control characters of texts as escapes; see `visible`. Markup is the caller's concern."""

    def __init__(self, **settings: Any) -> None:
        """Make a console with settings of rich.

        With FORCE_COLOR, rich takes any stream for a terminal. A file then has colours, but no live display.
        """
        super().__init__(**settings)
        chosen = (settings.get(name) for name in ("force_terminal", "force_interactive"))
        if all(each is None for each in chosen) and not self._writes_to_terminal():
            self.is_interactive = False

    def _writes_to_terminal(self) -> bool:
        """Return whether the stream is a terminal. A closed stream, or a logger in its place, is none."""
        try:
            return self.file.isatty()
        except (AttributeError, ValueError):
            return False

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of an object. Segments of rich itself that control the terminal are kept."""
        for each in super().render(renderable, options):
            yield each if each.control else each._replace(text=visible(each.text))
