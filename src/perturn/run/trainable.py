"""Whether a recipe's policies can be trained as it says, found out before work on the model without its weights."""

from __future__ import annotations

import importlib.util

from perturn.data.run_folder import run_folder
from perturn.errors import ConfigError
from perturn.losses import LOSSES
from perturn.policy.logprobs import check_architecture
from perturn.policy.models import add_adapters, context_length, empty_model
from perturn.policy.reference import choose_credit
from perturn.run.train import lora_config, make_config
from perturn.settings.recipe import Recipe, Train, build


def check_training(recipe: Recipe) -> None:
    """Make the losses, credits and the trainer's settings.

    Raises:
        ConfigError: If a setting is wrong, or what it needs is not installed.
    """
    for name, settings, on_pairs in (("sft", recipe.sft, False), ("align", recipe.align, True)):
        if settings is not None:
            _check_stage(recipe, name, settings, on_pairs)


def _check_stage(recipe: Recipe, name: str, settings: Train, on_pairs: bool) -> None:
    loss = build(LOSSES, settings.loss, f"{name}.loss")
    if loss.needs_rejected is not on_pairs or getattr(loss, "needs_behavior", False):
        fitting = [
            key
            for key, each in LOSSES.items()
            if each.needs_rejected is on_pairs and not getattr(each, "needs_behavior", False)
        ]
        raise ConfigError(
            f"{name}.loss.name must be a loss on {'pairs' if on_pairs else 'single trajectories'} "
            f"({', '.join(fitting)}), got {settings.loss['name']!r}."
        )
    choose_credit(loss, settings.loss, recipe.credit if on_pairs else None)
    try:
        make_config(recipe, settings, run_folder(recipe), limit=None)
    except (ValueError, ConfigError) as error:  # of the trainer's own settings
        raise ConfigError(f"{name}: {error}") from error
    if settings.lora and importlib.util.find_spec("peft") is None:
        raise ConfigError(f'{name}.lora needs peft; run: pip install "perturn[lora]"')


def check_model(recipe: Recipe, trains: bool) -> None:
    """Build the model without its weights, and upon it what trains it.

    Args:
        recipe: Of the run.
        trains: Whether it is to be trained.

    Raises:
        PerturnError: If it cannot be trained as the recipe says.
    """
    model = empty_model(recipe.model.name)
    if trains:
        check_architecture(model)
    limit, most = context_length(model), recipe.model.max_length
    if limit is not None and most is not None and most > limit:
        raise ConfigError(f"model.max_length must be <= {limit}, the model's own limit, got {most}.")
    for name, settings in (("sft", recipe.sft), ("align", recipe.align)):
        if settings is not None and settings.lora is not None:
            try:
                add_adapters(empty_model(recipe.model.name), lora_config(settings.lora), recipe.seed)
            except ConfigError as error:
                raise ConfigError(f"{name}.lora: {error}") from error
