"""The command line: parses, prints, exits. Exit code 0 is success, 2 a mistake that the message explains."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from turnwise.errors import ConfigError, TurnwiseError, did_you_mean
from turnwise.progress import console as notices

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Post-train LLM agents on multi-turn tasks, one turn at a time.\n\n"
    "Example: turnwise run recipes/scienceworld_tlm-dre_demo.yaml",
)
_output = Console()

Source = Annotated[
    Path, typer.Argument(metavar="RECIPE-OR-RUN", help="A recipe file, or the folder of a run.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]", help="Settings that replace the recipe's.")
]
Model = Annotated[str, typer.Option("--model", help="Hub id, local folder, or smollm2-135m.")]


@app.command()
def run(source: Source, overrides: Overrides = None) -> None:
    """Do the whole loop of a recipe; a second call goes on where the first one stopped.

    Example: turnwise run recipes/scienceworld_tlm-dre_demo.yaml seed=1 name=demo-1
    """
    from turnwise.run import open_run, run_all

    opened = open_run(source, overrides or [])
    report_file = run_all(opened)
    _print_summary(opened.folder)
    _output.print(f"report:  {report_file}", soft_wrap=True)
    _output.print(f"summary: {opened.folder / 'summary.json'}", soft_wrap=True)


def _stage(source: Path, overrides: list[str] | None, command: str) -> None:
    from turnwise.run import open_run, run_steps

    run_steps(open_run(source, overrides or [], command), command)


@app.command()
def collect(source: Source, overrides: Overrides = None) -> None:
    """Collect trajectories: the expert's, and the SFT policy's own once it is trained.

    Example: turnwise collect recipes/scienceworld_tlm-dre_demo.yaml
    """
    _stage(source, overrides, "collect")


@app.command()
def pair(source: Source, overrides: Overrides = None) -> None:
    """Make preference pairs: the expert over the policy's own failures.

    Example: turnwise pair runs/demo
    """
    _stage(source, overrides, "pair")


@app.command()
def train(source: Source, overrides: Overrides = None) -> None:
    """Train SFT on the expert's trajectories, and the alignment once there are pairs.

    Example: turnwise train runs/demo
    """
    _stage(source, overrides, "train")


@app.command()
def evaluate(source: Source, overrides: Overrides = None) -> None:
    """Score every policy the run has on the held-out panel.

    Example: turnwise evaluate runs/demo
    """
    _stage(source, overrides, "evaluate")


@app.command()
def report(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="RUN [RUN ...] [KEY=VALUE ...]", help="Folders of runs, or their recipes."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page; else report.html in the run folder.")
    ] = None,
) -> None:
    """Write one page of one run or several, and the summary.json of each, from the run folders alone.

    Example: turnwise report runs/demo

    Example: turnwise report runs/seed-0 runs/seed-1 --output both.html
    """
    from turnwise.report import write_report
    from turnwise.workspace import refuse_other, resolve_recipe, run_folder

    overrides = [word for word in sources if "=" in word and not Path(word).exists()]
    paths = [Path(word) for word in sources if word not in overrides]
    if not paths:
        raise ConfigError("report needs a run folder or a recipe before its settings.")
    folders = []
    for path in paths:
        if path.is_dir() and not overrides:  # made by whatever version: its recipe need not be one of ours
            folders.append(path)
            continue
        recipe = resolve_recipe(path, overrides)
        refuse_other(recipe)
        folders.append(run_folder(recipe))
    _output.print(str(write_report(*folders, output=output)), soft_wrap=True)


@app.command()
def inspect(
    data: Annotated[Path, typer.Argument(help="JSONL of trajectories, pairs or TRL rows; or a run folder.")],
    model: Model,
    loss: Annotated[str, typer.Option(help="Loss whose turn weights are shown.")] = "tlm-dre",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a row instead of colours.")
    ] = False,
    max_length: Annotated[int | None, typer.Option(help="Length limit in tokens, as in training.")] = None,
    limit: Annotated[int | None, typer.Option(help="Rows to show: 3, or all with --json.")] = None,
) -> None:
    """Show which token carries which weight, and totals.

    Example: turnwise inspect runs/demo/pairs.jsonl --model smollm2-135m
    """
    from turnwise.inspect import inspect as show
    from turnwise.inspect import inspect_json

    if as_json:
        for line in inspect_json(data, model, max_length, limit):
            sys.stdout.write(line + "\n")
    else:
        show(data, model, loss, _output, max_length, 3 if limit is None else limit)


@app.command(name="list")
def list_table(what: Annotated[str, typer.Argument(help="losses, credits, environments or engines")]) -> None:
    """List what a recipe can name.

    Example: turnwise list losses
    """
    from turnwise.tables import TABLES

    if what not in TABLES:
        raise ConfigError(f"unknown table {what!r}.{did_you_mean(what, TABLES)}")
    table = Table(show_header=False, box=None)
    entries = TABLES[what]()
    for name, entry in entries.items():
        table.add_row(name, (entry.__doc__ or "").strip().splitlines()[0])
    _output.print(table if entries else f"no {what} yet")


@app.command(name="check-env")
def check_env(
    environment: Annotated[str, typer.Argument(metavar="MODULE:CLASS", help="Your environment.")],
    split: Annotated[str, typer.Option(help="Split to take tasks from.")] = "train",
) -> None:
    """Check whether an environment keeps the contract; exit code 1 if it does not.

    Example: turnwise check-env my_package.my_env:MyEnvironment
    """
    from turnwise.envs.check import check_environment
    from turnwise.envs.load import load_object

    problems = check_environment(load_object(environment), split=split)
    for problem in problems:
        _output.print(f"- {problem}", markup=False, soft_wrap=True)
    if problems:
        raise typer.Exit(1)
    _output.print(f"{environment} keeps the contract.", markup=False)


@app.command()
def convert(
    model: Annotated[str, typer.Argument(help="Name of a bundled model, such as smollm2-135m.")],
) -> None:
    """Convert a bundled model to safetensors in the user's cache; runs by itself when the model is first named.

    Example: turnwise convert smollm2-135m
    """
    from turnwise.policy.models import resolve_model

    _output.print(resolve_model(model, notices.print), soft_wrap=True)


def _print_summary(folder: Path) -> None:
    """The headline table of a finished run."""
    import json

    from turnwise.report.protocol import protocol_line

    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    stamp = summary["protocol"] or {}
    table = Table(title=f"{stamp.get('name', '')}, held-out tasks", caption=protocol_line(stamp))
    for column in ("policy", "n", "average score (95 % interval)", "success rate", "mean turns"):
        table.add_column(column)
    for row in summary["policies"]:
        low, high = row["interval"]
        table.add_row(
            row["name"],
            str(row["n"]),
            f"{row['mean_score']:.3f} [{low:.3f}, {high:.3f}]",
            f"{row['success_rate']:.3f}",
            f"{row['mean_turns']:.1f}",
        )
    _output.print(table)
    found = summary["comparison"]
    if found:
        low, high = found["interval"]
        _output.print(
            f"{found['a']} against {found['b']}, paired over {found['n']} tasks: {found['mean_difference']:+.3f} "
            f"[{low:+.3f}, {high:+.3f}], p = {found['p_value']:.3f}; "
            f"{found['wins']} better, {found['losses']} worse, {found['ties']} equal"
        )


def main() -> None:
    """Entry point: mistakes that are explained exit with 2 and no traceback."""
    try:
        app()
    except TurnwiseError as error:
        notices.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        notices.print("stopped; the same command goes on from here")
        raise SystemExit(130) from None
