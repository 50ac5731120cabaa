"""Measure every line of the table of docs/credits.md anew, and write the figures into it.

    python benchmarks/credits.py

A line is a credit, its settings, the relative bias on each process with groups of three, and the scale and the noise on
the loop. To add a line, write its first two cells.
"""

import re
from pathlib import Path

from perturn.credit import CREDITS
from perturn.credit.meter import Measurement, measure
from perturn.credit.processes import PROCESSES
from perturn.settings.recipe import apply_overrides, build

PAGE = Path(__file__).parents[1] / "docs" / "credits.md"
MARK = "<!-- bias -->"


def figures(name: str, words: list[str]) -> list[str]:
    """Return the cells of a line."""
    section = {"name": name}
    apply_overrides(section, words)
    credit = build(CREDITS, section, "credit")
    found = [measure(credit, process, 3) for process in PROCESSES]
    return [*map(bias, found), f"{found[0].scale:.3f}", f"{found[0].noise:.2f}"]


def bias(found: Measurement) -> str:
    """Return the cell of a process."""
    if found.relative_bias <= 1e-9:
        return "0"
    return "wrong sign" if found.cosine < 0 else f"{found.relative_bias:.3f}"


def fill(line: str) -> str:
    """Return a line with its figures."""
    if not line.startswith("| `"):
        return line
    name, words = [cell.strip() for cell in line.strip("|").split("|")][:2]
    cells = figures(name.strip("`"), re.findall(r"`([^`]*)`", words))
    return f"| {' | '.join([name, words, *cells])} |"


def main() -> None:
    """Write the page."""
    before, table, after = PAGE.read_text(encoding="utf-8").split(MARK)
    PAGE.write_text(MARK.join([before, "\n".join(map(fill, table.split("\n"))), after]), encoding="utf-8")


if __name__ == "__main__":
    main()
