"""Form in which a recipe's episodes give an answer, for credits that ask how likely it is."""

from __future__ import annotations

from perturn.config.recipe import Recipe
from perturn.envs import ENVIRONMENTS
from perturn.envs.load_environment import load_object
from perturn.episodes.formats import FORMATS
from perturn.errors import ConfigError
from perturn.quantities.answer_turns import MARK
from perturn.run.protocol_rules import make_protocol
from perturn.traits import traits_of

THOUGHT = "I know the answer."
"""Thought before the answer, in formats that have thoughts."""


def answer_form(recipe: Recipe) -> str:
    """Return the text of a turn that gives an answer, with `{answer}` in place of the answer.

    It is the action of the environment's `answer_action` as the protocol's format writes it.

    Raises:
        ConfigError: If the environment does not say how an answer is given, or actions are tool calls.
    """
    name = str((recipe.environment or {}).get("name"))
    entry = load_object(name) if ":" in name else ENVIRONMENTS.get(name)
    action = traits_of(entry).answer_action
    if action is None or action.count(MARK) != 1:
        raise ConfigError(
            f"environment {name!r} does not say how an answer is given, and the credit reads the likelihood of "
            f"answers; give its class traits = EnvironmentTraits(answer_action=...), a text with {MARK} such as "
            f"'finish[{MARK}]', or use a credit that reads no answers, such as rloo."
        )
    rules = make_protocol(recipe.protocol)
    written = FORMATS[rules.format]
    if written.native:
        raise ConfigError(
            f"protocol.format {rules.format!r} gives answers as tool calls, whose likelihood is not computed; take "
            "format react or action, or a credit without, such as rloo."
        )
    return written.write(THOUGHT, action)
