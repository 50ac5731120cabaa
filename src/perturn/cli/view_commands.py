"""Commands that only read: `inspect` data, `watch` a run, `verify` its files, and `list` the entries of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape
from rich.table import Table

from perturn.cli._base import AsJson, RunFolder, command, existing, results, say_json
from perturn.config.shipped_recipes import describe_shipped
from perturn.data.run_paths import RunPaths
from perturn.display.progress_bars import at_work
from perturn.errors import check_belongs, check_fit, check_known
from perturn.io.user_code import user_code
from perturn.table_index import LISTED, describe, methods


@command(
    "inspect",
    "runs/demo-then --loss tlm-dpo",
    "runs/demo-then --check",
    "data.jsonl --model Qwen/Qwen2.5-7B-Instruct --check --max-length 4096 --json",
    "data.jsonl --model smollm2-135m --json --limit 1 --loss tlm-dre",
    "runs/demo-scienceworld --drawn sft --limit 1",
    "data.jsonl --model Qwen/Qwen3-4B --chat-template qwen3-nothink",
    codes="0 shown; 1 --check found rejected rows, or no row to train on; 2 a mistake, or malformed rows.",
    panel="Look",
)
def inspect(
    data: Annotated[
        Path,
        typer.Argument(callback=existing, help="File or folder of rows, owner/name:split, or a run."),
    ],
    model: Annotated[
        str | None, typer.Option("--model", help="Hub id, folder or bundled name; not needed for a run.")
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(help="Loss that weighs turns, and reads rows of --check; default: the run's."),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="An object per row, or one with --check; weights only with --loss."),
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Audit all rows: lengths, drops, rejections."),
    ] = False,
    max_length: Annotated[
        int | None, typer.Option(help="Length limit in tokens; default: the run's.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Rows to show; default: 3, or all with --json.")] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(help="Name, file or Jinja text; default: the run's."),
    ] = None,
    drawn: Annotated[
        str | None,
        typer.Option(metavar="POLICY", help="Show all sampled episodes of a policy scored best-of-n."),
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Import code that the run names, such as mine.py:Credit.")
    ] = False,
) -> None:
    """Show the weight of each token; audit training rows."""
    from perturn.audit import audit, drawn_by, inspect_json, model_of
    from perturn.audit import inspect as show

    check_fit(max_length is None or max_length > 0, "--max-length", "be >= 1", max_length)
    check_belongs({"--limit": limit}, not check, "inspect without --check", "leave it out")
    with user_code(trust or not RunPaths(data).is_run, "If you trust the run, add --trust.", typed=[loss]):
        name = model_of(data, model)
        if drawn is not None:
            by = drawn_by(data, drawn)
            data, max_length = by.file, max_length or by.max_length
            chat_template = chat_template or by.chat_template
        if check:
            with at_work("checking rows"):
                found = audit(data, name, max_length, chat_template, loss)
            _say_audit(found, as_json)
        elif as_json:
            for line in inspect_json(data, name, max_length, limit, chat_template, loss):
                typer.echo(line)
        else:
            show(data, name, loss, results, max_length, 3 if limit is None else limit, chat_template)


def _say_audit(found: dict[str, Any], as_json: bool) -> NoReturn:
    """Print the result of an audit, and exit with its code."""
    from perturn.audit import print_audit

    if as_json:
        say_json(found)
    else:
        print_audit(found, results)
    raise typer.Exit(1 if found["refused"] or found["template"]["problems"] or not found["usable"] else 0)


@command(
    "watch",
    "runs/demo",
    "runs/demo --once",
    "runs/demo --once --json",
    codes="0 running, finished or stopped by its user; 1 died, failed, or an alarm is on; 2 no such run.",
    panel="Look",
)
def watch(
    run: RunFolder,
    once: Annotated[bool, typer.Option("--once", help="Print the state and exit.")] = False,
    as_json: AsJson = False,
    every: Annotated[float, typer.Option(help="Seconds between updates.")] = 2.0,
) -> None:
    """Watch a run from another terminal."""
    from perturn.watch import Watcher, render, watch_live

    check_fit(0.1 <= every <= 3600, "--every", "be from 0.1 to 3600 seconds", every)
    watcher = Watcher(run)
    if as_json:
        state = watcher.look()
        say_json(state.to_dict())
    elif once:
        state = watcher.look()
        results.print(render(state))
    else:
        state = watch_live(watcher, results, every)
    raise typer.Exit(0 if state.is_well else 1)


@command(
    "verify",
    "runs/demo",
    "runs/demo --json",
    codes="0 every finished file is undamaged; 1 a file is damaged; 2 no such run.",
    panel="Look",
)
def verify(run: RunFolder, as_json: AsJson = False) -> None:
    """Check that every finished file of a run is undamaged."""
    from perturn.run.verify_run import print_verified
    from perturn.run.verify_run import verify as check

    with at_work("hashing files"):
        found = check(run)
    if as_json:
        say_json(found.to_dict())
    else:
        print_verified(found, results)
    raise typer.Exit(1 if found.damaged else 0)


@command("list", "", "losses", "environments --json", panel="Look")
def list_table(
    what: Annotated[str | None, typer.Argument(metavar="TABLE", help=f"{', '.join(LISTED)}.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the entries of a table, such as losses or recipes."""
    if what is not None:
        check_known(what, LISTED, f"unknown table {what!r}")
    entries: Mapping[str, Any]
    if what in ("losses", "credits", "quantities"):
        entries = {name: asdict(one) for name, one in methods(what).items()}
    else:
        entries = LISTED if what is None else describe_shipped() if what == "recipes" else describe(what)
    if as_json:
        say_json(entries)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, one in entries.items():
        table.add_row(escape(name), escape(one) if isinstance(one, str) else _told(**one))
    results.print(table if entries else f"no {what} here")


def _told(says: str, source: str, reads: Sequence[str], cost: str) -> str:
    """Return a few lines on a loss, a credit or a quantity."""
    lines = {"Reads": ", ".join(reads), "Costs": cost, "Source": source}
    described = (f"[dim]{name}: {escape(text.rstrip('.'))}.[/]" for name, text in lines.items() if text)
    return "\n".join([escape(says), *described])
