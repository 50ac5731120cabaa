"""Checks on a file of episodes: sampled tokens, enough environments, incomplete blocks, full contexts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from perturn.data.store import TrajectoryStore
from perturn.display.progress_bars import console
from perturn.episodes.play_many import Job
from perturn.errors import DataError, check_fit
from perturn.types import Trajectory, failed


def check_sampled(row: Trajectory) -> None:
    """Reject an explored episode unless it holds its sampled tokens, with log-probabilities of their sampling.

    Raises:
        DataError: If the loss of `align` cannot read the episode. A FAILED episode is not checked.
    """
    if failed(row):
        return
    for index, turn in enumerate(row.turns):
        if turn.carries_loss and (turn.action.token_ids is None or turn.action.logprobs is None):
            raise DataError(
                f"task {row.task.id!r:.80}: turns[{index}].action holds no token_ids with logprobs, which the loss of "
                "align reads. Episodes that hold only texts can become pairs: rows={name: group-pairs}, credit=null "
                "and align.loss={name: tlm-dre}."
            )
    if row.sharpened:
        raise DataError(
            f"task {row.task.id!r:.80}: an answer was sampled at another temperature or top_p than 1, so the loss of "
            "align cannot read its log-probabilities, at temperature 1. Leave the row out. To record sessions at "
            "temperature 1, start `perturn serve` with serve.temperature=1 serve.top_p=1."
        )


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
