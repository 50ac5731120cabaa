"""Policies, averages, optimizers and learned quantities of many iterations: which go on, and which nothing needs."""

from __future__ import annotations

from perturn.config.recipe import REWARD_MODEL, Recipe
from perturn.config.stages import Stage, average_of, is_scored, mark, policy_of, reward_model_of
from perturn.data.run_folder import Run
from perturn.data.run_paths import OPTIMIZER


def goes_on(recipe: Recipe) -> bool:
    """Return whether the next iteration continues with the optimizer of the last one."""
    return recipe.iterations > 1 and recipe.align is not None and recipe.align.minibatches is not None


def keeps_average(recipe: Recipe) -> bool:
    """Return whether a moving average of policies is some iteration's reference."""
    return recipe.iterations > 1 and recipe.align is not None and recipe.align.reference == "average"


def let_go(run: Run, stage: Stage) -> None:
    """Remove policies, averages, optimizers and learned quantities of earlier iterations that nothing needs any more.

    The newest policy stays, and those that are scored; of reward models the newest.
    """
    recipe = run.recipe
    models = (reward_model_of(recipe, iteration) for iteration in range(1, stage.iteration))
    files = [run.paths.checkpoint(model) for model in models] if recipe.reward_model else []
    # A reward model is made while the policy of the iteration before still acts.
    for iteration in range(1, stage.iteration - (stage.section == REWARD_MODEL)):
        policy = run.paths.checkpoint(policy_of(recipe, iteration))
        files += [policy / name for name in OPTIMIZER] if is_scored(recipe, iteration) else [policy]
        files += run.paths.all_carried(mark(recipe, iteration))
        if keeps_average(recipe):
            files.append(run.paths.checkpoint(average_of(recipe, iteration)))
    run.let_go([file for file in files if file.exists()])
