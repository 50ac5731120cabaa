"""Compare contributions with values on a run's explored episodes: time, explained variance, size of advantages.

    python benchmarks/contributions.py RUN [POLICY] [ITERATION ...]

The benchmark prints a line for each named iteration, or for the first. The line has the seconds to compute
contributions and values (turn-gae), both from the hidden states of POLICY (default: sft). It has the share of the
variance of scores that is explained by the sums of contributions, and the share explained by a line in the number of
turns, over the same folds. It also has the share of the variance of returns that values explain, and the mean square of
the advantages of all turns.
"""

import sys
import time
from collections.abc import Sequence
from math import fsum
from pathlib import Path

import numpy as np

from perturn.chat.templates import chat_template
from perturn.credit import CREDITS
from perturn.credit.returns import Return
from perturn.data.run_folder import resolve_recipe
from perturn.data.run_paths import begun
from perturn.data.store import read_trajectories
from perturn.group import counted
from perturn.methods.spa.contributions import scores_of
from perturn.policy.value_heads import FOLDS
from perturn.quantities import compute, figures_of, given
from perturn.quantities.protocol import ACTED
from perturn.quantities.readers import Models, open_reader
from perturn.run.stages.credit_stage import credit_groups
from perturn.types import Trajectory


def by_length(episodes: Sequence[Trajectory]) -> float:
    """Return the share of the variance of scores that a line in the number of turns explains, across folds."""
    ordered = sorted(episodes, key=lambda one: one.key)
    scores = np.array(scores_of(ordered, Return()))
    rows = np.array([[1.0, len(one.turns)] for one in ordered])
    found = np.empty_like(scores)
    for fold in range(FOLDS):
        held = np.arange(len(ordered)) % FOLDS == fold
        found[held] = rows[held] @ np.linalg.lstsq(rows[~held], scores[~held], rcond=None)[0]
    return float(1 - (scores - found).var() / scores.var())


def main() -> None:
    """Print a line for each iteration."""
    folder, policy, *marks = [*sys.argv[1:], "sft"][: max(2, len(sys.argv) - 1)]
    paths, recipe = begun(Path(folder)), resolve_recipe(Path(folder))
    name = str(paths.checkpoint(policy))
    source = Models({ACTED: open_reader(name, None, chat_template(recipe.model))})
    spa, gae = CREDITS["spa"](), CREDITS["turn-gae"]()
    for mark in marks or ["1"]:
        episodes = counted(read_trajectories(paths.trajectories(f"explore-{int(mark):03d}")))
        start = time.perf_counter()
        of_spa = compute(spa.needs, episodes, source)
        middle = time.perf_counter()
        of_gae = compute(gae.needs, episodes, source)
        end = time.perf_counter()
        told, sums = (figures_of(each)["explained_variance"] for each in (of_gae, of_spa))
        print(
            f"iteration {mark}: contributions {middle - start:.1f} s, values {end - middle:.1f} s; "
            f"explained: sums {sums:.2f}, "
            f"turns {by_length(episodes):.2f}, values {told:.2f}"
        )
        for name, needed in {
            "rloo": {},
            "trloo": {},
            "turn-gae": given(of_gae),
            "spa": given(of_spa),
        }.items():
            weights = [
                weight for row in credit_groups(episodes, CREDITS[name](), needed) for weight in row.weight
            ]
            print(f"    {name:9} mean square {fsum(w * w for w in weights) / len(weights):.3f}")


if __name__ == "__main__":
    main()
