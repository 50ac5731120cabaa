"""Commands on scores: `evaluate` policies, `compare` runs, and `play` a task yourself."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perturn.cli._base import STOPPED, AsJson, DryRun, Overrides, command, results, say_json
from perturn.cli._scores import print_comparison, print_pairwise, print_summary
from perturn.cli.loop_commands import show_plan
from perturn.display.progress_bars import at_work
from perturn.errors import ConfigError, check_belongs, required
from perturn.io.user_paths import user_path
from perturn.types import failed

if TYPE_CHECKING:
    from perturn.data.store import TrajectoryStore

Environment = Annotated[str | None, typer.Option(help="Name in `list environments`, or MODULE:CLASS.")]
Split = Annotated[str | None, typer.Option(help="Split of the tasks; default: test.")]
Rules = Annotated[
    str | None,
    typer.Option(help="Name in `list protocols`; default: the trained policy's, or else the environment's."),
]


@command(
    "evaluate",
    "--model smollm2-135m --environment scienceworld --n 20 protocol.format=action",
    "--model Qwen/Qwen2.5-7B-Instruct --environment my_package.my_env:MyEnvironment --json",
    "--model gpt-4.1-mini --environment hotpotqa engine.name=api engine.base_url=https://api.openai.com/v1",
    "runs/demo",
    panel="The loop",
)
def evaluate(
    source: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE-OR-RUN]", help="A recipe or a run; its policies are scored."),
    ] = None,
    overrides: Overrides = None,
    model: Annotated[str | None, typer.Option(help="Model to score: Hub id, folder or API name.")] = None,
    environment: Environment = None,
    split: Split = None,
    n: Annotated[
        int | None, typer.Option(help="Number of tasks; default: 50, or all if there are fewer.")
    ] = None,
    protocol: Rules = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Score a model, or all policies of a run, on held-out tasks."""
    from perturn.config.recipe import Recipe
    from perturn.report import summarize
    from perturn.run.execute import open_run, run_stages
    from perturn.run.score_recipe import scoring_recipe

    words = overrides or []
    chosen: Path | Recipe
    if model is None:
        own = {"--environment": environment, "--split": split, "--n": n, "--protocol": protocol}
        check_belongs(own, False, "--model", "give --model too, or a recipe or a run without them")
        remedy = "name one, or give --model and --environment"
        chosen = user_path(required(source, "RECIPE-OR-RUN", "evaluate scores one", remedy), "path")
    else:
        if source is not None and ("=" not in source or os.path.exists(source)):
            raise ConfigError(
                f"a recipe or run and --model exclude each other, got {source!r:.200}; leave one out, or set "
                f"model.name={model} in the recipe."
            )
        words = [word for word in (source, *words) if word is not None]
        remedy = "`perturn list environments` shows the names"
        environment = required(environment, "--environment", "evaluate needs it to score --model", remedy)
        with at_work(f"opening {environment}"):
            chosen = scoring_recipe(model, environment, split=split, n=n, protocol=protocol, overrides=words)
    if dry_run:
        show_plan(chosen, words, "evaluate", as_json)
        return
    with open_run(chosen, words, "evaluate") as run:
        run_stages(run, "evaluate")
    summary: dict[str, Any] = {"run": str(run.folder), **summarize(run.folder)}
    if as_json:
        say_json(summary)
        return
    print_summary(summary)
    results.print(
        f"episodes and protocol: {run.folder}; to see them: perturn report {quote(str(run.folder))}",
        markup=False,
        soft_wrap=True,
    )


