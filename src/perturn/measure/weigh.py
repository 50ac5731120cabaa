"""Compute the weights of several credits for a run's episodes, and the cost of each credit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perturn.config.recipe import Recipe
from perturn.config.stages import Stage
from perturn.credit import CREDITS, Credit
from perturn.data.run_paths import RunPaths
from perturn.errors import PerturnError, RunError, check_fit
from perturn.measure.advantages import Floats
from perturn.quantities import wanted
from perturn.run.served_policy import engine_settings
from perturn.run.stages.branch_stage import stored_branches
from perturn.run.stages.credit_stage import weigh_stored
from perturn.training.credit_choice import make_credit
from perturn.types import Trajectory, succeeded


@dataclass(frozen=True)
class Weighed:
    """Weights of a credit for the episodes of an iteration."""

    section: Mapping[str, Any]
    """Settings of the credit, as a section `credit` of a recipe."""
    weights: Mapping[tuple[str, int], Floats]
    """Weight of each turn [turns], by the key of the episode."""
    by_outcome: bool
    """Whether the weights are negated in episodes that did not solve the task, as on the rejected side of a pair; see
    `CreditTraits.weighs_sides`."""
    cost: float
    """Cost in passes over the tokens of an episode: one to play it, plus passes for quantities, plus branches by their
    turns."""


def weigh(
    paths: RunPaths, recipe: Recipe, stage: Stage, names: Sequence[str], explored: Sequence[Trajectory]
) -> tuple[dict[str, Weighed], dict[str, str]]:
    """Compute the weights of an iteration's episodes with several credits.

    A credit that reads branches gets the branches of the run. Their seeds differ from the seeds of the continuations.
    So the errors of the credit are independent of the errors of the measurement.

    Args:
        paths: Paths of the run.
        recipe: Recipe of the run. The credit in the recipe keeps its settings.
        stage: Exploration stage.
        names: Names of credits. `all` means every entry of `CREDITS`, and the credit of the recipe.
        explored: Episodes of the stage.

    Returns:
        Weights by the credit's name, and for each other credit the reason why it has none.

    Raises:
        PerturnError: If a credit in `names` cannot be computed, or gives every turn the weight 0.
    """
    found, left_out = {}, {}
    named = [name for name in names if name != "all"]
    own = [recipe.credit["name"]] if recipe.credit else []
    for name in dict.fromkeys([*CREDITS, *named, *own] if "all" in names else named):
        try:
            weighed = _weighed(paths, recipe, stage, _section(recipe, name), explored)
            if not any(own.any() for own in weighed.weights.values()):
                raise RunError(
                    f"credit {name!r} gives every turn of these episodes the weight 0. Some credits need several "
                    "samples of a task with different rewards, and some need state keys."
                )
            found[name] = weighed
        except PerturnError as error:
            if name in named:
                raise
            left_out[name] = str(error)
    return found, left_out


def refuse_unknown(recipe: Recipe, names: Sequence[str]) -> None:
    """Raise an error for a credit that cannot be created, before anything is played.

    Raises:
        PerturnError: If a name is unknown, or the settings of a credit are invalid.
    """
    check_fit(names, "--credits", "name a credit, such as rloo, or all", names)
    for name in names:
        if name != "all":
            make_credit(_section(recipe, name))


def _section(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return the section `credit` for a name. The credit in the recipe keeps its settings."""
    own = recipe.credit is not None and recipe.credit.get("name") == name
    return dict(recipe.credit or {}) if own else {"name": name}


def _weighed(
    paths: RunPaths, recipe: Recipe, stage: Stage, section: Mapping[str, Any], explored: Sequence[Trajectory]
) -> Weighed:
    quantities = [quantity for quantity, _ in wanted(make_credit(section).needs).values()]
    if not engine_settings(recipe).traits.serves_checkpoints and any(
        each.traits.passes for each in quantities
    ):
        raise RunError(
            f"credit {section['name']!r} reads passes of a policy, and engine "
            f"{recipe.engine['name']!r} serves a policy that cannot be opened here; leave the credit out."
        )
    credit, episodes, rows = weigh_stored(paths, recipe, section, stage.iteration)
    keys = {one.key for one in explored}
    solved = {one.key: succeeded(one) for one in explored}
    weights = {row.key: np.array(row.weight, dtype=np.float64) for row in rows if row.key in keys}
    by_outcome = credit.traits.weighs_sides
    if by_outcome:
        weights = {key: own if solved[key] else -own for key, own in weights.items()}
    return Weighed(section, weights, by_outcome, _cost(credit, episodes, explored, paths, recipe, stage))


def _cost(
    credit: Credit,
    episodes: Sequence[Trajectory],
    explored: Sequence[Trajectory],
    paths: RunPaths,
    recipe: Recipe,
    stage: Stage,
) -> float:
    """Return the cost of playing an episode and computing its credit, in passes over the episode's tokens."""
    needs = [quantity for quantity, _ in wanted(credit.needs).values()]
    branches = [one for one in episodes if one.origin is not None]
    if any(quantity.traits.reads_branches for quantity in needs):
        branches = stored_branches(paths, recipe, stage.mark)
    played = sum(len(one.turns) - one.taken_over for one in branches)
    passes = sum(quantity.traits.passes for quantity in needs)
    return 1 + passes + played / max(1, sum(len(one.turns) for one in explored))
