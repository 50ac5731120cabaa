"""The members of a task's group: explored episodes, and branches of these where a credit trains on them too."""

from __future__ import annotations

from collections.abc import Sequence

from perturn.config.recipe import Recipe
from perturn.credit import Credit
from perturn.data.run_paths import RunPaths
from perturn.run.stages.branch_stage import stored_branches
from perturn.types import Trajectory, came_back


def failures_of(recipe: Recipe) -> str:
    """Return how FAILED episodes count in the statistics of a run's groups, one of `data.group_account.FAILURES`."""
    return recipe.rows.traits.failed if recipe.rows else "leave_out"


def members_of(
    credit: Credit, explored: Sequence[Trajectory], paths: RunPaths, recipe: Recipe, mark: str
) -> list[Trajectory]:
    """The trajectories that a credit weighs: explored episodes, and their branches where it trains these too.

    Args:
        credit: What weighs.
        explored: Episodes of an iteration.
        paths: Of the run.
        recipe: Of the run.
        mark: Of the iteration.
    """
    if not credit.traits.trains_branches:
        return list(explored)
    return [*explored, *filter(came_back, stored_branches(paths, recipe, mark))]
