"""The audit in the terminal."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console
from rich.table import Table

_SHOWN = 10
"""Reasons to refuse rows that are listed."""

_LINES = 5
"""Lines that are named of rows refused for one reason."""

_VARIES = re.compile(r"'[^']*'|\d+")
"""The parts of a reason that depend on the row: numbers, and names in quotes."""

_OUTCOMES = {
    "failed": "its episode failed",
    "no_expert": "no successful expert episode of its task",
    "no_turns": "it has no turns",
    "identical": "it did what the expert did",
    "tie": "it scored what the expert scored",
    "better_than_expert": "it scored more than the expert",
    "gap": "its score is not far enough below the expert's (pair.threshold)",
    "kept": "kept as a pair",
    "cut": "of the kept: cut at pair.max_extra_turns",
}


def print_audit(found: dict[str, Any], console: Console) -> None:
    """Print what `audit` found, the worst last."""
    console.print(
        f"{found['data']} for {found['model']}, max_length {found['max_length'] or 'not set'}, "
        f"context {found['context'] or 'unknown'}",
        soft_wrap=True,
    )
    for name, part in found["parts"].items():
        _print_part(name, part, console)
    for side, weights in found.get("weights", {}).items():
        console.print(
            f"weights, {side}: {weights['turns']} turns, mean confidence {weights['mean_confidence']:.2f}, mean "
            f"weight {weights['mean_weight']:.2f}, {weights['highest_weight_share']:.0%} at the highest",
            soft_wrap=True,
        )
    if "tasks" in found:
        tasks = found["tasks"]
        console.print(
            f"expert episodes without success, which nobody is taught: {tasks['unsuccessful_expert']}; "
            f"evaluated tasks that are trained on too: {tasks['evaluated_and_trained']}",
            style="red" if tasks["evaluated_and_trained"] else None,
            soft_wrap=True,
        )
    if "pairing" in found:
        console.print("explored trajectories, under the recipe's pair settings:")
        for reason, count in found["pairing"].items():
            if count:
                console.print(f"  {count:6d}  {_OUTCOMES.get(reason, reason)}")
    _print_template(found["template"], console)
    refused = found["refused"]
    console.print(f"rows that training would refuse: {len(refused)}", style="red" if refused else "green")
    groups = _equal_reasons(refused)
    for rows in groups[:_SHOWN]:
        console.print(f"  {_lines(rows)}: {rows[0]['reason']}", markup=False, soft_wrap=True)
    if len(groups) > _SHOWN:
        more = sum(map(len, groups[_SHOWN:]))
        console.print(f"  and {more} more for other reasons (--json lists all)")


def _equal_reasons(refused: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Rows of one file that are refused for reasons which differ in numbers and names alone, by the first of them."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in refused:
        groups.setdefault((row["part"], _VARIES.sub("", row["reason"])), []).append(row)
    return list(groups.values())


def _lines(rows: list[dict[str, Any]]) -> str:
    """Part and lines of rows, the first of them if they are many."""
    part, first = rows[0]["part"], [str(row["row"]) for row in rows[:_LINES]]
    if len(rows) == 1:
        return f"{part}, line {first[0]}"
    return f"{part}, {len(rows)} rows, lines {', '.join(first)}{' and more' if len(rows) > _LINES else ''}"


def _print_part(name: str, part: dict[str, Any], console: Console) -> None:
    share = part["loss_tokens"] / max(part["tokens"], 1)
    console.print(
        f"{name}: {part['rows']} rows, {part['usable']} usable, {part['trajectories']} trajectories, {part['turns']} "
        f"turns; {part['tokens']} tokens, {part['loss_tokens']} carry loss ({share:.1%})",
        style="bold",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    for column in ("  length in", "min", "median", "p90", "p99", "max"):
        table.add_column(column, justify="right" if column.isalnum() else "left")
    for what, says in (
        ("tokens", "tokens of a trajectory"),
        ("turns", "turns of a trajectory"),
        ("tokens_of_a_turn", "loss tokens of a turn"),
    ):
        table.add_row(f"  {says}", *(f"{value:.0f}" for value in part["lengths"][what].values()))
    console.print(table)
    cut, same = part["cut"], part["duplicates"]
    where = f", such as in line {', '.join(map(str, cut['rows']))}" if cut["rows"] else ""
    console.print(
        f"  cut at {cut['limit']} tokens: {cut['turns']} turns, from the end of {cut['trajectories']} "
        f"trajectories{where}",
        soft_wrap=True,
    )
    lines = f", such as {', '.join(f'{a} and {b}' for a, b in same['examples'])}" if same["examples"] else ""
    console.print(
        f"  the same rows again: {same['rows']}{lines}; chosen sides used again: {same['chosen_used_again']}",
        soft_wrap=True,
    )


def _print_template(template: dict[str, Any], console: Console) -> None:
    for problem in template["problems"]:
        console.print(f"chat template: {problem}", style="red", markup=False, soft_wrap=True)
    for entry in template["control_tokens"]:
        console.print(
            f"control tokens: {entry['part']}, line {entry['row']}, turn {entry['turn']}: the observation holds "
            f"{', '.join(entry['tokens'])}, which the tokenizer does not read as text",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )
    if template["not_as_sampled"]:
        console.print(
            f"actions whose text is not what their token ids say: {template['not_as_sampled']} "
            "(training takes the ids)",
            style="yellow",
        )
