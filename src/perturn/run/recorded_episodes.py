"""Checks on a file of episodes: sampled tokens, chat template, environments, incomplete blocks, full contexts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from perturn.chat.model_names import load_tokenizer
from perturn.chat.templates import choose_template
from perturn.chat.tokens import Renderer
from perturn.data.run_folder import resolve_recipe
from perturn.data.run_paths import RunPaths
from perturn.data.store import TrajectoryStore
from perturn.display.progress_bars import console
from perturn.episodes.play_many import Job
from perturn.errors import DataError, PerturnError, check_fit
from perturn.types import Trajectory, failed

_logger = logging.getLogger(__name__)


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


def warn_of_other_template(file: Path, renderer: Renderer) -> None:
    """Warn if the run that holds a file of sampled episodes has another chat template than the trained policy.

    A run is not compared if its recipe cannot be read, or names neither a template nor a local folder of a model.
    """
    paths = RunPaths(file.resolve().parent.parent)
    if not paths.is_run or paths.trajectories(file.stem) != file.resolve():
        return
    with suppress(PerturnError):
        sampler = resolve_recipe(paths.folder).model
        if sampler.chat_template is None and not Path(sampler.name).is_dir():
            return
        tokenizer = renderer.tokenizer if sampler.chat_template else load_tokenizer(sampler.name)
        template = choose_template(tokenizer, sampler.chat_template)
        if template != renderer.template:
            _logger.warning(
                "explore.path: the episodes were sampled with another chat template than this recipe's, so their "
                "log-probabilities belong to other prompts than the trained ones. Set model.chat_template as in %s: "
                "%.60s",
                paths.recipe,
                sampler.chat_template or "it is not set there",
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
