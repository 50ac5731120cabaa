"""The command that measures a credit: check-credit."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from perturn.cli._base import AsJson, Overrides, command, results, say_json
from perturn.envs.load import load_object
from perturn.errors import ConfigError
from perturn.settings.recipe import apply_overrides, build
from perturn.table import locate
from perturn.tables import table


@command(
    "check-credit",
    "rloo",
    "gigpo gamma=1.0 statistics=steps",
    "anchor-rloo gamma=0.9 --json",
    "my_package.my_credit:MyCredit",
    codes="0 measured; 1 it says that it is unbiased and is not.",
    panel="Prepare",
)
def check_credit(
    credit: Annotated[
        str,
        typer.Argument(
            metavar="NAME-or-MODULE:CLASS", help="A name from `perturn list credits`, or your own."
        ),
    ],
    overrides: Overrides = None,
    discount: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Discount of the true objective; else the credit's own gamma, or 1."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how biased and how noisy a credit is, exactly, on small decision processes."""
    found = _measure(credit, overrides or [], discount)
    if as_json:
        say_json(found)
    else:
        _print(found)
    if found["claims_unbiased"] and not found["unbiased"]:
        raise typer.Exit(1)


def _measure(name: str, overrides: list[str], discount: float | None) -> dict[str, Any]:
    section: dict[str, Any] = {"name": name}
    apply_overrides(section, overrides)
    credits = {name: load_object(name)} if ":" in name else table("credits")
    made = build(credits, section, "credit")
    try:
        summary: dict[str, Any] = locate("perturn.credit.meter:summary")(name, made, discount)
    except Exception as error:  # a credit is code of others
        raise ConfigError(f"credit {name!r} cannot be measured: {type(error).__name__}: {error}") from error
    return summary


def _print(found: dict[str, Any]) -> None:
    columns = {"cosine": ".4f", "scale": ".4f", "relative_bias": ".3g", "noise": ".2f"}
    shown = Table(
        title=f"{found['credit']}, against the gradient of the return with discount {found['gamma']:g}",
        caption="relative bias: what no learning rate makes up for; noise: standard deviation of one group's gradient, "
        "relative to the mean",
    )
    for column in ("process", "group", *columns):
        shown.add_column(column.replace("_", " "))
    for one in found["measurements"]:
        cells = ["-" if one[key] is None else format(one[key], form) for key, form in columns.items()]
        shown.add_row(one["process"], str(one["trajectories"]), *cells)
    results.print(shown)
    claim = "says that it is unbiased" if found["claims_unbiased"] else "does not say that it is unbiased"
    results.print(f"{found['credit']} {claim}; measured: {'unbiased' if found['unbiased'] else 'biased'}")
