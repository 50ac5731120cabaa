"""From a recipe's section `environment` to what starts a world in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from perturn.envs import ENVIRONMENTS
from perturn.envs.outside import load_object as load_object
from perturn.errors import EnvironmentFailure, PerturnError
from perturn.settings.recipe import Section, build
from perturn.types import Environment


def environment_maker(section: Section) -> Callable[[], Environment]:
    """Section `environment` -> what starts a world; `name` is in ENVIRONMENTS or is `module:Class`.

    Raises:
        ConfigError: If there is no such environment or a setting is wrong.
    """
    make = _maker(section)
    make().close()  # a wrong setting shows now, not in the middle
    return make


def make_environment(section: Section) -> Environment:
    """Section `environment` -> one world."""
    return _maker(section)()


def _maker(section: Section) -> Callable[[], Environment]:
    name = str(section["name"])
    table: Mapping[str, Any] = {name: load_object(name)} if ":" in name else ENVIRONMENTS

    def make() -> Environment:
        try:
            world: Environment = build(table, section, "environment")
        except PerturnError:
            raise
        except Exception as error:  # environments are code of others
            raise EnvironmentFailure(
                f"environment {name!r} cannot start: {type(error).__name__}: {error}"
            ) from error
        return world

    return make
