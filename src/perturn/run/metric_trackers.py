"""Training's metrics to TensorBoard, trackio and Weights & Biases, next to those in the run folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from transformers import TrainerCallback
from transformers.integrations.integration_utils import TensorBoardCallback, TrackioCallback, WandbCallback

from perturn.errors import RunError

PROJECT = "perturn"
"""Project under which trackio and Weights & Biases file a run, unless their own variables say otherwise."""


@contextmanager
def open_trackers(
    names: Iterable[str], folder: Path, run: str, stage: str, step: int
) -> Iterator[list[TrainerCallback]]:
    """Yield the trainer's callbacks that report one stage of a run; close them when the block ends.

    Args:
        names: Trackers to report to.
        folder: For their files.
        run: Name of the run.
        stage: Name of the stage.
        step: Optimizer steps done before, from which a resumed stage continues.

    Raises:
        RunError: If a tracker cannot start, such as Weights & Biases without a key.
    """
    with ExitStack() as stack:
        yield [_open(name, stack, folder, f"{run}-{stage}", step) for name in names]


def _open(name: str, stack: ExitStack, folder: Path, run: str, step: int) -> TrainerCallback:
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        # What a killed call wrote past its checkpoint is hidden, since it will be made again.
        writer = SummaryWriter(folder / "tensorboard" / run, purge_step=step + 1)
        stack.callback(writer.close)
        return TensorBoardCallback(writer)
    if name == "trackio":  # starts and ends with training; its own variables say where it writes
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
    stack.callback(opened.finish)  # so that the next stage is a run of its own
    return WandbCallback()
