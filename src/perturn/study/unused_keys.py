"""Keys of a study that no cell would read, refused before any cell is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from functools import reduce
from typing import Any

from perturn.config.key_suggestions import keys_of, unknown_key
from perturn.config.recipe import Recipe
from perturn.errors import ConfigError, check_none
from perturn.select.lookup import traits_of
from perturn.study.settings import SWEEP, Study

OF_THE_ALIGNMENT = ("explore", "rows", "reward", "credit", "iterations")
"""Sections that go where the alignment goes; exploration stays where a score learns from it."""
_OF_THE_STUDY = {
    "seed": "list seeds in the study's own `seeds`",
    "name": "leave it out",
    "output": "set the study's own `output`",
    "cluster": "set it in the recipe",
    "evaluate.tasks": "set the study's own `test.tasks` and `tune.tasks`",
}
"""Keys of a recipe that a study gives its cells itself, and what to do instead of laying them over it."""


def refuse_unknown(study: Study) -> None:
    """Refuse keys that are of no section of a recipe, where null would go unseen, and keys that are the study's own."""
    check_none(_wrong("by_seed", study.by_seed))
    check_none(_wrong(SWEEP, study.sweep))
    for name, overlay in study.environments.items():
        check_none(_wrong(f"environments.{name}", _spread(overlay)))
    for name, method in study.methods.items():
        check_none(
            _wrong(f"methods.{name}", _spread({key: value for key, value in method.items() if key != SWEEP}))
        )
        own = method.get(SWEEP)
        check_none(_wrong(f"methods.{name}.{SWEEP}", own if isinstance(own, Mapping) else ()))


def _spread(overlay: Mapping[str, Any]) -> Iterator[str]:
    """Keys of an overlay, and those of sections that it sets whole."""
    for key, value in overlay.items():
        yield str(key)
        if isinstance(value, Mapping):
            yield from (f"{key}.{each}" for each in value)


def _wrong(where: str, keys: Iterable[Any]) -> Iterator[str]:
    """Yield the keys whose first part is of no recipe, or that are the study's."""
    known = [each.name for each in fields(Recipe)]
    for key in map(str, keys):
        first, *below = key.split(".")
        if first not in known:
            value = reduce(_within, reversed(below), None)
            yield (f"{where}: {unknown_key(first, value, known, keys_of(Recipe), typed=key)}")
        for own, instead in _OF_THE_STUDY.items():
            if f"{key}.".startswith(f"{own}."):
                yield (f"{where}: {key[:200]!r} is the study's to set in each cell; {instead}.")


def _within(value: Any, key: str) -> dict[str, Any]:
    """A mapping with one key."""
    return {key: value}


def without_alignment(data: Mapping[str, Any]) -> list[str]:
    """Sections that go where a recipe, as it is written, has no alignment."""
    return [key for key in OF_THE_ALIGNMENT if key != "explore" or not _is_explored_for_a_score(data)]


def _is_explored_for_a_score(data: Mapping[str, Any]) -> bool:
    """Whether a policy that is taught here is scored by a selector that learns from what it explores."""
    part = data.get("evaluate")
    section = part.get("select") if isinstance(part, Mapping) else None
    if not isinstance(section, Mapping) or "name" not in section:
        return False
    return "explored" in traits_of(section).needs and any(
        data.get(name) is not None for name in ("base", "sft")
    )


def refuse_without_alignment(study: Study, method: str, data: Mapping[str, Any]) -> None:
    """Refuse what a method without an alignment sets, or sweeps, of the sections that go with it.

    Args:
        study: The study.
        method: Its name.
        data: Its recipe, as it is written.
    """
    own, gone = study.methods[method], without_alignment(data)
    swept = own.get(SWEEP)
    for key, value in {**own, **(swept if isinstance(swept, Mapping) else {})}.items():
        if value is not None and key.partition(".")[0] in gone:
            raise ConfigError(
                f"methods.{method} sets {key}, which goes with the alignment, and has none (`align: null`); remove "
                "the one or the other."
            )
