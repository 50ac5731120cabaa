r"""Draw one episode as all credits see it, with a row for each credit and a column for each turn.

    python benchmarks/credit_picture.py RUN --task PART-OF-ITS-ID --sample 0 --figure docs/figures/credits.svg

RUN is an online run of a recipe with branches, in an environment that knows the remaining distance to success
(docs/environments.md). The episodes are of the first iteration, which the SFT policy explored. Without --task, the
command lists failed episodes of groups in which other episodes succeed, with their first wrong turn.
`progress-advantage` compares the run's last policy with the SFT policy, so it shows only their difference. Credits that
need answers, gold calls or a reward model are left out. It takes half a minute on one core for 64 episodes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from small_svg import pyplot, save

from perturn.config.stages import makes, policy_of
from perturn.credit import CREDITS
from perturn.data.run_folder import resolve_recipe
from perturn.data.run_paths import begun
from perturn.data.store import read_trajectories
from perturn.group import counted, groups_of
from perturn.needs import Distance, Progress, names_of, reads
from perturn.quantities import compute, given, policies_of
from perturn.quantities.protocol import REWARD
from perturn.remaining import wrong_turns
from perturn.run.stages.credit_stage import credit_groups
from perturn.run.stages.measure_distance import measured
from perturn.run.stages.quantity_source import RunSource, members_of
from perturn.types import Trajectory, succeeded

LEFT_OUT = {"answer", "answer-clusters", "tool-matches"}
SETTINGS: dict[str, dict[str, Any]] = {
    "infopo": {"placeholder": "Nothing happens."},
    "progress-advantage": {"outcome": False},
    "slate": {"by": "progress", "distance": "searching"},
    "first-error": {"distance": "searching"},
    "process-score": {"distance": "searching"},
}
MARK = "-001"


def weights_of(folder: Path, episodes: Sequence[Trajectory], chosen: Trajectory) -> dict[str, list[float]]:
    """Return the weight of each turn of an episode, by credit.

    Args:
        folder: Folder of the run.
        episodes: Episodes of the iteration.
        chosen: Episode to draw.
    """
    paths, recipe = begun(folder), resolve_recipe(folder)
    found = {}
    last = {"checkpoint": policy_of(recipe, recipe.iterations)}
    for name, kind in CREDITS.items():
        credit = kind(**SETTINGS.get(name, {}))
        if names_of(credit.needs) & LEFT_OUT or REWARD in policies_of(credit.needs):
            continue
        if reads(credit.needs, Progress):
            credit = kind(**SETTINGS.get(name, {}), **last)
        members = members_of(credit, episodes, paths, recipe, MARK)
        measures = reads(credit.needs, Distance)
        members = counted(measured(recipe, members, "searching") if measures else members)
        source = RunSource(paths, recipe, reference="sft", acted="sft", start="sft")
        needed = given(compute(credit.needs, members, source))
        rows = {row.key: row.weight for row in credit_groups(members, credit, needed)}
        found[name] = list(rows[chosen.key])
    return found


def draw(chosen: Trajectory, weights: Mapping[str, Sequence[float]], file: Path) -> None:
    """Draw each row relative to its largest weight, and mark the turns that came no nearer to success."""
    wrong = wrong_turns(chosen)
    rows = np.array([[each / (max(map(abs, own)) or 1.0) for each in own] for own in weights.values()])
    figure, (top, body) = pyplot().subplots(
        2, 1, figsize=(11, 8), layout="constrained", sharex=True, height_ratios=[1, len(rows)]
    )
    top.imshow([wrong], aspect="auto", cmap="Greys", vmin=0, vmax=1.4)
    top.set_yticks([0], ["no nearer"])
    body.imshow(rows, aspect="auto", cmap="RdBu", vmin=-1.3, vmax=1.3)
    body.set_yticks(np.arange(0.5, len(rows)), minor=True)
    body.grid(which="minor", axis="y", color="white", linewidth=1.5)
    body.tick_params(which="minor", length=0)
    most = [max(map(abs, own)) for own in weights.values()]
    body.set_yticks(
        range(len(rows)), [f"{name} ({each:.2g})" for name, each in zip(weights, most, strict=True)]
    )
    said = [turn.action.text.rpartition("Action: ")[2][:40] for turn in chosen.turns]
    labels = [f"{number}: {text}" for number, text in enumerate(said, start=1)]
    body.set_xticks(range(len(wrong)), labels, rotation=90, fontsize=7)
    for axis in (top, body):
        axis.axvline(wrong.index(True) - 0.5, color="black", linewidth=1.2)
    save(figure, file)


def candidates(episodes: Sequence[Trajectory]) -> list[str]:
    """Return a line for each failed episode of a group in which another episode succeeds."""
    return [
        f"{one.task.id} sample {one.sample}: first wrong turn {wrong_turns(one).index(True) + 1}, "
        f"{sum(wrong_turns(one))} of {len(one.turns)} wrong"
        for group in groups_of(episodes)
        for one in group
        if not succeeded(one) and any(map(succeeded, group)) and any(wrong_turns(one))
    ]


def main() -> None:
    """Draw the episode that the command names, or list candidates."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--task", help="part of the task's id; without it, episodes are listed")
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--figure", type=Path, default=Path("docs/figures/credits.svg"))
    given = parser.parse_args()
    recipe, paths = resolve_recipe(given.run), begun(given.run)
    assert makes(recipe, "groups"), "the run learns from no groups; name an online run"
    episodes = measured(recipe, read_trajectories(paths.trajectories(f"explore{MARK}")), "searching")
    if given.task is None:
        print("\n".join(candidates(episodes)))
        return
    (chosen,) = [one for one in episodes if given.task in one.task.id and one.sample == given.sample]
    draw(chosen, weights_of(given.run, episodes, chosen), given.figure)


if __name__ == "__main__":
    main()
