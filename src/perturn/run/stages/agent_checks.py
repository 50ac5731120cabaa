"""Check that a recipe does not ask an agent's program for something that only turn-by-turn environments can do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from perturn.config.compatibility import explorer_name
from perturn.config.recipe import Recipe
from perturn.config.stages import rows_name
from perturn.envs.world_process import plays_itself
from perturn.errors import check_none
from perturn.quantities import wanted
from perturn.run.protocol_rules import make_protocol
from perturn.training.credit_choice import named_credit
from perturn.types import EpisodeProtocol

_NOT_TOLD = ("system", "suffix", "example", "history", "list_admissible")
"""Settings of a protocol that change the texts that a policy sees."""
_PLAIN: dict[str, Any] = {each.name: each.default for each in fields(EpisodeProtocol)}


def check_agent(recipe: Recipe) -> None:
    """Reject recipes that ask an agent's program about an episode, or set texts that the program writes itself.

    Raises:
        ConfigError: If the recipe is rejected; names the alternative.
    """
    if recipe.environment is not None and plays_itself(recipe.environment):
        check_none(_faults(recipe))


def _faults(recipe: Recipe) -> Iterator[str]:
    """Yield messages about settings of a recipe that an agent's program does not support."""
    for reader, name in _replaying(recipe):
        yield (
            f"{reader} needs {name}, which asks the environment about an episode, and an agent's program cannot be "
            "asked; take another, such as credit.name=rloo, rows.name=groups or explore.name=branches."
        )
    protocol = make_protocol(recipe.protocol)
    for key in (key for key in _NOT_TOLD if getattr(protocol, key) != _PLAIN[key]):
        yield (
            f"protocol.{key} is set, and an agent's program writes its own prompts; leave it out, and let the program "
            "say it."
        )
    if recipe.worlds.pass_env:
        names = ", ".join(recipe.worlds.pass_env)
        yield f"worlds.pass_env is for worlds, and an agent's program is none; write environment.pass_env=[{names}]."
    if recipe.evaluate is not None and recipe.evaluate.turns is not None:
        yield (
            "evaluate.turns tells a policy how many turns are left, and an agent's program writes its own prompts; "
            "leave it out, and set protocol.max_turns."
        )


def _replaying(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield each reader of a quantity that needs the environment, with the name of the quantity."""
    readers: list[tuple[str, Any]] = []
    if recipe.align is not None:
        name, credit = named_credit(recipe.align.loss, recipe.credit)
        readers.append((f"credit {name}", credit.needs))
    if recipe.rows is not None:
        readers.append((f"rows.name={rows_name(recipe)}", recipe.rows.needs))
    if recipe.explore is not None:
        readers.append((f"explore.name={explorer_name(recipe)}", recipe.explore.needs))
    for reader, needs in readers:
        for name, (quantity, _) in wanted(needs, reader).items():
            if quantity.traits.reads_world:
                yield reader, str(name)
