"""Find the checkpoint to resume from, and delete files of earlier iterations that no later stage needs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from perturn.config.recipe import REWARD_MODEL, Recipe
from perturn.config.stages import Stage, average_of, is_scored, mark, policy_of, reward_model_of
from perturn.data.run_folder import Run
from perturn.data.run_paths import OPTIMIZER
from perturn.display.progress_bars import console


def goes_on(recipe: Recipe) -> bool:
    """Return whether the optimizer continues from iteration to iteration."""
    return recipe.iterations > 1 and recipe.align is not None and recipe.align.minibatches is not None


def keeps_average(recipe: Recipe) -> bool:
    """Return whether a moving average of policies is the reference of the iterations."""
    return recipe.iterations > 1 and recipe.align is not None and recipe.align.reference == "average"


def last_checkpoint(folder: Path) -> str | None:
    """Return the newest complete checkpoint, and remove half-written checkpoints."""
    complete = []
    for checkpoint in folder.glob("checkpoint-*"):
        try:  # the trainer writes its state last
            json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
            complete.append(checkpoint)
        except (FileNotFoundError, ValueError):
            console.print(f"removing half-written {checkpoint}")
            shutil.rmtree(checkpoint)
    newest = max(complete, key=lambda checkpoint: int(checkpoint.name.rpartition("-")[2]), default=None)
    return str(newest) if newest else None


def delete_unneeded(run: Run, stage: Stage) -> None:
    """Delete the policies, averages, optimizers and learned quantities of earlier iterations that nothing needs.

    The newest policy, the newest reward model and all evaluated policies are kept.
    """
    recipe = run.recipe
    models = (reward_model_of(recipe, iteration) for iteration in range(1, stage.iteration))
    files = [run.paths.checkpoint(model) for model in models] if recipe.reward_model else []
    # When a reward model is trained, the policy of the previous iteration is still needed.
    for iteration in range(1, stage.iteration - (stage.section == REWARD_MODEL)):
        policy = run.paths.checkpoint(policy_of(recipe, iteration))
        files += [policy / name for name in OPTIMIZER] if is_scored(recipe, iteration) else [policy]
        files += run.paths.all_carried(mark(recipe, iteration))
        if keeps_average(recipe):
            files.append(run.paths.checkpoint(average_of(recipe, iteration)))
    run.delete([file for file in files if file.exists()])
