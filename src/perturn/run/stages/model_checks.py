"""Check that a recipe's model can be built, without weights and without a trainer."""

from __future__ import annotations

from typing import Any

import torch

from perturn.chat.tokens import Renderer
from perturn.config.recipe import REWARD_MODEL, Recipe
from perturn.errors import check_fit, within
from perturn.policy.lora_adapters import lora_config
from perturn.policy.models import add_adapters, check_vocabulary, context_length, empty_model, new_model
from perturn.rotary import trainable_length
from perturn.run.session import backend_settings
from perturn.table import locate

_VOCABULARY = 700
"""Assumed vocabulary size of a model to be pretrained, about as large as ALFWorld's."""


def empty_base(recipe: Recipe) -> Any:
    """Return the model that a run begins with, without weights. A model to be pretrained gets an assumed vocabulary."""
    if recipe.base is None:
        return empty_model(recipe.model.name)
    with torch.device("meta"):
        return new_model(recipe.base.shape, _VOCABULARY)


def check_model(recipe: Recipe, trains: bool, renderer: Renderer | None) -> None:
    """Check a recipe's model, its adapters and its length limit, without loading weights.

    Args:
        recipe: Recipe of the run.
        trains: Whether the command trains the model, if the recipe has a training.
        renderer: Renderer of the model. None: the run makes the model itself.

    Raises:
        PerturnError: If the model cannot be trained as the recipe says.
    """
    model = empty_base(recipe)
    if renderer is not None:
        name = f"chat template of {recipe.model.name}"
        check_vocabulary(model, renderer.tokenizer, renderer.probe_ids, name)
    here = "models" in backend_settings(recipe).traits.provides
    if trains and here:
        locate("perturn.policy.logprobs:check_architecture")(model)
    trainings = {name: recipe.training(name) for name in ("sft", REWARD_MODEL, "align")}
    trains = trains and any(trainings.values())
    limit, most = own_limit(recipe, model) if trains else context_length(model), recipe.model.max_length
    fits = limit is None or most is None or most <= limit
    longest = f"the longest sequence that this model {'can be trained on' if trains else 'supports'}"
    check_fit(fits, "model.max_length", f"be <= {limit}, {longest}", most)
    for name, settings in trainings.items():
        if settings is not None and settings.lora is not None and here:
            with within(f"{name}.lora: "):
                add_adapters(empty_base(recipe), lora_config(settings.lora), recipe.seed)


def own_limit(recipe: Recipe, model: Any) -> int | None:
    """Return the longest sequence in tokens on which a recipe can train a model; None: no limit.

    Packed training in this process does not reach beyond a sliding window. A training service does.
    """
    here = "models" in backend_settings(recipe).traits.provides
    limits = (context_length(model), trainable_length(model.config) if here else None)
    return min((limit for limit in limits if limit is not None), default=None)
