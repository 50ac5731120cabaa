"""Put the findings of `perturn measure` into docs/results/measure.md, and draw their figures.

    python docs/measured.py             writes the page and the figures
    python docs/measured.py --check     writes nothing; fails where either is not what the rows say

Each block `<!-- measure NAME -->` ... `<!-- end -->` gets what `studies/results/measure/NAME.json` holds, which
`benchmarks/measured.py` keeps of a run, and `<!-- predicts NAME -->` ... `<!-- end -->` the rank correlations of its
scores with what training gained. `<!-- agree NAME OTHER -->` ... `<!-- end -->` gets the rank correlations between the
scores of two measurements.
"""

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, cast

import predicts
from forest_plot import STEP, TOP, WIDTH, opening
from generated_files import write_or_check

from perturn.report.score_headings import OF_GRADIENTS, OF_TURNS

PAGE, FIGURES = "results/measure.md", "figures/measure"
_LEARNING = re.compile(r"<!-- predicts (\S+) -->.*?<!-- end -->", re.DOTALL)
_AGREEMENT = re.compile(r"<!-- agree (\S+) (\S+) -->.*?<!-- end -->", re.DOTALL)
_BLOCK = re.compile(r"<!-- measure (\S+) -->.*?<!-- end -->", re.DOTALL)
_SENTENCE = re.compile(
    r"On \S+, (?P<name>.+?) (?P<claim>(?:finds|tells|ranks|points) .+) \(\w+ (?P<number>.+)\)\."
)
DRAWN, NULL = "lost_auc", 0.5
"""Score with a forest plot, and what a credit has that knows nothing."""
TITLE = "AUC of the turn that lost a failed episode"


def outputs(page: str, rows: Path) -> dict[str, str]:
    """Return the page and its figures by their path under `docs`.

    Args:
        page: Markdown of the page.
        rows: Folder of the findings.

    Raises:
        OSError: If the findings of a block are missing.
    """
    found: dict[str, str] = {}

    def stored(name: str) -> dict[str, Any]:
        text = (rows / f"{name}.json").read_text(encoding="utf-8")
        return cast("dict[str, Any]", json.loads(text))

    def filled(match: re.Match[str]) -> str:
        name = match[1]
        known = stored(name)
        drawn = {credit: row[DRAWN] for credit, row in known["credits"].items() if whole(row.get(DRAWN))}
        found[f"{FIGURES}/{name}.svg"] = forest(TITLE, drawn, NULL)
        return f"<!-- measure {name} -->\n{block(name, known)}\n<!-- end -->"

    def ranked(match: re.Match[str]) -> str:
        return f"<!-- predicts {match[1]} -->\n{predicts.table(stored(match[1]), rows.parent)}\n<!-- end -->"

    def agreed(match: re.Match[str]) -> str:
        one, other = match.groups()
        return f"<!-- agree {one} {other} -->\n{predicts.agreement(stored(one), stored(other))}\n<!-- end -->"

    return {PAGE: _AGREEMENT.sub(agreed, _LEARNING.sub(ranked, _BLOCK.sub(filled, page))), **found}


_DIFFERS = " Explored episodes got different answers to one action after one history."


def block(name: str, found: dict[str, Any]) -> str:
    """Return the counts, the scores of each credit, the figures, and what may be said, as Markdown."""
    world = found["world"]
    parts = [
        f"{found['environment']}: {found['measured']} turns of {found['episodes']} episodes of {found['tasks']} tasks; "
        f"{found['continuations']} continuations from each of {found['points']} points, {found['turns_played']} turns "
        f"in all. {found['came_elsewhere']} of {found['played']} continuations did not return to the state of their "
        f"point, and {found['failed']} failed. The environment is {world['kind']}: of {world['episodes']} replayed "
        f"episodes, {world['came_back']} gave the same observations, and {world['under_another_seed']} also under "
        f"another seed.{_DIFFERS if world.get('answers_differ') else ''}",
        table(found, OF_TURNS, cost=False),
        f"![{TITLE}: estimate and 95 % interval of each credit, and a line at chance](../{FIGURES}/{name}.svg)",
    ]
    if found["gradients"]:
        parts.append(table(found, OF_GRADIENTS, cost=True))
        parts += withheld(found)
    said = [f"| {claim} | {', '.join(names)} |" for claim, names in claims(found["sentences"]).items()]
    parts.append(
        "\n".join(["| what the intervals allow to say | credits |", "|---|---|", *said])
        if said
        else "No interval is narrow enough for a sentence."
    )
    if found["left_out"]:
        parts.append(
            f"Left out, since the run lacks what they read: {', '.join(f'`{n}`' for n in found['left_out'])}."
        )
    return "\n\n".join(parts)


