"""Episodes that are left out by the signals that they show."""

from __future__ import annotations

from collections.abc import Iterable

from perturn.episodes.triage import SIGNALS, broken, signals_of
from perturn.errors import ConfigError, did_you_mean
from perturn.settings.recipe import Recipe
from perturn.settings.signals import Signals
from perturn.types import Trajectory, failed

_KNOWN = [name for name in SIGNALS if name != broken.__name__]
"""Signals to choose by; an episode that FAILED is counted as that."""


def check_signals(recipe: Recipe) -> None:
    """Refuse signals that there are not.

    Raises:
        ConfigError: Naming the setting, and those that there are.
    """
    for section in ("pair", "groups"):
        settings = getattr(getattr(recipe, section), "signals", None) or Signals()
        for key in ("without", "only"):
            for name in getattr(settings, key):
                if name not in _KNOWN:
                    raise ConfigError(
                        f"{section}.signals.{key}: unknown signal {name!r:.80}.{did_you_mean(name, _KNOWN)}"
                    )


def left_out(episodes: Iterable[Trajectory], settings: Signals) -> set[tuple[str, int]]:
    """Keys of the episodes that are left out; none that FAILED."""
    return {one.key for one in episodes if settings and not failed(one) and not _is_chosen(one, settings)}


def _is_chosen(one: Trajectory, settings: Signals) -> bool:
    shown = set(signals_of(one))
    return shown.isdisjoint(settings.without) and (not settings.only or not shown.isdisjoint(settings.only))
