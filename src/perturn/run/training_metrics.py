"""Report the progress and the metrics of a training: on the screen, in the run folder, and to trackers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from transformers import TrainerCallback, TrainerState
from transformers.integrations.integration_utils import TensorBoardCallback, TrackioCallback, WandbCallback

from perturn.data.run_folder import Run
from perturn.display.progress_bars import Tokens, Work, bar
from perturn.errors import RunError
from perturn.io.atomic_write import append_line, sync, sync_whole, write_whole, writing
from perturn.train_processes import leads
from perturn.training.turn_trainer import TurnTrainer

PROJECT = "perturn"
"""Default project of a run in trackio and Weights & Biases. Their own environment variables override it."""
_OFFLINE = ("offline", "dryrun", "disabled")
"""Modes in which Weights & Biases does not resume. A second run with the id would replace the first one on a sync."""


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

    project = os.environ.get("WANDB_PROJECT", PROJECT)
    same: dict[str, Any] = {}
    if os.environ.get("WANDB_MODE") not in _OFFLINE:
        same = {"id": _own_id(folder / f"wandb-{run}.txt", step), "resume": "allow"}
    try:
        opened = wandb.init(project=project, name=run, dir=folder, **same)
    except wandb.errors.Error as error:
        reason = str(error).strip().splitlines()[0]
        raise RunError(
            f"report_to: wandb cannot start: {reason} Log in with `wandb login`, or set WANDB_MODE=offline."
        ) from error
    stack.callback(opened.finish)  # so that the next stage is a new run
    return WandbCallback()


def _own_id(file: Path, step: int) -> str:
    """Return the id of a tracker's run, which a resumed stage shares with the call before it."""
    if not step or not file.is_file():
        write_whole(file, uuid4().hex)
    return file.read_text(encoding="utf-8")


def _logged(entry: Mapping[str, Any]) -> str:
    """Return a line of metrics with sorted keys, as in checkpoints, so that a resumed training writes equal lines."""
    return json.dumps(entry, sort_keys=True)


class TrainingProgress(TrainerCallback):
    """Callback that shows progress, writes each metric to a file at once, and keeps only the newest checkpoint."""

    def __init__(self, run: Run, stage: str, what: str, tell: Callable[..., None]) -> None:
        self._run, self._file, self._what, self._tell = run, run.paths.metrics(stage), what, tell
        self._open = ExitStack()
        self._bar: Work | None = None
        self._passed: Callable[[], int] = lambda: 0
        self._an_epoch = 0.0
        self._tokens: Tokens | None = None

    def follow(self, trainer: TurnTrainer, an_epoch: int) -> None:
        """Measure progress by the tokens that pass through a trainer; `an_epoch` is the expected number per epoch."""
        self._passed, self._an_epoch = (lambda: trainer.tokens_passed), an_epoch

    def close(self) -> None:
        """Remove the progress bar from the screen, also after an error."""
        self._open.close()

    def say(self, notice: str) -> None:
        """Show a notice instead of the name of the training."""
        self._what = notice
        if self._bar is not None:
            self._bar.what = notice

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Write the metrics up to the checkpoint. Later entries are dropped, as a resumed training makes them again."""
        if leads():
            write_whole(self._file, "".join(_logged(entry) + "\n" for entry in state.log_history))
        state.save_steps = args.save_steps  # the checkpoint's may differ
        self._run.expect(self._file, state.max_steps, state.global_step, "steps")
        self._tell(total=state.max_steps, done=state.global_step)
        a_step = self._an_epoch * float(args.num_train_epochs) / max(1, state.max_steps)
        self._tokens = Tokens(self._passed, state.max_steps - state.global_step, a_step)
        shown = bar(self._what, state.max_steps, state.global_step, "steps", self._tokens)
        self._bar = opened = self._open.enter_context(shown)
        self._run.follow(lambda: opened.seconds_left)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Advance the progress bar."""
        assert self._bar is not None
        assert self._tokens is not None
        self._tokens.stepped()
        self._bar.advance()

    def on_save(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Remove older checkpoints, once the newest checkpoint is on the disk.

        `save_total_limit` does not trust the file times of checkpoints that are less than a second apart.
        """
        if not leads():
            return
        folder = Path(args.output_dir)
        newest = folder / f"checkpoint-{state.global_step}"
        with writing(newest):
            sync_whole(newest)
            sync(folder)
        for checkpoint in folder.glob("checkpoint-*"):
            if checkpoint != newest:
                shutil.rmtree(checkpoint)

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        """Write a metric."""
        if logs is None or "train_runtime" in logs:  # the trainer's final summary is no step
            return
        entry = {**logs, "step": state.global_step}
        if leads():
            append_line(self._file, _logged(entry))