def withheld(found: dict[str, Any]) -> list[str]:
    """Return why a row has no figure that the others have, a sentence each."""
    return [
        f"The {name} has no {OF_GRADIENTS[figure]}: {why}."
        for name, row in found["credits"].items()
        for figure, why in row.get("withheld", {}).items()
    ]


def claims(sentences: Sequence[str]) -> dict[str, list[str]]:
    """Return the credits of which each claim is made, with their numbers."""
    found: dict[str, list[str]] = {}
    for sentence in sentences:
        said = _SENTENCE.fullmatch(sentence)
        assert said, sentence
        number = said["number"].replace("-", "−")
        found.setdefault(said["claim"].capitalize(), []).append(f"{said['name']} {number}")
    return found


def table(found: dict[str, Any], columns: dict[str, str], *, cost: bool) -> str:
    """Return scores of each credit that has any of them."""
    heads = [*columns.values(), *(["cost"] if cost else [])]
    lines = [f"| credit | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    for name, row in found["credits"].items():
        cells = [cell(row.get(key)) for key in columns]
        if set(cells) != {"–"}:
            cells += [f"{row['cost']:.1f}"] if cost else []
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(estimate: Any) -> str:
    """Return an estimate with its interval, unless it is exact; "–" if it has none."""
    if not estimate or estimate[1] is estimate[2] is None:
        return "–"
    mean, low, high = ("?" if each is None else f"{each:.2f}" for each in estimate)
    return (
        (mean if estimate[1] == estimate[2] else f"{mean} [{low}, {high}]")
        .replace("-0.00", "0.00")
        .replace("-", "−")
    )


def whole(estimate: Any) -> bool:
    """Whether an estimate is there with both ends, which differ."""
    return bool(estimate) and None not in estimate and estimate[1] != estimate[2]


LEFT, RIGHT = 200, 170


def forest(title: str, rows: dict[str, Sequence[float]], null: float) -> str:
    """Draw one mark per credit with its interval, the largest first, and a line at what knows nothing."""
    ordered = sorted(rows.items(), key=lambda row: -row[1][0])
    low = min([null, *(row[1] for _, row in ordered)])
    high = max([null, *(row[2] for _, row in ordered)])
    bottom = TOP + STEP * len(ordered)

    def x(value: float) -> str:
        return f"{LEFT + (value - low) * (WIDTH - LEFT - RIGHT) / (high - low or 1):.1f}"

    parts = list(opening(title, x(null), bottom, bottom + 34))
    for index, (name, row) in enumerate(ordered):
        y = TOP + STEP * index + STEP // 2
        parts += [
            f'<text x="{LEFT - 14}" y="{y + 4}" text-anchor="end">{escape(name)}</text>',
            f'<line class="line" x1="{x(row[1])}" x2="{x(row[2])}" y1="{y}" y2="{y}"/>',
            f'<circle class="mark" cx="{x(row[0])}" cy="{y}" r="5"/>',
            f'<text class="soft" x="{WIDTH}" y="{y + 4}" text-anchor="end">{cell(row)}</text>',
        ]
    parts += [
        f'<text class="soft" x="{x(null)}" y="{bottom + 16}" text-anchor="middle">{null:g}</text>',
        f'<text class="soft" x="{WIDTH}" y="{bottom + 16}" text-anchor="end">{escape(title)}</text></svg>',
    ]
    return "\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> str | None:
    """Write the page and its figures; return the text of the first error, or None."""

    def made(root: Path) -> dict[str, str]:
        page = (root / "docs" / PAGE).read_text(encoding="utf-8")
        return outputs(page, root / "studies/results/measure")

    return write_or_check("measured.py", __doc__, made, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
