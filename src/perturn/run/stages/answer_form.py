"""The text of a turn that gives an answer, for credits that read the likelihood of answers."""

from __future__ import annotations

from perturn.config.recipe import Recipe
from perturn.envs import ENVIRONMENTS
from perturn.episodes.formats import FORMATS
from perturn.errors import check_fit
from perturn.io.user_code import load_object
from perturn.quantities.answer_turns import MARK
from perturn.run.protocol_rules import make_protocol
from perturn.traits import traits_of

THOUGHT = "I know the answer."
"""Thought before the answer, in formats with thoughts."""


def answer_form(recipe: Recipe) -> str:
    """Return the text of a turn that gives an answer, with `{answer}` in place of the answer.

    The text is the environment's `answer_action`, written in the protocol's format.

    Raises:
        ConfigError: If the environment has no `answer_action`, or actions are tool calls.
    """
    name = str((recipe.environment or {}).get("name"))
    entry = load_object(name) if ":" in name else ENVIRONMENTS.get(name)
    action = traits_of(entry).answer_action
    must = (
        f"be a text with {MARK}, such as 'finish[{MARK}]', since the credit reads the likelihood of answers"
    )
    remedy = "Set it in EnvironmentTraits, or use a credit that reads no answers, such as rloo."
    said = action or ""
    check_fit(said.count(MARK) == 1, f"trait answer_action of environment {name!r}", must, action, remedy)
    rules = make_protocol(recipe.protocol)
    written = FORMATS[rules.format]
    others = " or ".join(key for key, each in FORMATS.items() if not each.native)
    must = f"be {others} for a credit that reads the likelihood of answers"
    remedy = "Or use a credit that reads no answers, such as rloo."
    check_fit(not written.native, "protocol.format", must, rules.format, remedy)
    return written.write(THOUGHT, said)
