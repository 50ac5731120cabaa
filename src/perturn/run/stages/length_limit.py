"""Episodes and pairs against the length limit of training: which fit, whole or at their start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from perturn.chat.tokens import Renderer
from perturn.config.recipe import Recipe
from perturn.data.run_folder import base_of
from perturn.errors import DataError
from perturn.policy.models import context_length, empty_model
from perturn.run.session import engine_settings, make_renderer
from perturn.types import PreferencePair, Trajectory


def too_long(recipe: Recipe, episodes: Sequence[Trajectory]) -> set[tuple[str, int]]:
    """Return the keys of episodes whose first turn, or first after another's, does not fit."""
    limit = _limit(recipe)
    if limit is None:
        return set()
    renderer = make_renderer(recipe, base_of(recipe))
    begun = (replace(one, turns=one.turns[: one.taken_over + 1]) for one in episodes if one.turns)
    return {one.key for one in begun if renderer.encode(one).longest > limit}


def fits_whole(recipe: Recipe, one: Trajectory) -> bool:
    """Whether an episode fits whole."""
    limit = _limit(recipe)
    return limit is None or make_renderer(recipe, base_of(recipe)).encode(one).longest <= limit


def alike_within_limit(recipe: Recipe, pairs: Sequence[PreferencePair]) -> list[bool]:
    """Return whether the sides of each pair are the same tokens within the limit, and part after it.

    A pair of which a first turn does not fit is none of these; training refuses it, and says so. So is each pair where
    the policy cannot be read here.
    """
    limit = _limit(recipe) if engine_settings(recipe).traits.serves_checkpoints else None
    if limit is None:
        return [False] * len(pairs)
    renderer = make_renderer(recipe, base_of(recipe))
    sides = [[_fitting_ids(renderer, side, limit) for side in (pair.chosen, pair.rejected)] for pair in pairs]
    return [one is not None and one == other for one, other in sides]


def _fitting_ids(renderer: Renderer, side: Trajectory, limit: int) -> tuple[int, ...] | None:
    """Tokens of the turns that fit; None where not even the first one does."""
    try:
        return renderer.encode(side, limit).ids
    except DataError:
        return None


def _limit(recipe: Recipe) -> int | None:
    """Longest sequence of training, in tokens; None: any."""
    return recipe.model.max_length or context_length(empty_model(base_of(recipe)))
