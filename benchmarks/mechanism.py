r"""Is confidence low where an episode goes wrong? tlm-DRE's mechanism, against the truth that ALFWorld knows.

    python benchmarks/mechanism.py studies/results/weak/runs/* --out benchmarks/mechanism.json \
        --figure docs/figures/mechanism.svg      two minutes for 350 pairs on one core

Takes runs whose alignment on pairs has a reference, such as those of a study; others are passed over. Runs that share
their pairs count once, and those of one base, by the seeds of `base` and of the run, are one cluster. Each episode is
played again for the way that is left around each turn (docs/environments.md). A turn is wrong if it came no nearer to
the end, and leads away if the end is farther than before. Prints a Markdown table; the figure has the confidence on
both sides of the pairs and at wrong turns, and margins during training for dpo and tlm-dre.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mechanism_statistics import (
    Flags,
    Floats,
    Statistic,
    Turns,
    auc,
    confidence_weights,
    difference,
    interval,
    matched_difference,
    mean_of,
    share_on_wrong,
    shuffled_shares,
    uniform_weights,
)

from perturn.config.sections import Sense
from perturn.data.file_seals import read_manifest
from perturn.data.run_folder import resolve_recipe
from perturn.data.run_paths import RunPaths
from perturn.data.store import read_pairs
from perturn.run.stages.measure_distance import measured_pairs
from perturn.types import PreferencePair

SENSES: tuple[Sense, ...] = ("searching", "shortest")
PIVOT = 0.9
SHUFFLES = 500
LONGEST = 30
"""Positions that are drawn."""


def every(turns: Turns) -> Flags:
    """All turns."""
    return np.ones(len(turns.confidence), dtype=bool)


def wrong(turns: Turns) -> Flags:
    """Those that came no nearer to the end."""
    return turns.wrong


def right(turns: Turns) -> Flags:
    """Those that came nearer."""
    return ~turns.wrong


def wrong_valid(turns: Turns) -> Flags:
    """Those that did something, and came no nearer."""
    return turns.wrong & turns.valid


def invalid(turns: Turns) -> Flags:
    """Those that did nothing."""
    return ~turns.valid


def first(turns: Turns) -> Flags:
    """The first wrong turn of each episode."""
    return turns.first


def before(turns: Turns) -> Flags:
    """Turns before the first wrong one."""
    return turns.before


def away(turns: Turns) -> Flags:
    """Those after which the end is farther than before."""
    return turns.away


def nearer_or_equal(turns: Turns) -> Flags:
    """Those after which the end is not farther than before."""
    return ~turns.away


def position(turns: Turns) -> Floats:
    """Place in the episode, from 1."""
    return turns.position + 1.0


def confidence(turns: Turns) -> Floats:
    """Geometric mean of the reference's probabilities."""
    return turns.confidence


def under_pivot(turns: Turns) -> Flags:
    """Those that tlm-DRE weighs fully."""
    return turns.confidence <= PIVOT


KINDS = {
    "right": right,
    "first wrong": first,
    "wrong but valid": wrong_valid,
    "invalid": invalid,
    "leading away": away,
}
"""Kinds of turns, by what they are called."""
CONTRASTS = {
    "wrong against right": (wrong, right),
    "wrong but valid against right": (wrong_valid, right),
    "invalid against right": (invalid, right),
    "first wrong against right": (first, right),
    "first wrong against those before it": (first, before),
    "leading away against others": (away, nearer_or_equal),
}
OF_REJECTED: dict[str, Statistic] = {
    "turns that are wrong": mean_of(every, wrong),
    "turns that lead away": mean_of(every, away),
    "wrong turns that are invalid": mean_of(wrong, invalid),
    "place of the first wrong turn": mean_of(first, position),
    **{f"confidence, {name}": mean_of(kind, confidence) for name, kind in KINDS.items()},
    "confidence, first wrong less right at the same place": matched_difference,
    **{f"AUC, {name}": auc(*both) for name, both in CONTRASTS.items()},
    **{f"under the pivot, {name}": mean_of(kind, under_pivot) for name, kind in KINDS.items()},
    "weight on wrong turns, confidence": share_on_wrong(confidence_weights),
    "weight on wrong turns, uniform": share_on_wrong(uniform_weights),
    "weight on wrong turns, confidence less uniform": difference(
        share_on_wrong(confidence_weights), share_on_wrong(uniform_weights)
    ),
}
"""Statistics of the rejected side's turns, by what they are called; shares where nothing else is said."""
OF_BOTH: dict[str, Statistic] = {
    "confidence, chosen side": mean_of(lambda turns: ~turns.rejected, confidence),
    "confidence, rejected side": mean_of(lambda turns: turns.rejected, confidence),
    "confidence, chosen less rejected": difference(
        mean_of(lambda turns: ~turns.rejected, confidence), mean_of(lambda turns: turns.rejected, confidence)
    ),
}


