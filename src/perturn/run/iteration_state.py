"""State that continues from iteration to iteration: policy, optimizer and moving average."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from perturn.chat.model_names import load_tokenizer
from perturn.config.stages import Stage, average_of, keeps_adapters
from perturn.data.run_folder import Run
from perturn.data.run_paths import OPTIMIZER
from perturn.episodes.seeds import seed_of
from perturn.errors import RunError
from perturn.io.atomic_write import replacing
from perturn.policy.models import load_model
from perturn.run.checkpoint_retention import has_optimizer
from perturn.run.served_policy import policy_path
from perturn.run.session import Session
from perturn.train_processes import world_size
from perturn.training.turn_config import TurnConfig


def go_on(args: TurnConfig, run: Run, stage: Stage, rows: int) -> None:
    """Configure the trainer for one of several iterations: seed, steps, and the optimizer of the previous iteration."""
    recipe = run.recipe
    settings = recipe.align
    assert settings is not None
    if stage.iteration > 1:
        args.seed = seed_of(recipe.seed, stage.section.partition(".")[0], stage.iteration)
    if stage.section != "align" or settings.minibatches is None:
        return
    before = run.paths.checkpoint(stage.start)
    if has_optimizer(run.paths, recipe, stage) and not (before / OPTIMIZER[0]).is_file():
        raise RunError(
            f"{stage.name} would go on with {before / OPTIMIZER[0]}, which was not kept, so it cannot be done again; "
            "restore its policy from a copy, or choose another name (name=...)."
        )
    steps = continue_training(args, rows, settings.minibatches, settings.epochs, recipe.iterations, before)
    if steps <= settings.save_steps:  # only the end of the iteration is saved
        args.save_strategy = "no"
    args.save_steps = settings.save_steps


def continue_training(
    args: TurnConfig, rows: int, minibatches: int, epochs: float, iterations: int, before: Path | None
) -> int:
    """Configure the trainer for one of several iterations, and return its largest number of optimizer steps.

    Args:
        args: Settings of the iteration, which are changed in place.
        rows: Number of rows of the iteration.
        minibatches: Largest number of optimizer steps in an epoch.
        epochs: Number of passes over the rows.
        iterations: Number of iterations in the learning rate schedule.
        before: Folder with the optimizer of the previous iteration. The folder has no optimizer until an iteration has
            trained.
    """
    args.rows_per_batch = math.ceil(rows / minibatches)
    args.per_device_train_batch_size = math.ceil(args.rows_per_batch / world_size())
    steps = math.ceil(minibatches * epochs)
    args.schedule_steps = steps * iterations
    if before is not None and (before / OPTIMIZER[0]).is_file():
        args.optimizer_from = str(before)
    return steps


def stay(session: Session, stage: Stage) -> None:
    """Store the iteration's starting policy and its optimizer as the iteration's result, without training."""
    run, settings = session.run, session.recipe.training(stage.section)
    assert settings is not None
    files = [run.paths.checkpoint(stage.start) / name for name in OPTIMIZER]
    session.training.keep(
        policy_path(run, stage.start),
        run.paths.checkpoint(stage.policy),
        settings.lora,
        [file for file in files if file.is_file()],
        not keeps_adapters(session.recipe, stage.section),
    )
    run.paths.metrics(stage.name).touch()


def move_average(run: Run, stage: Stage) -> None:
    """Update the moving average of policies with the policy of an iteration.

    average <- decay * average + (1 - decay) * policy
    """
    settings = run.recipe.align
    assert settings is not None
    before = policy_path(run, average_of(run.recipe, stage.iteration - 1))
    target = run.paths.checkpoint(average_of(run.recipe, stage.iteration))
    average, policy = (load_model(path) for path in (before, str(run.paths.checkpoint(stage.policy))))
    with torch.no_grad():
        for ours, theirs in zip(average.parameters(), policy.parameters(), strict=True):
            ours.lerp_(theirs, 1 - settings.reference_decay)
    with replacing(target, foreign=(Exception,)) as fresh:
        average.save_pretrained(fresh)
        load_tokenizer(before).save_pretrained(fresh)
