"""Engines besides the policy's engine, such as a judge's. Each has a section of the recipe and a model of its own."""

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
    """Return the settings of an engine from its section.

    Args:
        section: `name` and settings.
        where: Dotted key of the section.

    Raises:
        ConfigError: If there is no such engine, a setting is wrong, or an engine of another package lacks a method or
            trait.
    """
    settings: EngineSettings = build(ENGINES, section, where)
    check_names(type(settings), kind="engine", known=("check", "open"), traits=EngineTraits)
    check_members(settings, ("traits", "check", "open"), "engine", "perturn.engines.EngineSettings")
    return settings


def check_side_engine(section: Section, model: str, where: str, recipe: str) -> None:
    """Check before any work whether `open_side_engine` would succeed. Nothing is opened.

    Args:
        section: `name` and settings of the engine.
        model: Model of the engine.
        where: Dotted key of the section.
        recipe: Text of the resolved recipe, which must hold no secret.

    Raises:
        PerturnError: If it would not succeed; names what is missing.
    """
    checked_settings(section, where).check(lambda: locate("perturn.policy.models:empty_model")(model), recipe)


def open_side_engine(section: Section, model: str, where: str, folder: Path | None) -> Engine:
    """Open an engine besides the policy's engine.

    Args:
        section: `name` and settings of the engine.
        model: Folder, Hub id or bundled name; for an engine that only calls a server, the name of the model on this
            server.
        where: Dotted key of the section.
        folder: Folder for the engine's paid answers. None: answers are kept in memory.

    Raises:
        PerturnError: If the model cannot be served.
    """
    settings = checked_settings(section, where)
    path, base = model, None
    if settings.traits.serves_checkpoints:
        path, base = for_engine(model, settings.traits.adapter_rank, console.print)
    return settings.open(Serving(model, path, (), loading(path, Path(model).name), folder, base=base))


def loading(
    path: str,
    policy: str,
    dtype: str = "auto",
    template: str | None = None,
    say: Callable[[str], None] = console.print,
) -> Callable[[], Loaded]:
    """Return a function that loads the weights of a model, for an engine that needs them in this process.

    Args:
        path: Folder or Hub id of the model.
        policy: Name of the policy.
        dtype: As in the section `model` of a recipe.
        template: Chat template; None: the tokenizer's own.
        say: Prints a message to the user.
    """

    def load() -> Loaded:
        found: Loaded = locate("perturn.policy.models:load_policy")(
            path, policy=policy, dtype=dtype, template=template, say=say
        )
        return found

    return load
