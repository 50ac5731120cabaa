"""The table on the page about verdicts has the numbers of the file, and commands of the page about studies work."""

import json
import re
from pathlib import Path

from perturn.study.settings import read_study

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


def test_the_commands_of_the_page_fit_its_study(tmp_path):
    """Settings of the example, and the seeds of a study in parts."""
    page = (ROOT / "docs/how-to/study.md").read_text(encoding="utf-8")
    (tmp_path / "my-study.yaml").write_text(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    line = re.search(r"^perturn study my-study.yaml (seeds=.*) --workers 2$", page, re.MULTILINE)[1]
    parts = re.findall(r"seeds=[\[\d,]+\]", page.partition("A long study in parts")[2].partition("\n- **")[0])

    for words in (line.split(), *([part] for part in parts)):
        study, _ = read_study(tmp_path / "my-study.yaml", words)
        assert set(study.tune.seeds) <= set(study.seeds)
    assert len(parts) == 2
