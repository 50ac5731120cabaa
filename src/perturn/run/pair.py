"""Make preference pairs from a run's trajectories."""

from __future__ import annotations

from perturn.data.outcomes import succeeded
from perturn.data.pairs import pair_with_expert
from perturn.data.run_folder import Run
from perturn.data.store import read_trajectories, write_pairs
from perturn.errors import RunError
from perturn.run.progress import console


def make_pairs(run: Run) -> None:
    """Pair the expert's trajectories with the policy's own failures.

    Raises:
        RunError: If trajectories are missing, or no pair is left.
    """
    for name in ("expert", "explore"):
        if not run.trajectories(name).is_file():
            raise RunError(f"{run.trajectories(name)} is missing; run: perturn collect {run.folder}")
    settings = run.recipe.pair
    # Sorted, since they are stored as they end, which depends on timing.
    explored = sorted(read_trajectories(run.trajectories("explore")), key=lambda one: one.key)
    experts = [one for one in read_trajectories(run.trajectories("expert")) if succeeded(one)]
    with run.stage("pair", run.pairs) as counts:
        pairs, reasons = pair_with_expert(
            experts,
            explored,
            settings.threshold,
            max_extra_turns=settings.max_extra_turns,
        )
        counts |= reasons
        console.print("pairs:", ", ".join(f"{reason} {count}" for reason, count in reasons.items() if count))
        if not pairs:
            raise RunError(
                f"no pair is left of {sum(reasons.values())} explored trajectories; lower pair.threshold, explore more "
                "tasks, or take a higher temperature."
            )
        write_pairs(run.pairs, pairs)
