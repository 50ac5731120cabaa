"""From a recipe's section `environment` to what starts a world in this process."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from perturn.envs import ENVIRONMENTS
from perturn.envs.outside import load_object as load_object
from perturn.errors import EnvironmentFailure, PerturnError
from perturn.faults import close_world
from perturn.io.plain import fault, told
from perturn.settings.recipe import Section, build
from perturn.types import Environment


def environment_maker(section: Section) -> Callable[[], Environment]:
    """Section `environment` -> what starts a world; `name` is in ENVIRONMENTS or is `module:Class`.

    Raises:
        ConfigError: If there is no such environment or a setting is wrong.
    """
    make = _maker(section)
    close_world(make())  # a wrong setting shows now, not in the middle
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
            world_name: object = getattr(world, "name", None)
        except (PerturnError, KeyboardInterrupt):
            raise
        except BaseException as error:  # environments are code of others
            raise EnvironmentFailure(
                f"environment {name!r} cannot start: {type(error).__name__}: {told(error)}"
            ) from error
        if not isinstance(world_name, str) or not world_name or fault(world_name, "name"):
            raise EnvironmentFailure(
                f"the environment's name must be a text such as 'game-1.0', got {reprlib.repr(world_name)}."
            )
        return world

    return make
