"""Do errors compound? Rows and tables of docs/results/mechanism.md, "Compounding errors".

    python benchmarks/compounding.py measure mine/control/runs   # replays the study's episodes
    python benchmarks/compounding.py tables                      # from the rows

`measure` reads the episodes of `perturn study studies/control.yaml output=mine`, and measures the distance to a success
(`searching`) around each turn. In studies/results/mechanism it writes errors-greedy.parquet (the scored
episodes of the 400 held-out games) and errors-sampled.parquet (the explored episodes of tlm-DRE's first and last
iterations). `tables` writes errors.json there, and prints the tables.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from perturn.data.run_folder import resolve_recipe
from perturn.data.store import read_trajectories
from perturn.run.stages.measure_distance import measured
from perturn.stats import Estimate, crossed_interval, jackknife
from perturn.types import Trajectory, succeeded

ROWS = Path(__file__).parents[1] / "studies" / "results" / "mechanism"
SEEDS, METHODS, SENSE = (0, 1, 2), ("sft", "tlm-dre"), "searching"
ITERATIONS = {"first": (1, 2, 3, 4), "last": (57, 58, 59, 60)}
"""Iterations of tlm-DRE whose explored episodes count as episodes before and after training."""
TURNS = {"1": 1, "2": 2, "3-4": 4, "5-8": 8, "9-16": 16, "17-30": 30}
"""Ranges of turn numbers: the name and the last turn."""

Part = tuple[float, float]  # numerator and denominator of a share


@dataclass(frozen=True)
class Turn:
    """One turn of an episode."""

    policy: str
    seed: int
    task: str
    sample: int
    number: int
    place: tuple[int, int | None]
    """State of the game, and the distance before the turn."""
    wrong: bool
    after_error: bool
    first_visit: bool
    """Whether the episode is in this state for the first time."""
    again: bool
    """Whether the turn before was the episode's first error, and left it in this state, then new to it."""


def measure(runs: Path) -> None:
    """Measure the recorded episodes of a study's runs, and write the rows."""
    greedy, sampled, states = [], [], defaultdict[str, dict[str | None, int]](dict)
    for seed in SEEDS:
        for method in METHODS:
            (folder,) = runs.glob(f"{method}-seed-{seed}-*-test-*")
            greedy += rows_of(folder, ["evaluation/base.jsonl"], method, seed, states)
        (folder,) = (one for one in runs.glob(f"tlm-dre-seed-{seed}-*") if "-test-" not in one.name)
        for name, iterations in ITERATIONS.items():
            files = [f"trajectories/explore-{each:03d}.jsonl" for each in iterations]
            sampled += rows_of(folder, files, name, seed, states)
    for name, rows in (("greedy", greedy), ("sampled", sampled)):
        table = pa.Table.from_pylist(rows)
        pq.write_table(table, ROWS / f"errors-{name}.parquet", compression="zstd", compression_level=19)


def rows_of(
    folder: Path, files: Sequence[str], policy: str, seed: int, states: dict[str, dict[str | None, int]]
) -> list[dict[str, Any]]:
    """Return a row for each episode: the state before each turn, its validity, and the distances around it.

    `states` numbers the states of each game.
    """
    recipe = resolve_recipe(folder)
    episodes = [one for file in files for one in read_trajectories(folder / file)]
    return [
        {
            "policy": policy,
            "seed": seed,
            "task": one.task.id,
            "sample": one.sample,
            "success": succeeded(one),
            "valid": [turn.valid for turn in one.turns],
            "state": [
                states[one.task.id].setdefault(turn.state_key, len(states[one.task.id])) for turn in one.turns
            ],
            "distance": distances(path),
        }
        for one, path in zip(episodes, measured(recipe, episodes, SENSE), strict=True)
    ]


def distances(one: Trajectory) -> list[int | None]:
    """Return the distance to a success before the first turn and after each turn [turns + 1]."""
    found = [turn.remaining for turn in one.turns if turn.remaining]
    return [found[0].before, *(each.after for each in found)]


