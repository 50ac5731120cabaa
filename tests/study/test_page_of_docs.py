"""The table on the page about verdicts has the numbers of the file."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_of_errors_has_the_numbers_of_the_file():
    rows = json.loads((ROOT / "benchmarks/verdicts.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/verdicts.md").read_text(encoding="utf-8")

    expected = [
        f"| {row['seeds']} × {row['tasks']} | {row['luck']} | {100 * row['differs']:.1f} % | {row['level']:.3f} "
        f"| {row['level_tasks']:.2f} | {row['level_bootstrap']:.2f} | {row['coverage']:.2f} "
        f"| {row['half_width']:.1f} | {row['seen']:.1f} |"
        for row in rows
    ]

    assert len(rows) == 21
    assert [
        line for line in page.splitlines() if " × " in line and line.startswith("| ") and "luck" not in line
    ][-len(rows) :] == expected
