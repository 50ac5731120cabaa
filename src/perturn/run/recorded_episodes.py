"""Checks on a file of episodes that a stage is writing: enough environments, incomplete blocks, full contexts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from perturn.data.store import TrajectoryStore
from perturn.display.progress_bars import console
from perturn.episodes.play_many import Job
from perturn.errors import check_fit


def tell_filled(what: str, counts: Mapping[str, int]) -> None:
    """Print how many episodes filled the model's context, if any did."""
    if filled := counts.get("filled_context"):
        says = "filled the model's context; they were truncated there, as at the turn limit, and keep their rewards"
        console.print(f"{what}: {filled} of {counts['episodes']} {says}")


def drop_broken(store: TrajectoryStore, blocks: Iterable[Sequence[Job]]) -> int:
    """Remove the episodes of incomplete blocks from a file, and return their number."""
    held = store.keys()
    keys = [{(job.task.id, job.sample) for job in block} for block in blocks]
    broken = {key for block in keys if not block <= held for key in block & held}
    return store.drop(lambda one: one.key in broken)


def require_worlds(what: str, wanted: int, most: int) -> None:
    """Raise an error if the machine cannot run the environments of a whole block at the same time.

    Raises:
        ConfigError: If there are too few environments; names the setting to change.
    """
    must = f"be >= {wanted}, which deterministic plays at the same time"
    remedy = "Lower their concurrency, which is the size of a block, or raise worlds.processes."
    check_fit(most >= wanted, f"{what}: room for worlds", must, most, remedy)