@command(
    "compare",
    "runs/seed-0 runs/seed-1",
    "runs/demo --json",
    "runs/mt-sft runs/mt-aligned --pairwise environment.judge.server.concurrency=4",
    codes="0 compared; 1 not compared, because the tasks differ or an evaluation is not finished; 2 a mistake.",
    panel="Look",
)
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN [RUN ...]",
            help="Run folders; the last policy of each is compared with the first run's. With --pairwise also "
            "settings of the judge, such as environment.judge.tries=5.",
        ),
    ],
    pairwise: Annotated[
        bool,
        typer.Option(
            "--pairwise", help="Runs on mt-bench: a judge compares the answers of the two policies."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare runs, or the policies of one run, task by task."""
    from perturn.analysis.pairwise_answers import JUDGE, by_judge
    from perturn.analysis.run_comparison import by_score, compare_runs

    words = [run for run in runs if pairwise and run.startswith(f"{JUDGE}.")]
    folders = [user_path(run, "path") for run in runs if run not in words]
    with at_work("comparing"):
        found = compare_runs(folders, by_judge(words) if pairwise else by_score)
    if as_json:
        say_json([asdict(each) for each in found])
    else:
        for each in found:
            if each.row:
                (print_pairwise if pairwise else print_comparison)(each.row)
            else:
                results.print(f"{each.a} and {each.b} were not compared: {each.refused}", markup=False)
            for line in each.differs:
                results.print(f"  the protocols differ: {line}", markup=False, soft_wrap=True)
        if len(found) > 1 and not pairwise:
            results.print(
                f"{len(found)} comparisons; no p-value is adjusted for their number.",
                style="dim",
                markup=False,
            )
    if any(each.row is None for each in found):
        raise typer.Exit(1)


@command(
    "play",
    "scienceworld",
    "examples/own_environment.py:GuessNumber --split test --output mine.jsonl",
    codes="0 played, or left with Ctrl-D; 1 the environment failed; 2 a mistake; 130 left with Ctrl-C.",
    panel="Look",
)
def play(
    environment: Annotated[
        str, typer.Argument(metavar="ENVIRONMENT", help="A name of `list environments`, or MODULE:CLASS.")
    ],
    overrides: Overrides = None,
    task: Annotated[str | None, typer.Option(help="Id of the task; default: the first task.")] = None,
    split: Split = None,
    protocol: Rules = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSONL file to append the episode to.")
    ] = None,
) -> None:
    """Play a task yourself and see what a policy sees."""
    from perturn.data.store import TrajectoryStore
    from perturn.run.human_player import play_by_hand
    from perturn.run.score_recipe import scoring_recipe

    with ExitStack() as opened:
        # Open the output before the episode, so that an output that cannot be written costs no episode.
        file = None if output is None else user_path(output, "output")
        store = None if file is None else opened.enter_context(TrajectoryStore(file))
        words = overrides or []
        recipe = scoring_recipe("person", environment, split=split, protocol=protocol, overrides=words)
        results.print(
            "Type an action and press Enter. To leave, press Ctrl-D (or Ctrl-C); nothing is kept then.\n"
        )
        try:
            played = play_by_hand(recipe, task, _ask, _show)
        except KeyboardInterrupt:
            results.print("\nyou left; nothing is kept")
            raise typer.Exit(STOPPED) from None
        if played is None:
            results.print("\nyou left; nothing is kept")
            return
        if store is not None:
            played = store.append(replace(played, sample=_free(store, played.task.id)))
    ended = (
        "solved"
        if played.success
        else played.error or ("stopped at the limit" if played.truncated else "over")
    )
    results.print(f"{ended}: total reward {played.total_reward:g} in {len(played.turns)} turns", markup=False)
    if failed(played):
        raise typer.Exit(1)


def _free(store: TrajectoryStore, task: str) -> int:
    """Return the first sample number of a task that is not recorded yet."""
    taken = store.keys()
    return next(sample for sample in count() if (task, sample) not in taken)


def _ask() -> str:
    """Return a line that the user types. An empty line asks again."""
    while not (typed := input("> ")).strip():
        pass
    return typed


def _show(message: dict[str, Any]) -> None:
    results.print(f"{message['role']}:", style="dim", markup=False)
    results.print(message.get("content") or "", markup=False, highlight=False, soft_wrap=True)