def turns_of(rows: Iterable[dict[str, Any]]) -> list[Turn]:
    """Return the turns of all episodes."""
    found = []
    for row in rows:
        seen, states = False, set[int]()
        first_error: int | None = None
        path = row["distance"]
        for index, (state, before, after) in enumerate(zip(row["state"], path, path[1:], strict=False)):
            wrong = after is None or (before is not None and after >= before)
            key = (row["policy"], row["seed"], row["task"], row["sample"])
            again = first_error == state
            found.append(Turn(*key, index + 1, (state, before), wrong, seen, state not in states, again))
            first_error = state if wrong and not seen and state not in states else None
            seen = seen or wrong
            states.add(state)
    return found


def rate(turns: Iterable[Turn]) -> dict[tuple[int, str], Part]:
    """Return the number of wrong turns and of turns, by seed and game."""
    found: dict[tuple[int, str], Part] = defaultdict(lambda: (0.0, 0.0))
    for each in turns:
        wrong, count = found[each.seed, each.task]
        found[each.seed, each.task] = (wrong + each.wrong, count + 1)
    return dict(found)


def back(rows: Iterable[dict[str, Any]]) -> dict[tuple[int, str], Part]:
    """Return the number of episodes that recover and of episodes with a wrong turn, by seed and game."""
    found = {}
    for row in rows:
        path = row["distance"]
        wrong = [b is None or b >= a for a, b in pairwise(path)]
        if True in wrong:
            first = wrong.index(True)
            recovers = any(each is not None and each < path[first] for each in path[first + 2 :])
            found[row["seed"], row["task"]] = (float(recovers), 1.0)
    return found


def crossed(terms: Sequence[tuple[float, dict[tuple[int, str], Part]]], tasks: Sequence[str]) -> Estimate:
    """Return a sum of signed shares with an interval for other seeds and other games.

    Each cell of seed and game has the sum plus its influence on it. The mean over cells is the sum, and the interval is
    `crossed_interval` of the cells.
    """
    cells = np.zeros((len(SEEDS), len(tasks)))
    column = {task: index for index, task in enumerate(tasks)}
    for sign, parts in terms:
        over, count = (sum(part[i] for part in parts.values()) for i in (0, 1))
        cells += sign * over / count
        for (seed, task), (own, size) in parts.items():
            cells[SEEDS.index(seed), column[task]] += sign * cells.size * (own - over / count * size) / count
    return crossed_interval(cells.tolist(), bounds=None)


@dataclass(frozen=True)
class Matched:
    """Error rates after an earlier error and without, in one stratum."""

    task: str
    difference: float
    without: float
    weight: float
    after: int
    """Number of turns after an earlier error."""


def strata(turns: Iterable[Turn], key: Callable[[Turn], Hashable]) -> list[Matched]:
    """Return the difference of each stratum with turns of both kinds, with weights of Mantel and Haenszel.

    A turn that is `again` in its state follows a turn without an earlier error there, which was wrong. It is compared
    with the other turns of the stratum, since its own first turn was wrong by selection.
    """
    found: dict[Hashable, list[Turn]] = defaultdict(list)
    for each in turns:
        found[key(each)].append(each)
    matched = []
    for own in found.values():
        after = [each.wrong for each in own if each.after_error]
        without = [each.wrong for each in own if not each.after_error]
        selected = any(each.again for each in own)
        wrong, count = sum(without) - selected, len(without) - selected
        if after and count:
            rates = sum(after) / len(after), wrong / count
            weight = len(after) * count / (len(after) + count)
            matched.append(Matched(own[0].task, rates[0] - rates[1], rates[1], weight, len(after)))
    return matched


