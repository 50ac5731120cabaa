"""Report training metrics to TensorBoard, trackio and Weights & Biases, besides the run folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from transformers import TrainerCallback
from transformers.integrations.integration_utils import TensorBoardCallback, TrackioCallback, WandbCallback

from perturn.errors import RunError

PROJECT = "perturn"
"""Default project of a run in trackio and Weights & Biases. Their own environment variables override it."""


@contextmanager
def open_trackers(
    names: Iterable[str], folder: Path, run: str, stage: str, step: int
) -> Iterator[list[TrainerCallback]]:
    """Yield trainer callbacks that report a stage of a run, and close them after the block.

    Args:
        names: Names of the trackers.
        folder: Folder for the trackers' files.
        run: Name of the run.
        stage: Name of the stage.
        step: Number of optimizer steps done before, from which a resumed stage continues.

    Raises:
        RunError: If a tracker cannot start, such as Weights & Biases without a key.
    """
    with ExitStack() as stack:
        yield [_open(name, stack, folder, f"{run}-{stage}", step) for name in names]


def _open(name: str, stack: ExitStack, folder: Path, run: str, step: int) -> TrainerCallback:
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        # Hide entries that a killed call wrote after its checkpoint, since they will be made again.
        writer = SummaryWriter(folder / "tensorboard" / run, purge_step=step + 1)
        stack.callback(writer.close)
        return TensorBoardCallback(writer)
    if name == "trackio":  # starts and ends with training, and writes where its own variables say
        return TrackioCallback()
    import wandb

    folder.mkdir(exist_ok=True)
    try:
        opened = wandb.init(project=os.environ.get("WANDB_PROJECT", PROJECT), name=run, dir=folder)
    except wandb.errors.Error as error:
        reason = str(error).strip().splitlines()[0]
        raise RunError(
            f"report_to: wandb cannot start: {reason} Log in with `wandb login`, or set WANDB_MODE=offline."
        ) from error
    stack.callback(opened.finish)  # so that the next stage is a new run
    return WandbCallback()
