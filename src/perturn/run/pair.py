"""Make preference pairs from a run's trajectories, or take the user's."""

from __future__ import annotations

from perturn.audit.rows import rows_of
from perturn.data.pairs import pair_with_expert
from perturn.data.store import read_trajectories, write_pairs
from perturn.errors import RunError
from perturn.io.reading import user_path
from perturn.run.progress import console
from perturn.run.session import Session
from perturn.settings.stages import Stage
from perturn.types import PreferencePair, succeeded


def make_pairs(session: Session, stage: Stage) -> None:
    """Pair the expert's trajectories with the policy's own failures.

    Raises:
        RunError: If no pair is left.
    """
    run, settings = session.run, session.recipe.pair
    assert settings is not None
    expert, explored = (run.paths.trajectories(name) for name in ("expert", f"explore{stage.mark}"))
    # Sorted, since they are stored as they end, which depends on timing.
    played = sorted(read_trajectories(explored), key=lambda one: one.key)
    experts = [one for one in read_trajectories(expert) if succeeded(one)]
    with run.stage(stage.name, run.paths.pairs(stage.mark)) as counts:
        pairs, reasons = pair_with_expert(
            experts, played, settings.threshold, max_extra_turns=settings.max_extra_turns
        )
        counts |= reasons
        console.print("pairs:", ", ".join(f"{reason} {count}" for reason, count in reasons.items() if count))
        if not pairs:
            raise RunError(
                f"no pair is left of {sum(reasons.values())} explored trajectories; lower pair.threshold, explore more "
                "tasks, or take a higher temperature."
            )
        write_pairs(run.paths.pairs(stage.mark), pairs)


def bring_pairs(session: Session, stage: Stage) -> None:
    """Take the pairs of the user's file, ours or TRL's.

    Raises:
        DataError: If a row is malformed, or no pair.
    """
    assert session.recipe.pair is not None
    assert session.recipe.pair.file is not None
    source = user_path(session.recipe.pair.file, "pair.file")
    target = session.run.paths.pairs(stage.mark)
    with session.run.stage(stage.name, target) as counts:
        counts["kept"] = write_pairs(target, rows_of(source, PreferencePair))