def pooled(sets: Sequence[tuple[int, list[Matched]]]) -> Estimate | None:
    """Return the signed sum of weighted mean differences, with a jackknife over games."""
    sign = np.array([sign for sign, own in sets for _ in own])
    value, weight = (
        np.array([getattr(each, name) for _, own in sets for each in own])
        for name in ("difference", "weight")
    )

    def statistic(kept: Any) -> float | None:
        parts = [(one, kept & (sign == one)) for one, _ in sets]
        if not all(weight[mask].sum() for _, mask in parts):
            return None
        return float(sum(one * np.average(value[mask], weights=weight[mask]) for one, mask in parts))

    return jackknife(statistic, [each.task for _, own in sets for each in own])


def levels(own: list[Matched]) -> dict[str, Any]:
    """Return the number of strata and of their turns after an earlier error, and the weighted rate without."""
    without = np.average([each.without for each in own], weights=[each.weight for each in own])
    turns = sum(each.after for each in own)
    return {"strata": len(own), "turns_after": turns, "without": round(float(without), 4)}


PLACE = {
    "greedy": lambda one: (one.task, one.place),  # the three policies of a method
    "sampled": lambda one: (one.seed, one.task, one.place),  # the samples of a group
}
KINDS: dict[str, Callable[[Turn], bool]] = {
    "new": lambda one: one.first_visit,
    "again": lambda one: one.again or (one.first_visit and not one.after_error),
}
"""Compared turns: first visits of a state; or the turn after a first error that left the state as it was, against
first visits without an earlier error."""


def ends(found: Estimate | None, lowest: float = -1.0) -> list[float] | None:
    """Return an estimate and its ends, cut at `lowest` and 1; None without a finite interval."""
    if found is None or not np.isfinite([found.low, found.high]).all():
        return None
    return [round(min(max(each, lowest), 1.0), 4) for each in (found.mean, found.low, found.high)]


def tables_of(name: str) -> dict[str, Any]:
    """Return the rates of a file of rows."""
    rows = pq.read_table(ROWS / f"errors-{name}.parquet").to_pylist()
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    turns = {policy: turns_of(row for row in rows if row["policy"] == policy) for policy in policies}
    found: dict[str, Any] = {}
    for policy in policies:
        own = [row for row in rows if row["policy"] == policy]
        found[policy] = {
            "episodes": len(own),
            "games": len({row["task"] for row in own}),
            "success": round(sum(row["success"] for row in own) / len(own), 4),
            "turns": len(turns[policy]),
            "wrong_and_valid": round(valid_share(own), 4),
        }
    for policy, change in [(each, False) for each in policies] + [("change", True)]:
        signs = [(1, policies[1]), (-1, policies[0])] if change else [(1, policy)]
        sets = {
            kind: [(sign, strata(filter(kept, turns[each]), PLACE[name])) for sign, each in signs]
            for kind, kept in KINDS.items()
        }
        found.setdefault(policy, {})["matched"] = {
            kind: {"difference": ends(pooled(own)), **({} if change else levels(own[0][1]))}
            for kind, own in sets.items()
        }
        if name == "greedy":
            found[policy] |= simple(
                turns, {each: [row for row in rows if row["policy"] == each] for each in policies}, signs
            )
    return found


def valid_share(rows: Iterable[dict[str, Any]]) -> float:
    """Return the share of wrong turns that the game accepted."""
    valid = [
        is_valid
        for row in rows
        for is_valid, a, b in zip(row["valid"], row["distance"], row["distance"][1:], strict=False)
        if b is None or b >= a
    ]
    return sum(valid) / len(valid)


