"""Commands on credits: `credit` computes the weights of stored groups, and `check-credit` measures a credit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from perturn.cli._base import AsJson, Overrides, Source, command, results, say_json
from perturn.cli.loop_commands import do_stages
from perturn.data.run_paths import RunPaths
from perturn.display.progress_bars import at_work
from perturn.errors import PerturnError, check_belongs
from perturn.table import guarded, locate


@command(
    "credit",
    "recipes/alfworld_gigpo.yaml",
    "runs/demo credit.name=gigpo credit.gamma=0.9",
    "runs/demo credit.name=my_package.my_credit:MyCredit --as mine --against rloo --json",
    panel="The loop",
)
def credit(
    source: Source,
    overrides: Overrides = None,
    against: Annotated[
        str | None,
        typer.Option(help="Name of another credit to compare with."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--as", help="Name of the files to write; default: the credit's name.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="Reference policy of the credit; default: the policy that explored.")
    ] = None,
    drop_equal_outcomes: Annotated[
        bool, typer.Option("--drop-equal-outcomes", help="Drop groups whose outcomes are equal.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check the recipe and estimate time and memory. A second credit is computed and printed, but not "
            "written.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compute the weight of each turn by a credit."""
    again = any(word.startswith("credit.") for word in overrides or []) or RunPaths(source).is_recorded
    if not (source.is_dir() and again):
        own: dict[str, object] = {"--against": against, "--as": name, "--reference": reference}
        own |= {"--drop-equal-outcomes": drop_equal_outcomes}
        check_belongs(own, False, "weighing a run again", "give its folder and credit.name=NAME")
        do_stages("credit", source, overrides, dry_run, as_json)
        return
    with at_work("computing credits"):
        found = locate("perturn.run.stages.credit_stage:credit_run")(
            source,
            overrides or [],
            against=against,
            name=name,
            reference=reference,
            drop_equal_outcomes=drop_equal_outcomes,
            writes=not dry_run,
        )
    if as_json:
        say_json(found)
        return
    _print_iterations(found)
    _print_turns(found["iterations"][-1])
    if against:
        _print_comparison(found["iterations"][-1]["against"], str(found["credit"]["name"]), against)
    if dry_run:
        results.print("--dry-run: nothing was written")
        return
    for one in found["iterations"]:
        results.print(f"wrote {source / one['file']}", markup=False, soft_wrap=True)


_COLUMNS = {
    "asked": "sampled",
    "no_spread": "equal scores",
    "alone": "of one episode",
    "equal_outcomes": "equal outcomes",
    "zero_credit": "all weights 0",
    "mean": "mean weight",
    "spread": "standard deviation",
}
"""Column headings in the tables of `perturn credit`, by the keys of its counts."""


def _print_iterations(found: Mapping[str, Any]) -> None:
    """Print tables of all iterations: episodes by bin with the weights of trained turns, and groups."""
    counted = list(found["iterations"][0]["counts"])
    groups = counted.index("groups")
    name = escape(str(found["credit"]["name"]))
    explained = tuple(key for key in ("explained_variance", "td_error") if key in found["iterations"][0])
    tables: tuple[tuple[str, list[str], tuple[str, ...]], ...] = (
        ("what became of the episodes, and weights of trained turns", counted[:groups], ("mean", "spread")),
        ("what became of the groups", counted[groups:], explained),
    )
    for title, keys, weights in tables:
        shown = Table(title=f"{name}: {title}")
        for column in ("iteration", *keys, *weights):
            shown.add_column(_COLUMNS.get(column, column.replace("_", " ")))
        for one in found["iterations"]:
            cells = [str(one["counts"][key]) for key in keys] + [_number(one[key]) for key in weights]
            shown.add_row(str(one["iteration"]), *cells)
        results.print(shown)


def _print_turns(one: Mapping[str, Any]) -> None:
    """Print the weights of an iteration by turn number."""
    shown = Table(title=f"weights by turn, iteration {one['iteration']}")
    for column in ("turn", "episodes", "mean", "spread"):
        shown.add_column(_COLUMNS.get(column, column))
    for each in one["by_turn"]:
        shown.add_row(str(each["turn"]), str(each["n"]), _number(each["mean"]), _number(each["spread"]))
    results.print(shown)


