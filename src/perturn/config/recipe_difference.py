"""Compare two recipes of a run folder: which settings can change its results, and which setting differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from perturn.bounds import efforts
from perturn.config.parsing import dotted, to_mapping
from perturn.config.recipe import Recipe
from perturn.table_index import entry_named


def difference(theirs: Recipe, ours: Recipe) -> str | None:
    """Return the first setting that can change a run's results and differs, with both values; None: no difference.

    Args:
        theirs: Recipe that the run has recorded.
        ours: Recipe that would continue the run.
    """
    recorded, given = _compared(theirs), _compared(ours)
    may_differ = _may_differ(ours)
    if not ours.deterministic:  # the sizes of batches change the rounding
        may_differ |= set(_efforts_within(ours))
    for key in sorted(recorded.keys() | given.keys()):
        if recorded.get(key) != given.get(key) and may_differ.isdisjoint(_and_sections(key)):
            return f"{key} is {recorded.get(key)!r} there and {given.get(key)!r} here"
    return None


def counted_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that can change a stage's results or the timing of its episodes, by dotted key."""
    may_differ = _may_differ(recipe)
    flat = dotted(to_mapping(recipe))
    return {key: value for key, value in flat.items() if may_differ.isdisjoint(_and_sections(key))}


def _compared(recipe: Recipe) -> dict[str, Any]:
    """Return all settings by dotted key, with the path of a model inside `output` made relative to it.

    So a run that starts from a policy of another run can be moved together with that run.
    """
    flat, model = dotted(to_mapping(recipe)), Path(recipe.model.name)
    if model.is_relative_to(recipe.output):
        flat["model.name"] = str(model.relative_to(recipe.output))
    return flat


def _may_differ(recipe: Recipe) -> set[str]:
    """Return the keys of the recipe, its engines, backend and environment that are marked as `EFFORT`."""
    found = efforts(Recipe)
    judge = recipe.judge.engine if recipe.judge else {}
    sections = (  # a recipe that plays nothing has no environment
        ("engine", "engines", recipe.engine),
        ("backend", "backends", recipe.backend),
        ("environment", "environments", recipe.environment or {}),
        ("reward.judge.engine", "engines", judge),
        ("user.engine", "engines", recipe.user.engine if recipe.user else {}),
    )
    for section, kind, settings in sections:
        entry = entry_named(kind, str(settings.get("name")))
        found |= {f"{section}.{name}" for name in efforts(entry)} if entry is not None else set()
    return found


def _efforts_within(settings: Any, where: str = "") -> Iterator[str]:
    """Yield the dotted keys that are marked as `EFFORT` in a dataclass and in its sections that are dataclasses."""
    yield from (f"{where}{name}" for name in efforts(type(settings)))
    for each in fields(settings):
        section = getattr(settings, each.name)
        if is_dataclass(section):
            yield from _efforts_within(section, f"{where}{each.name}.")


def _and_sections(key: str) -> Iterator[str]:
    """Yield a dotted key and the keys of the sections around it."""
    while key:
        yield key
        key = key.rpartition(".")[0]
