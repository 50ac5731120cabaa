"""Make environments from the section `environment` of a recipe."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from perturn.config.parsing import build
from perturn.config.sections import Section
from perturn.envs import ENVIRONMENTS
from perturn.envs.async_worlds import awaited
from perturn.envs.user_environment import at_border, attribute
from perturn.errors import EnvironmentFailure, PerturnError, check_type
from perturn.faults import close_world
from perturn.io.plain_data import fault, named_error
from perturn.io.user_code import load_object
from perturn.table import package_of
from perturn.types import Environment


def environment_maker(section: Section) -> Callable[[], Environment]:
    """Return a function that makes an environment from the section `environment` of a recipe.

    The key `name` is an entry of ENVIRONMENTS, or `module:Class`.

    Raises:
        ConfigError: If the environment is unknown or a setting is wrong.
    """
    close_world(make_environment(section))  # a wrong setting raises here, before the run begins
    return partial(make_environment, section)


def make_environment(section: Section) -> Environment:
    """Make one environment object from the section `environment` of a recipe."""
    name = str(section["name"])
    own = ":" in name or (name not in ENVIRONMENTS and name.endswith(".py"))
    table: Mapping[str, Any] = {name: load_object(name)} if own else ENVIRONMENTS
    if own:
        check_type(repr(name), table[name], Callable, "a class, or a function that makes the world")
    try:
        world = awaited(build(table, section, "environment", guarded=False))
        if own or package_of("perturn.environments", name) is not None:
            world = at_border(world, name.rpartition(":")[2])
        world_name: object = attribute(world, "name")
    except (PerturnError, KeyboardInterrupt):
        raise
    except BaseException as error:  # an environment is user code and may raise anything
        raise EnvironmentFailure(f"environment {name!r} cannot start: {named_error(error)}") from error
    if not isinstance(world_name, str) or not world_name or fault(world_name, "name"):
        raise EnvironmentFailure(
            f"the environment's name must be a text such as 'game-1.0', got {reprlib.repr(world_name)}."
        )
    return world
