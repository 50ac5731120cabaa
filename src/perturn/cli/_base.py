"""Shared parts of the commands: the app, consoles, arguments, and help that ends with examples."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from perturn import __version__
from perturn.display.progress_bars import console as notices
from perturn.display.visible_console import VisibleConsole
from perturn.errors import ConfigError
from perturn.io.user_paths import user_path
from perturn.train_processes import leads, world_size

EXIT_CODES = "Exit codes: 0 done; 1 a check found a problem; 2 a mistake; 130 Ctrl-C."

STOPPED = 130
"""Exit code after Ctrl-C, the same as typer's."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Post-train LLM agents turn by turn. A command that was stopped resumes.",
    epilog="\n".join(
        (
            "Example: perturn init my.yaml --environment scienceworld --model smollm2-135m",
            "Example: perturn run my.yaml",
            EXIT_CODES,
        )
    ),
)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"perturn {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_version, help="Print the version.")
    ] = False,
) -> None:
    """Read the options that come before a command."""
    if world_size() > 1 and context.invoked_subcommand != "train":
        raise ConfigError(
            f"`perturn {context.invoked_subcommand}` runs in one process, got {world_size()}; start it without "
            "`accelerate launch` or `torchrun`. Only `perturn train` is for several."
        )
    results.quiet = notices.quiet = not leads()


_UNBROKEN = 200
"""Columns of results that are written to a file or a pipe, so that tables there are whole."""

results = VisibleConsole(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _UNBROKEN)
"""Console for results. Notices and progress go to standard error."""


def existing(path: Path | None) -> Path | None:
    """Return a path from the command line, or raise an error if no file can have this name."""
    return None if path is None else user_path(path, "path")


Source = Annotated[
    Path,
    typer.Argument(metavar="RECIPE-OR-RUN", help="A recipe file, or the folder of a run.", callback=existing),
]
RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", callback=existing, help="Folder of a run, finished or not.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE ...]", help="Settings to change, such as seed=1."),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Check the recipe and estimate time and memory; run nothing."),
]
GpuMemory = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory",
        min=1,
        max=1e6,
        help="Gigabytes per GPU for --dry-run; default: the memory of this machine's GPUs.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def say_json(value: Any) -> None:
    """Print JSON on one line; NaN and infinity become null. With several processes, only the first prints."""
    if leads():
        sys.stdout.write(json.dumps(_finite(value), allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """Return JSON data with None instead of each float that is not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def command(
    name: str, *examples: str, codes: str | None = None, panel: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a command whose help ends with examples.

    Args:
        name: Name of the command.
        examples: Arguments after `perturn NAME`, one example for each line.
        codes: Description of additional exit codes; None if there are none.
        panel: Heading of the command in the list of commands.
    """
    lines = [f"Example: perturn {name} {escape(example)}".rstrip() for example in examples]
    exits = [f"Exit codes: {codes}"] if codes else []
    return app.command(name=name, epilog="\n".join([*lines, *exits]), rich_help_panel=panel)