def simple(
    turns: dict[str, list[Turn]], rows: dict[str, list[dict[str, Any]]], signs: Sequence[tuple[int, str]]
) -> dict[str, Any]:
    """Return error rates without and after an earlier error, also by turn, and the share of episodes that recover."""
    tasks = sorted({row["task"] for own in rows.values() for row in own})

    def parts(kept: Callable[[Turn], bool]) -> list[tuple[float, dict[tuple[int, str], Part]]]:
        return [(sign, rate(filter(kept, turns[policy]))) for sign, policy in signs]

    groups: dict[str, Callable[[Turn], bool]] = {
        "before": lambda one: not one.after_error,
        "after": lambda one: one.after_error,
        "after_new": lambda one: one.after_error and one.first_visit,
        "after_old": lambda one: one.after_error and not one.first_visit,
    }
    of = {name: parts(kept) for name, kept in groups.items()}
    lowest = 0.0 if len(signs) == 1 else -1.0
    less = [(-sign, own) for sign, own in of["before"]]
    found: dict[str, Any] = {name: ends(crossed(own, tasks), lowest) for name, own in of.items()}
    found |= {
        "difference": ends(crossed([*of["after"], *less], tasks)),
        "back": ends(crossed([(sign, back(rows[policy])) for sign, policy in signs], tasks), lowest),
        "by_turn": {},
    }
    low = 0
    for name, high in TURNS.items():
        then: dict[str, Any] = {}
        for kind in ("before", "after"):
            kept, low_, high_ = groups[kind], low, high
            own = parts(lambda one, kept=kept, low=low_, high=high_: low < one.number <= high and kept(one))
            then[kind] = ends(crossed(own, tasks), lowest) if all(each for _, each in own) else None
        found["by_turn"][name] = then
        low = high
    counts = {name: sum(int(part[1]) for _, own in of[name] for part in own.values()) for name in groups}
    return found | ({"counts": counts} if len(signs) == 1 else {})


SHARES = {
    "error rate of turns without an earlier error": "before",
    "error rate of turns after an earlier error": "after",
    "after, minus without": "difference",
    "after an earlier error, in a state new to the episode": "after_new",
    "after an earlier error, in a state that the episode has been in": "after_old",
    "episodes that recover, among episodes with an error": "back",
}
COMPARED = {
    "on the first visit of the state": "new",
    "when the first error leaves the state as it was": "again",
}


def pages(found: dict[str, Any]) -> list[str]:
    """Return the tables of the page: shares, comparisons in one state, and shares by turn."""
    greedy, sampled = found["greedy"], found["sampled"]
    heads = [*METHODS, "change"]
    shares = [
        [name, *(cell(greedy[each][key], each == "change" or key == "difference") for each in heads)]
        for name, key in SHARES.items()
    ]
    compared = [
        [f"{name}, {what}", *(cell(own[each]["matched"][key]["difference"], True) for each in own)]
        for name, key in COMPARED.items()
        for what, own in (("greedy", greedy), ("sampled", sampled))
    ]
    by_turn = [
        [
            name,
            *(
                cell(greedy[each]["by_turn"][name][kind], False)
                for each in METHODS
                for kind in ("before", "after")
            ),
        ]
        for name in TURNS
    ]
    return [
        table(["", "SFT", "tlm-DRE", "change"], shares),
        table(["error rate after an earlier error, minus without", "SFT", "tlm-DRE", "change"], compared),
        table(["turn", "SFT, without", "SFT, after", "tlm-DRE, without", "tlm-DRE, after"], by_turn),
    ]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(
        "|" + "|".join(f" {each} " if each != "---" else each for each in line) + "|" for line in lines
    )


def cell(estimate: Sequence[float] | None, signed: bool) -> str:
    """Return an estimate with its interval, in percent or points."""
    mean, low, high = (f"{100 * each:{'+' if signed else ''}.1f}" for each in estimate or [0, 0, 0])
    return f"{mean} [{low}, {high}]".replace("-", "−") if estimate else "–"


def main() -> None:
    """Measure episodes, or write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("measure").add_argument("runs", type=Path)
    commands.add_parser("tables")
    given = parser.parse_args()
    if given.command == "measure":
        measure(given.runs)
        return
    found = {name: tables_of(name) for name in PLACE}
    (ROWS / "errors.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n\n".join(pages(found)))


if __name__ == "__main__":
    main()
