"""Adapters to inference engines, one file each. Add yours to ENGINES."""

from collections.abc import Callable
from typing import Any

from turnwise.engines.local import LocalEngine
from turnwise.engines.scripted import ScriptedEngine

ENGINES: dict[str, Callable[..., Any]] = {"local": LocalEngine, "scripted": ScriptedEngine}
