"""The tables of a study in Markdown, to be put into a page of documentation; made from its summary alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from perturn.analysis.number_text import protocol_line
from perturn.study.cells import point_text
from perturn.study.tables.verdict_text import WORDS, p_value, points

_SIZE = "tasks × seeds"
_COMPARED = ("p (Holm)", "smallest visible", "verdict")
_BAR = r"\|"
"""A bar that ends no cell."""
_TAG = re.compile(r"<(?=[\w/!?])")
"""The beginning of HTML."""


def tables(summary: Mapping[str, Any]) -> str:
    """Each environment of a study: its methods, the further comparisons, and what to know of the numbers.

    Args:
        summary: The study's numbers, as `verdicts.summarize` gives them.

    Returns:
        Markdown without headings, so that it fits below any.
    """
    parts = [
        part
        for name, found in summary["environments"].items()
        for part in _environment(name, found, summary["baseline"])
    ]
    failed, waiting = summary["cells"]["failed"], summary["cells"]["to do"]
    if failed or waiting:
        parts.append(f"Not finished: {failed} cells have failed, {waiting} are to do.")
    return "\n\n".join(parts) + "\n"


def _environment(name: str, found: Mapping[str, Any], baseline: str) -> Iterator[str]:
    """The parts of an environment, which empty lines part."""
    protocol = f": {protocol_line(found['protocol'])}" if found["protocol"] else ""
    yield _plain(f"**{name}**{protocol}.")
    for measure in found["measures"]:
        level, unit = ("success, %", "points") if measure == "success" else (measure, measure)
        rows = [_method(row, measure, baseline) for row in found["methods"]]
        yield _table(("method", "point", _SIZE, level, f"against {baseline}, {unit}", *_COMPARED), rows)
        if found["further"]:
            rows = [_further(row, measure) for row in found["further"]]
            yield _table(("A against B", _SIZE, f"A − B, {unit}", *_COMPARED), rows)
    yield _reading(found["comparisons"], len(found["measures"]))
    if found["notes"]:
        yield "\n".join(f"- {_plain(note)}" for note in found["notes"])


def _reading(comparisons: int, measures: int) -> str:
    """How the numbers are to be read."""
    count = f"{comparisons} {'comparison' if comparisons == 1 else 'comparisons'}"
    each = ", each measure by itself" if measures > 1 else ""
    return (
        "95 % intervals and p are for other seeds and other tasks, differences paired by task and seed; p is corrected "
        f"by Holm for {count}{each}. Smallest visible: the true difference that would have been found four times in "
        "five."
    )


def _method(row: Mapping[str, Any], measure: str, baseline: str) -> list[str]:
    """A method: its mean, and its comparison with the baseline."""
    found = row[measure]
    verdict = "baseline" if row["method"] == baseline else "–" if row["episodes"] else "no episode"
    return [
        row["method"],
        point_text(row["point"]),
        _size(row["tasks"], len(row["seeds"]), row["bases"]),
        "–" if found["mean"] is None else _estimate(found["mean"], found["interval"], measure, _level),
        *_comparison(found["against"], measure, verdict),
    ]


def _further(row: Mapping[str, Any], measure: str) -> list[str]:
    """A comparison of two methods."""
    found = row[measure]
    size = _size(found["tasks"], len(found["seeds"]), len(found["seeds_by_base"])) if found else "–"
    return [f"{row['method']} against {row['other']}", size, *_comparison(found, measure, "not compared")]


def _comparison(found: Mapping[str, Any] | None, measure: str, verdict: str) -> list[str]:
    """Difference, p, the smallest difference and the verdict, which is given where nothing is compared."""
    if found is None:
        return ["–", "–", "–", verdict]
    smallest = found["smallest_difference"]
    return [
        _estimate(found["mean_difference"], found["interval"], measure, _signed),
        p_value(found["p_value_holm"]) if found["counted"] else f"{p_value(found['p_value'])}, not corrected",
        "–" if smallest is None else _level(smallest, measure),
        WORDS[found["verdict"]],
    ]


def _size(tasks: int, seeds: int, bases: int) -> str:
    own = f", {bases} base{'' if bases == 1 else 's'}" if bases < seeds else ""
    return f"{tasks} × {seeds}{own}"


def _estimate(
    mean: float, ends: Sequence[float | None], measure: str, said: Callable[[float | None, str], str]
) -> str:
    """A number with its interval."""
    low, high = (said(end, measure) for end in ends)
    return f"{said(mean, measure)} [{low}, {high}]"


def _level(value: float | None, measure: str) -> str:
    if value is None:
        return "?"
    return f"{100 * value:.1f}" if measure == "success" else f"{value:.3f}"


def _signed(value: float | None, measure: str) -> str:
    return points(value, measure).replace("-", "−")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first, *others = (
        f"| {' | '.join(_plain(cell).replace('|', _BAR) for cell in line)} |" for line in (head, *rows)
    )
    return "\n".join([first, f"|{'---|' * len(head)}", *others])


def _plain(text: str) -> str:
    """A text in one line, in which nothing is HTML."""
    return _TAG.sub("&lt;", " ".join(text.split()))
