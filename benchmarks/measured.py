r"""What `perturn measure` found of a run, as rows to keep and as the tables of docs/results/measure.md.

    python benchmarks/measured.py runs/alfworld/measure/measured.json --name alfworld

Writes studies/results/measure/NAME.json, without the single episodes, and the table between the marks of that name on
the page.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results" / "measure.md"
COLUMNS = {
    "correlation": "correlation",
    "auc": "AUC, A > 0",
    "lost_auc": "AUC, lost turn",
    "loss_found": "loss found",
    "cosine": "cosine",
    "signal_to_noise": "signal to noise",
}


def cell(estimate: Any) -> str:
    """An estimate with its interval."""
    if not estimate:
        return "–"
    mean, low, high = ("?" if each is None else f"{each:.2f}" for each in estimate)
    return f"{mean} [{low}, {high}]".replace("-", "−")


def table(found: dict[str, Any]) -> str:
    """The counts, the scores of each credit, and what may be said, as Markdown."""
    world = found["world"]
    lines = [
        f"{found['measured']} turns of {found['episodes']} episodes and {found['tasks']} tasks, "
        f"{found['continuations']} continuations from each of {found['points']} points ({found['turns_played']} turns "
        f"played, {found['came_elsewhere']} of {found['played']} did not come back). The world is {world['kind']}: "
        f"{world['came_back']} of {world['episodes']} episodes went as before.",
        "",
        f"| credit | {' | '.join(COLUMNS.values())} | cost |",
        "|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    for name, row in found["credits"].items():
        cells = " | ".join(cell(row.get(key)) for key in COLUMNS)
        lines.append(
            f"| {name if name == 'measured advantage' else f'`{name}`'} | {cells} | {row['cost']:.1f} |"
        )
    said = [f"- {each}" for each in found["sentences"]] or ["No interval is narrow enough for a sentence."]
    left = ", ".join(f"`{name}`" for name in found["left_out"])
    return "\n".join(
        [*lines, "", *said, *(["", f"Left out, since the run lacks what they read: {left}."] if left else [])]
    )


def main() -> None:
    """Write the rows and the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measured", type=Path)
    parser.add_argument("--name", required=True)
    given = parser.parse_args()
    found = json.loads(given.measured.read_text(encoding="utf-8"))
    found.pop("by_episode")
    rows = ROOT / "studies" / "results" / "measure" / f"{given.name}.json"
    rows.parent.mkdir(parents=True, exist_ok=True)
    rows.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    mark, page = f"<!-- {given.name} -->", PAGE.read_text(encoding="utf-8")
    before, _, after = page.split(mark)
    PAGE.write_text(f"{before}{mark}\n{table(found)}\n{mark}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
