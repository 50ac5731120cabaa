"""Seeds of a study that begin with one base: together they are one sample of bases, not several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_OF_THE_BASE = ("base", "model")
"""Sections of a recipe that say what a run begins with."""

Bases = Mapping[int, str]
"""Seed -> the base it begins with; a seed that is not there has a base of its own."""


def bases_of(settings: Mapping[str, Any]) -> dict[int, str]:
    """Seeds with their bases: those whose `by_seed` values of the sections `base` and `model` are equal share one.

    Where `by_seed` has neither section, all of its values count, since seeds share what they stand for as well.

    Args:
        settings: The study file, with its defaults.

    Returns:
        None where all seeds share one: the study has then no other sample than its seeds.
    """
    keys = _keys(settings) or list(settings.get("by_seed") or {})
    found = _values(settings, keys)
    return found if len(set(found.values())) > 1 else {}


def has_one_base(settings: Mapping[str, Any], cells: Iterable[Mapping[str, Any]]) -> bool:
    """Whether all seeds begin with one base that the study makes or names for them.

    Args:
        settings: The study file, with its defaults.
        cells: Of one environment.
    """
    keys = _keys(settings)
    is_own = bool(keys) or any(row.get("makes_base") for row in cells)
    return is_own and len(set(_values(settings, keys).values())) <= 1


def seeds_by_base(seeds: Sequence[int], bases: Bases) -> list[list[int]]:
    """Seeds by base, in the order of their first ones."""
    found: dict[str, list[int]] = {}
    for seed in seeds:
        found.setdefault(bases.get(seed, f"seed {seed}"), []).append(seed)
    return list(found.values())


def _keys(settings: Mapping[str, Any]) -> list[str]:
    return [key for key in settings.get("by_seed") or {} if key.partition(".")[0] in _OF_THE_BASE]


def _values(settings: Mapping[str, Any], keys: Sequence[str]) -> dict[int, str]:
    """Values that go with each seed at these keys, from the beginning again where there are fewer values than seeds."""
    given = settings.get("by_seed") or {}
    return {
        seed: repr([given[key][index % len(given[key])] for key in keys])
        for index, seed in enumerate(settings.get("seeds") or [])
    }
