"""From a recipe's section `environment` to what starts a world in this process."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from turnwise.config import Section, build
from turnwise.envs import ENVIRONMENTS
from turnwise.errors import ConfigError, EnvironmentFailure, TurnwiseError
from turnwise.types import Environment


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
    table: dict[str, Any] = dict(ENVIRONMENTS)
    if ":" in name:
        table[name] = load_object(name)

    def make() -> Environment:
        try:
            world: Environment = build(table, section, "environment")
        except TurnwiseError:
            raise
        except Exception as error:  # environments are code of others
            raise EnvironmentFailure(
                f"environment {name!r} cannot start: {type(error).__name__}: {error}"
            ) from error
        return world

    return make


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
