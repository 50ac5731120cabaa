"""The names a recipe can use, by kind."""

from collections.abc import Callable, Mapping
from typing import Any


def _losses() -> Mapping[str, Any]:
    from perturn.losses import LOSSES

    return LOSSES


def _credits() -> Mapping[str, Any]:
    from perturn.credit import CREDITS

    return CREDITS


def _environments() -> Mapping[str, Any]:
    from perturn.envs import ENVIRONMENTS

    return ENVIRONMENTS


def _engines() -> Mapping[str, Any]:
    from perturn.engines import ENGINES

    return ENGINES


TABLES: dict[str, Callable[[], Mapping[str, Any]]] = {
    "losses": _losses,
    "credits": _credits,
    "environments": _environments,
    "engines": _engines,
}
"""Kind -> its table, loaded when asked for, since some need torch."""