def different_pairs(folders: Sequence[Path]) -> Iterator[tuple[RunPaths, tuple[int, int]]]:
    """Runs with pairs that no run before them has, and what their policy's base is known by."""
    seen = set()
    for folder in folders:
        paths = RunPaths(folder)
        manifest = read_manifest(folder) or {}
        pairs = manifest.get("files", {}).get(paths.name(paths.pairs()), {}).get("sha256")
        pairs = pairs or manifest.get("data", {}).get("pairs.jsonl")
        if paths.pairs().is_file() and paths.confidence().is_file() and pairs not in seen:
            seen.add(pairs)
            recipe = resolve_recipe(folder)
            yield paths, (recipe.base.seed if recipe.base else 0, recipe.seed)


def measured(paths: RunPaths, sense: Sense) -> list[PreferencePair]:
    """The pairs of a run with the way that is left around each turn."""
    recipe = resolve_recipe(paths.folder)
    return measured_pairs(recipe, read_pairs(paths.pairs()), sense)


def turns_of(runs: Sequence[tuple[RunPaths, tuple[int, int]]], sense: Sense) -> Turns:
    """All turns that carry loss, of all runs."""
    rows: list[tuple[Any, ...]] = []
    tasks: dict[str, int] = {}
    bases: dict[tuple[int, int], int] = {}
    episode = 0
    for paths, base in runs:
        noted = [json.loads(line) for line in paths.confidence().read_text(encoding="utf-8").splitlines()]
        for pair, note in zip(measured(paths, sense), noted, strict=True):
            where = bases.setdefault(base, len(bases)), tasks.setdefault(pair.chosen.task.id, len(tasks))
            for side, trajectory in (("chosen", pair.chosen), ("rejected", pair.rejected)):
                for index, known in zip(note[side]["turn"], note[side]["confidence"], strict=True):
                    turn = trajectory.turns[index]
                    assert turn.remaining is not None
                    way = turn.remaining.is_wrong, turn.remaining.leads_away
                    rows.append((*where, episode, index, side == "rejected", turn.valid, *way, known))
                episode += 1
    columns = zip(*rows, strict=True)
    return Turns(*(np.array(column) for column in columns))


def by_position(turns: Turns) -> dict[str, list[float | None]]:
    """Mean confidence at each position: of both sides, and of the rejected side's right and first wrong turns."""
    kinds = {
        "chosen": ~turns.rejected,
        "rejected": turns.rejected,
        "right": turns.rejected & ~turns.wrong,
        "first wrong": turns.rejected & turns.first,
    }
    found: dict[str, list[float | None]] = {}
    for name, kind in kinds.items():
        at = [turns.confidence[kind & (turns.position == place)] for place in range(LONGEST)]
        found[name] = [round(float(each.mean()), 4) if len(each) >= 5 else None for each in at]
    return found


def around_first(turns: Turns, reach: int = 5) -> list[list[float | None]]:
    """Mean confidence so many turns after the first wrong one: (offset, mean, episodes)."""
    starts = dict(zip(turns.episode[turns.first].tolist(), turns.position[turns.first].tolist(), strict=True))
    pairs = zip(turns.episode.tolist(), turns.position.tolist(), strict=True)
    offset = np.array([place - starts.get(episode, 10**6) for episode, place in pairs])
    found = [(step, turns.confidence[turns.rejected & (offset == step)]) for step in range(-reach, reach + 1)]
    return [[step, round(float(each.mean()), 4), len(each)] for step, each in found if len(each)]


def margins(folders: Sequence[Path]) -> dict[str, Any]:
    """Margins and rewards at each step of alignments, averaged over runs of one loss and learning rate."""
    found: dict[str, list[list[dict[str, float]]]] = defaultdict(list)
    for folder in folders:
        paths = RunPaths(folder)
        if not paths.metrics("align").is_file():
            continue
        recipe = resolve_recipe(folder)
        lines = paths.metrics("align").read_text(encoding="utf-8").splitlines()
        logged = [entry for entry in map(json.loads, lines) if "rewards/margins" in entry]
        if recipe.align is not None and recipe.align.loss["name"] in ("dpo", "tlm-dre") and logged:
            found[f"{recipe.align.loss['name']}, {recipe.align.learning_rate:g}"].append(logged)
    return {label: {"runs": len(runs)} | averaged(runs) for label, runs in sorted(found.items())}


def averaged(runs: Sequence[Sequence[dict[str, float]]]) -> dict[str, list[float]]:
    """Metrics of the steps that all runs have, averaged over runs."""
    steps = range(min(map(len, runs)))
    names = ("rewards/margins", "rewards/chosen", "rewards/rejected")
    table = {name: [[run[step][name] for step in steps] for run in runs] for name in names}
    return {name: np.mean(values, axis=0).tolist() for name, values in table.items()}


