"""Engines besides the policy's, such as a judge's: each is a section of a recipe with its own model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from perturn.chat.model_names import for_engine
from perturn.config.parsing import build
from perturn.config.sections import Section
from perturn.display.progress_bars import console
from perturn.engines import ENGINES, EngineSettings, Loaded, Serving
from perturn.table import check_members, check_names, locate
from perturn.traits import EngineTraits
from perturn.types import Engine


def checked_settings(section: Section, where: str) -> EngineSettings:
    """Return the settings of an engine by its section.

    Args:
        section: `name` and settings.
        where: Dotted key of the section.

    Raises:
        ConfigError: If there is no such engine, a setting is wrong, or a foreign engine lacks a part of its contract.
    """
    settings: EngineSettings = build(ENGINES, section, where)
    check_names(type(settings), kind="engine", known=("check", "open"), traits=EngineTraits)
    check_members(settings, ("traits", "check", "open"), "engine", "perturn.engines.EngineSettings")
    return settings


def check_side_engine(section: Section, model: str, where: str, recipe: str) -> None:
    """Check before work whether `open_side_engine` would succeed; nothing is opened.

    Args:
        section: `name` and settings of the engine.
        model: Its model.
        where: Dotted key of the section.
        recipe: Text of the resolved recipe, which must hold no secret.

    Raises:
        PerturnError: With the missing part.
    """
    checked_settings(section, where).check(lambda: locate("perturn.policy.models:empty_model")(model), recipe)


def open_side_engine(section: Section, model: str, where: str, folder: Path | None) -> Engine:
    """Open an engine besides the policy's.

    Args:
        section: `name` and settings of the engine.
        model: Folder, Hub id or bundled name; of an engine that serves no checkpoints, the model's name at its server.
        where: Dotted key of the section.
        folder: Folder in which the engine keeps paid answers; None: in memory.

    Raises:
        PerturnError: If the model cannot be served.
    """
    settings = checked_settings(section, where)
    path, base = model, None
    if settings.traits.serves_checkpoints:
        path, base = for_engine(model, settings.traits.adapter_rank, console.print)
    return settings.open(Serving(model, path, (), _loading(path, model), folder, base=base))


def _loading(path: str, model: str) -> Callable[[], Loaded]:
    """Load the weights of a model, where its engine needs them in this process."""

    def load() -> Loaded:
        found: Loaded = locate("perturn.policy.models:load_policy")(
            path, policy=Path(model).name, dtype="auto", template=None, say=console.print
        )
        return found

    return load