def _print_comparison(found: Mapping[str, Any], name: str, other: str) -> None:
    """Print how far two credits agree, and the turns on which they disagree most."""
    from perturn.report.credit_figures import sentences

    for sentence in sentences(found, name, other):
        results.print(sentence, markup=False, soft_wrap=True)
    shown = Table(title="turns whose ranks differ most between the two credits")
    for column in ("task", "sample", "turn", "action", escape(name), escape(other)):
        shown.add_column(column)
    for each in found["disagreements"]:
        action = escape(each["action"].strip().splitlines()[-1][-80:] if each["action"].strip() else "")
        cells = [_number(value) for value in each["weights"]]
        shown.add_row(escape(each["task"]), str(each["sample"]), str(each["turn"]), action, *cells)
    results.print(shown)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


@command(
    "check-credit",
    "rloo",
    "gigpo gamma=1.0 statistics=steps",
    "anchor-rloo gamma=0.9 --json",
    "my_package.my_credit:MyCredit",
    "trl:grpo scale_rewards=none",
    codes="0 measured; 1 the credit declares that it is unbiased, and is not.",
    panel="Prepare",
)
def check_credit(
    credit: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A name from `perturn list credits`, your own MODULE:CLASS, or LIBRARY:ESTIMATOR.",
        ),
    ],
    overrides: Overrides = None,
    discount: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Discount of the return; default: gamma, or 1."),
    ] = None,
    agent_credit_bench: Annotated[
        bool,
        typer.Option("--agent-credit-bench", help="Measure on the processes of AgentCreditBench instead."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure the exact bias and noise of a credit."""
    with at_work(f"measuring {credit}"):
        found = _measure(credit, overrides or [], discount, agent_credit_bench)
    if as_json:
        say_json(found)
    else:
        _print(found)
    if found["claims_unbiased"] and not found["unbiased"]:
        raise typer.Exit(1)


def _measure(name: str, overrides: list[str], discount: float | None, of_benchmark: bool) -> dict[str, Any]:
    from perturn.config.overrides import apply_overrides

    section: dict[str, Any] = {}
    apply_overrides(section, overrides)
    given = {f"name={section.get('name')}": "name" in section}
    check_belongs(given, False, "the first argument", "write perturn check-credit NAME")
    section["name"] = name
    released = locate("perturn.adapters.released_estimators:is_released")(name)
    where = (
        "adapters.released_estimators:released_estimator"
        if released
        else "training.credit_choice:make_credit"
    )
    made = locate(f"perturn.{where}")(section)
    ground = "benchmark_processes:AGENT_CREDIT_BENCH" if of_benchmark else "processes:PROCESSES"
    processes = locate(f"perturn.credit_check.{ground}")
    measured = locate("perturn.credit_check.meter:summary")
    with guarded(f"credit {name!r} cannot be measured", passes=(PerturnError,)):
        summary: dict[str, Any] = measured(name, made, discount, processes)
    return summary | ({"library": made.library} if released else {})


def _print(found: dict[str, Any]) -> None:
    columns = {"cosine": ".4f", "scale": ".4f", "relative_bias": ".3g", "noise": ".2f"}
    shown = Table(
        title=f"{found['credit']}, against the gradient of the return with discount {found['gamma']:g}",
        caption="group: episodes in a group; scale: factor of the expected gradient on the true gradient; relative "
        "bias: error that remains after dividing by this factor; noise: standard deviation of one group's gradient, "
        "relative to its mean",
    )
    for column in ("process", "group", *columns):
        shown.add_column(column.replace("_", " "))
    for one in found["measurements"]:
        cells = ["-" if one[key] is None else format(one[key], form) for key, form in columns.items()]
        shown.add_row(one["process"], str(one["trajectories"]), *cells)
    claim = "says that it is unbiased" if found["claims_unbiased"] else "does not say that it is unbiased"
    results.print(f"{found['credit']} {claim}; measured: {'unbiased' if found['unbiased'] else 'biased'}")
    results.print(shown)
    for note in found["notes"]:
        results.print(note, soft_wrap=True)
    if "library" in found:
        results.print(
            f"{found['library']}, on a batch of one group, with one token for each turn", soft_wrap=True
        )