def summary(turns: Turns, draws: int) -> dict[str, Any]:
    """All numbers of one sense."""
    rejected = turns.where(turns.rejected)
    shuffled = shuffled_shares(rejected, SHUFFLES)
    return {
        "turns": len(turns.confidence),
        "of_rejected": {name: interval(each, rejected, draws) for name, each in OF_REJECTED.items()},
        "of_both": {name: interval(each, turns, draws) for name, each in OF_BOTH.items()},
        "shuffled": [float(each) for each in np.quantile(shuffled, [0.025, 0.5, 0.975])],
        "by_position": by_position(turns),
        "around_first": around_first(turns),
    }


def table(found: dict[str, Any]) -> str:
    """The statistics as Markdown."""
    lines = [f"| {' | '.join(['', *SENSES])} |", "|---|" + "---|" * len(SENSES)]
    for part in ("of_rejected", "of_both"):
        for name in found["senses"][SENSES[0]][part]:
            cells = [said(found["senses"][sense][part][name]) for sense in SENSES]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    low, middle, high = zip(*(found["senses"][sense]["shuffled"] for sense in SENSES), strict=True)
    cells = [f"{b:.3f} [{a:.3f}, {c:.3f}]" for a, b, c in zip(low, middle, high, strict=True)]
    lines.append(f"| weight on wrong turns, confidence dealt at random | {' | '.join(cells)} |")
    return "\n".join(lines)


def said(estimate: Sequence[float]) -> str:
    """A number with its interval."""
    mean, low, high = estimate
    return "" if np.isnan(mean) else f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def draw(found: dict[str, Any], file: Path) -> None:
    """Confidence by position, around the first wrong turn, and margins during training."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "perturn"  # the same figure is the same file
    from matplotlib import pyplot

    losses = sorted({label.partition(",")[0] for label in found["margins"]})
    figure, panels = pyplot.subplots(
        1, 2 + len(losses), figsize=(3.4 * (2 + len(losses)), 3), layout="constrained"
    )
    searching = found["senses"]["searching"]
    for name, values in searching["by_position"].items():
        at = [(place + 1, value) for place, value in enumerate(values) if value is not None]
        panels[0].plot(
            *zip(*at, strict=True), "o-" if name == "first wrong" else "-", markersize=3, label=name
        )
    panels[0].set(xlabel="turn", ylabel="mean confidence", title="by position")
    panels[0].legend(frameon=False, fontsize="small")
    for sense, marker in zip(SENSES, "os", strict=True):
        offsets, values, _ = zip(*found["senses"][sense]["around_first"], strict=True)
        panels[1].plot(offsets, values, f"{marker}-", markersize=3, label=sense)
    panels[1].axvline(0, color="gray", linewidth=0.8)
    panels[1].set(xlabel="turns after the first wrong one", title="rejected side")
    panels[1].legend(frameon=False, fontsize="small")
    for panel, loss in zip(panels[2:], losses, strict=True):
        for label, values in found["margins"].items():
            if label.partition(",")[0] == loss:
                panel.plot(values["rewards/margins"], label=label.partition(", ")[2])
        panel.set(xlabel="optimizer step", ylabel="margin", title=loss)
        panel.legend(frameon=False, fontsize="small", title="learning rate")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})


def plain(value: Any) -> Any:
    """JSON data: what is not a number is null."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return (
        None
        if isinstance(value, float) and np.isnan(value)
        else round(value, 5)
        if isinstance(value, float)
        else value
    )


def main() -> None:
    """Measure, print, write, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--draws", type=int, default=1000, help="of the bootstrap")
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    parser.add_argument("--figure", type=Path, help="draw them here as SVG")
    options = parser.parse_args()
    runs = list(different_pairs(options.runs))
    if not runs:
        raise SystemExit(
            "no run has pairs and the confidence of a reference; give runs with an alignment on pairs."
        )
    found: dict[str, Any] = {
        "bases": len({base for _, base in runs}),
        "runs_with_other_pairs": len(runs),
        "pairs": sum(len(read_pairs(paths.pairs())) for paths, _ in runs),
        "senses": {sense: summary(turns_of(runs, sense), options.draws) for sense in SENSES},
        "margins": margins(options.runs),
    }
    print(f"{found['pairs']} pairs of {found['bases']} bases\n\n{table(found)}")
    if options.out:
        options.out.write_text(json.dumps(plain(found), indent=1) + "\n", encoding="utf-8")
    if options.figure:
        draw(found, options.figure)


if __name__ == "__main__":
    main()
