"""From a recipe's section `environment` to what starts a world in this process."""

from __future__ import annotations

import importlib
import os
import reprlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from perturn.envs import ENVIRONMENTS
from perturn.envs.awaiting import awaited
from perturn.errors import ConfigError, EnvironmentFailure, PerturnError
from perturn.faults import close_world
from perturn.io.plain import fault, told
from perturn.settings.parsing import build
from perturn.settings.sections import Section
from perturn.types import Environment


def load_object(name: str) -> Any:
    """`module:attribute` or `file.py:attribute` -> the attribute; modules of the current folder are found too.

    Raises:
        ConfigError: If the module or the attribute is not there.
    """
    module, _, attribute = name.partition(":")
    folder, file = os.path.split(module)
    if module.endswith(".py"):
        module = file.removesuffix(".py")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module is code of others
        raise ConfigError(
            f"{name!r} cannot be loaded: {type(error).__name__}: {error}; write it as module:Class or file.py:Class."
        ) from error


def environment_maker(section: Section) -> Callable[[], Environment]:
    """Section `environment` -> what starts a world; `name` is in ENVIRONMENTS or is `module:Class`.

    Raises:
        ConfigError: If there is no such environment or a setting is wrong.
    """
    close_world(make_environment(section))  # a wrong setting shows now, not in the middle
    return partial(make_environment, section)


def make_environment(section: Section) -> Environment:
    """Section `environment` -> one world."""
    name = str(section["name"])
    table: Mapping[str, Any] = {name: load_object(name)} if ":" in name else ENVIRONMENTS
    try:
        world = awaited(build(table, section, "environment"))
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
