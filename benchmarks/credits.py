"""Measure every line of the table of docs/methods/bias.md anew, and write the figures into it.

    python benchmarks/credits.py
    python benchmarks/credits.py --cost

A line is a credit, its settings, the relative bias on each process with groups of three, and the scale and the noise on
the loop. To add a line, write its first two cells. With --cost, print the seconds that each credit takes instead: for
1000 episodes of 20 turns in groups of 8, for as many turns in episodes of 200, and in groups of 64.
"""

import random
import re
import sys
import time
from pathlib import Path

from perturn.config.parsing import apply_overrides, build
from perturn.credit import CREDITS
from perturn.credit_check.meter import Measurement, measure
from perturn.credit_check.processes import PROCESSES
from perturn.methods.archer.archer_credit import Critique
from perturn.methods.siop.siop_credit import OwnAnswer
from perturn.needs import keyword, names_of
from perturn.types import Action, Task, Trajectory, Turn

PAGE = Path(__file__).parents[1] / "docs" / "methods" / "bias.md"
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


def episodes(groups: int, size: int, turns: int) -> list[list[Trajectory]]:
    """Return groups drawn at random, whose states are visited again and again."""
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
    """Return how long a credit takes for all groups."""
    credit = CREDITS[name]()
    given = {
        "values": lambda turns: [0.5] * turns,
        "tool-matches": lambda turns: [(0.5, 1.0)] * turns,  # two calls a turn
        "answer": lambda turns: [-0.5] * (turns + 1),
        "branch-returns": lambda turns: [0.5] * turns,
        "feedback": lambda turns: [0.5] * turns,
        "contributions": lambda turns: [0.05] * turns,
        "critics": lambda turns: Critique([[0.5] * turns] * 2, [[0.25] * turns] * 2),
        "progress": lambda turns: [[-0.5] * 10] * turns,
        "reference": lambda turns: [[-0.6] * 10] * turns,
        "answer-clusters": lambda turns: OwnAnswer(0, [[-0.5] * 3] * (turns + 1)),
    }
    needed = [
        {keyword(name): [given[name](len(one.turns)) for one in group] for name in names_of(credit.needs)}
        for group in groups
    ]
    start = time.perf_counter()
    for group, its in zip(groups, needed, strict=True):
        credit(group, **its)
    return time.perf_counter() - start


def print_cost() -> None:
    """Print the seconds of each credit of a group."""
    sizes = [episodes(125, 8, 20), episodes(12, 8, 208), episodes(16, 64, 20)]
    for name in CREDITS.keys() - {"uniform", "confidence", "discount", "first-error", "process-score"}:
        print(f"{name:14}", *(f"{seconds(name, each):6.3f}" for each in sizes))


def main() -> None:
    """Write the page, or print the cost."""
    if "--cost" in sys.argv:
        print_cost()
        return
    before, table, after = PAGE.read_text(encoding="utf-8").split(MARK)
    PAGE.write_text(MARK.join([before, "\n".join(map(fill, table.split("\n"))), after]), encoding="utf-8")


if __name__ == "__main__":
    main()
