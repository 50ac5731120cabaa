r"""Does the progress advantage tell where an episode went wrong, and better than confidence?

    python benchmarks/attribution.py studies/results/online/runs/rloo-*-seed-?-???????? --out FILE

The progress advantage of a turn is the sum over its tokens of log pi_RL - log pi_ref ("Neglected Free Lunch from
Post-training: Progress Advantage for LLM Agents"). Takes online runs of a world that knows how far it is from the end:
pi_ref is SFT's policy, pi_RL the last one. Read on the failed episodes of the first iteration, which SFT's policy
played, with cluster-robust intervals as in `mechanism.py`. Five runs of the laboratory take two minutes on one core.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from mechanism import before, first, plain, right, said, wrong
from mechanism_statistics import Statistic, Turns, auc, difference, interval

from perturn.config.stages import makes, policy_of
from perturn.data.run_folder import resolve_recipe
from perturn.data.run_paths import begun
from perturn.data.store import read_trajectories
from perturn.quantities.readers import open_reader
from perturn.quantities.reference_logprobs import reference_of
from perturn.run.stages.measure_distance import measured
from perturn.types import failed, succeeded

CONTRASTS = {"first wrong against those before it": (first, before), "wrong against right": (wrong, right)}


def scored_turns(folders: Sequence[Path]) -> dict[str, Turns]:
    """The turns of all failed episodes, by what scores them; the score is in `confidence`, low where it blames.

    Args:
        folders: Runs, each with a base of its own.
    """
    rows: list[tuple[Any, ...]] = []
    scores: dict[str, list[float]] = {
        "confidence": [],
        "progress advantage": [],
        "confidence of pi_RL": [],
    }
    tasks: dict[str, int] = {}
    episode = 0
    for base, folder in enumerate(folders):
        paths, recipe = begun(folder), resolve_recipe(folder)
        assert makes(recipe, "groups"), f"{folder} learns from no groups; name online runs"
        explored = read_trajectories(paths.trajectories("explore-001"))
        failures = measured(
            recipe, [one for one in explored if not succeeded(one) and not failed(one)], "searching"
        )
        last, start = (
            reference_of(failures, open_reader(paths.checkpoint(policy_of(recipe, number))))
            for number in (recipe.iterations, 0)
        )
        for one, ours, theirs in zip(failures, last, start, strict=True):
            where = base, tasks.setdefault(one.task.id, len(tasks)), episode
            for place, turn in enumerate(one.turns):
                assert turn.remaining is not None
                way = turn.remaining.is_wrong, turn.remaining.leads_away
                rows.append((*where, place, True, turn.valid, *way))
                after, then = ours[place].double(), theirs[place].double()
                each = float(then.mean()), float((after - then).sum()), float(after.mean())
                for name, value in zip(scores, each, strict=True):
                    scores[name].append(value)
            episode += 1
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    return {name: Turns(*columns, np.array(values)) for name, values in scores.items()}


def scored_by(turns: Turns, statistic: Statistic) -> Statistic:
    """A statistic of other scores of the same turns."""
    return lambda drawn, count: statistic(replace(drawn, confidence=turns.confidence), count)


def summary(found: Mapping[str, Turns], draws: int) -> dict[str, Any]:
    """AUC of each score for each contrast, and that of the progress advantage less that of confidence."""
    sure, rows = found["confidence"], {}
    for contrast, kinds in CONTRASTS.items():
        rows |= {f"{contrast}, {name}": interval(auc(*kinds), turns, draws) for name, turns in found.items()}
        progress = scored_by(found["progress advantage"], auc(*kinds))
        rows[f"{contrast}, progress advantage less confidence"] = interval(
            difference(progress, auc(*kinds)), sure, draws
        )
    episodes = len(set(sure.episode.tolist()))
    return {"episodes": episodes, "turns": len(sure.episode), "bases": int(sure.base.max()) + 1, "auc": rows}


def main() -> None:
    """Print the table, and write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = plain(summary(scored_turns(given.runs), given.draws))
    print("\n".join([f"| AUC, {name} | {said(each)} |" for name, each in found["auc"].items()]))
    print(f"{found['episodes']} episodes, {found['turns']} turns, {found['bases']} bases")
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
