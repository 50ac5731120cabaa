"""Measure the rows of the table in docs/methods/bias.md that have no figures yet, and write each row at once.

    python benchmarks/credits.py
    python benchmarks/credits.py --anew
    python benchmarks/credits.py --cost

A row has a credit, its settings, the relative bias on each process with groups of three, and the scale and the noise on
the process `loop`. To add a row, write its first two cells. With --anew, the figures of all rows are removed first.
After an interruption, call the command again without --anew. With --cost, the command prints the seconds that each
credit takes instead: for 1000 episodes of 20 turns in groups of 8, for equally many turns in episodes of about 200, and
in groups of 64.
"""

import random
import re
import sys
import time
from pathlib import Path

from perturn.config.overrides import apply_overrides
from perturn.config.parsing import build
from perturn.credit import CREDITS
from perturn.credit.protocol import TurnCredit
from perturn.credit_check.meter import Measurement, measure
from perturn.credit_check.processes import PROCESSES
from perturn.credit_check.stand_ins import stand_ins
from perturn.io.atomic_write import write_whole
from perturn.needs import keyword, name_of, names_of
from perturn.types import Action, Task, Trajectory, Turn

PAGE = Path(__file__).parents[1] / "docs" / "methods" / "bias.md"
MARK = "<!-- bias -->"


def figures(name: str, words: list[str]) -> list[str]:
    """Measure a credit, and return the cells of its row."""
    section = {"name": name}
    apply_overrides(section, words)
    credit = build(CREDITS, section, "credit")
    found = [measure(credit, process, 3) for process in PROCESSES]
    return [*map(bias, found), f"{found[0].scale:.3f}", f"{found[0].noise:.2f}"]


def bias(found: Measurement) -> str:
    """Return the cell for a process."""
    if found.relative_bias <= 1e-9:
        return "0"
    return "wrong sign" if found.cosine < 0 else f"{found.relative_bias:.3f}"


def cells_of(line: str) -> list[str]:
    """Return the cells of a credit's row; an empty list for any other line."""
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("| `") else []


def written(cells: list[str]) -> str:
    """Return the row with these cells."""
    return f"| {' | '.join(cells)} |"


def fill(anew: bool) -> None:
    """Measure the rows without figures, and write the page after each row."""
    before, table, after = PAGE.read_text(encoding="utf-8").split(MARK)
    lines = table.split("\n")
    for index, line in enumerate(lines):
        if anew and (cells := cells_of(line)):
            lines[index] = written(cells[:2])
    for index, line in enumerate(lines):
        cells = cells_of(line)
        if cells and not any(cells[2:]):
            name, words = cells[:2]
            lines[index] = written([name, words, *figures(name.strip("`"), re.findall(r"`([^`]*)`", words))])
            print(lines[index], flush=True)
            write_whole(PAGE, MARK.join([before, "\n".join(lines), after]))


def episodes(groups: int, size: int, turns: int) -> list[list[Trajectory]]:
    """Return random groups whose episodes visit the same states repeatedly."""
    draw = random.Random(0)
    return [
        [
            Trajectory(
                Task(f"task {group}"),
                tuple(
                    Turn((), Action("go"), valid=draw.random() < 0.7, state_key=f"{draw.randrange(10)}")
                    for _ in range(turns)
                ),
                total_reward=float(draw.random() < 0.5),
                sample=sample,
            )
            for sample in range(size)
        ]
        for group in range(groups)
    ]


def seconds(name: str, groups: list[list[Trajectory]]) -> float:
    """Return the seconds that a credit takes for all groups."""
    credit = CREDITS[name]()
    needed = [{keyword(name_of(need)): stand_ins(need, group) for need in credit.needs} for group in groups]
    start = time.perf_counter()
    for group, its in zip(groups, needed, strict=True):
        credit(group, **its)
    return time.perf_counter() - start


def print_cost() -> None:
    """Print the seconds of each group credit."""
    sizes = [episodes(125, 8, 20), episodes(12, 8, 208), episodes(16, 64, 20)]
    for name, credit in CREDITS.items():
        if isinstance(credit(), TurnCredit) or "distance" in names_of(credit().needs):
            continue
        print(f"{name:14}", *(f"{seconds(name, each):6.3f}" for each in sizes))


def main() -> None:
    """Write the page, or print the cost."""
    if "--cost" in sys.argv:
        print_cost()
        return
    fill("--anew" in sys.argv)


if __name__ == "__main__":
    main()
