"""Check that a recipe's model can be built, without weights and without a trainer."""

from __future__ import annotations

from typing import Any

import torch

from perturn.chat.tokens import Renderer
from perturn.config.recipe import REWARD_MODEL, Recipe
from perturn.errors import check_fit, within
from perturn.policy.lora_adapters import lora_config
from perturn.policy.models import add_adapters, check_vocabulary, context_length, empty_model, new_model
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
        trains: Whether the model will be trained.
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
    limit, most = context_length(model), recipe.model.max_length
    fits = limit is None or most is None or most <= limit
    check_fit(fits, "model.max_length", f"be <= {limit}, the model's own limit", most)
    for name, settings in ((name, recipe.training(name)) for name in ("sft", REWARD_MODEL, "align")):
        if settings is not None and settings.lora is not None and here:
            with within(f"{name}.lora: "):
                add_adapters(empty_base(recipe), lora_config(settings.lora), recipe.seed)
