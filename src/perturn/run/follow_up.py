"""The recipe that follows another: `then` of a recipe, which starts from the last policy that the recipe trains."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

from perturn.config.parsing import parse, to_mapping
from perturn.config.recipe import Recipe
from perturn.config.stages import policy_of
from perturn.data.run_folder import run_folder
from perturn.data.run_paths import RunPaths
from perturn.errors import ConfigError, check_belongs

_SHARED = (
    "model",
    "environment",
    "protocol",
    "engine",
    "evaluate",
    "deterministic",
    "worlds",
    "cluster",
    "launch",
    "report_to",
    "seed",
)
"""Settings that the second recipe takes from the first where `then` does not have them."""
_GIVEN = ("name", "output", "model", "base")
"""Settings that follow from the first recipe, and that `then` cannot have."""


def following(recipe: Recipe) -> Recipe | None:
    """Return the recipe that `then` describes, or None where a recipe has no `then`.

    Its run lies next to the run of the first recipe, under the same name with `-then` at its end.

    Raises:
        ConfigError: If `then` has a setting that it cannot have, or the first recipe trains no policy.
    """
    if recipe.then is None:
        return None
    given = {f"then.{key}": True for key in _GIVEN if key in recipe.then}
    check_belongs(given, False, "the recipe that comes before", "leave it out of then")
    if not (recipe.sft or recipe.align):
        raise ConfigError("then begins with a trained policy, and this recipe trains none; set sft or align.")
    last = RunPaths(run_folder(recipe)).checkpoint(policy_of(recipe, recipe.iterations))
    shared = {key: value for key, value in to_mapping(recipe).items() if key in _SHARED}
    shared["model"]["name"] = str(last)
    its = {"name": f"{recipe.name}-then", "output": recipe.output}
    return parse(Recipe, shared | recipe.then | its, "then")


def planned(recipe: Recipe) -> list[Recipe]:
    """Return the recipe and its later ones, in the form that can be checked before anything was trained.

    Each later recipe begins with the model of the first one, which has the same sizes and the same tokenizer, until its
    own model exists. None follows a recipe that is still to make its model, since nothing can be checked without a
    model.
    """
    found, follows = [recipe], following(recipe)
    while follows is not None:
        if not (os.path.isdir(follows.model.name) or RunPaths(run_folder(follows)).is_run):
            if recipe.base is not None:
                break
            follows = dataclasses.replace(follows, model=recipe.model)
        found.append(follows)
        follows = following(follows)
    return found


def in_order(recipe: Recipe) -> Iterator[Recipe]:
    """Yield the recipe, and then each that follows; a recipe is made once those before it have been run."""
    current: Recipe | None = recipe
    while current is not None:
        yield current
        current = following(current)
