"""The tables of names that a recipe can use, by kind; each is loaded when it is asked for, since losses need torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from perturn.table import locate

TABLES = {
    "losses": "perturn.losses:LOSSES",
    "credits": "perturn.credit:CREDITS",
    "outcomes": "perturn.settings.outcomes:OUTCOMES",
    "environments": "perturn.envs:ENVIRONMENTS",
    "engines": "perturn.engines:ENGINES",
    "protocols": "perturn.envs.protocols:PROTOCOLS",
    "templates": "perturn.policy.templates:TEMPLATES",
}
"""Kind -> where its table is."""

LISTED = {
    "losses": "What training minimizes; in a recipe align.loss.name.",
    "credits": "What weighs the turns of the alignment: credit.name.",
    "outcomes": "Ways to learn from single episodes: outcomes.name.",
    "environments": "Where tasks are played: environment.name.",
    "engines": "What answers the prompts: engine.name.",
    "protocols": "Rules of an episode: protocol.name.",
    "templates": "Chat templates that serve many turns: model.chat_template.",
    "recipes": "Recipes that come with the package: perturn run NAME.",
}
"""Kind -> a line on it, of all that `perturn list` shows."""


def table(kind: str) -> Mapping[str, Any]:
    """The table of a kind."""
    found: Mapping[str, Any] = locate(TABLES[kind])
    return found


def describe(kind: str) -> dict[str, str]:
    """Each entry of a table and a line on it: how its own documentation begins, what it says, or its system text."""
    return {name: _first_line(entry) for name, entry in table(kind).items()}


def _first_line(entry: Any) -> str:
    own = getattr(entry, "says", None) or getattr(entry, "system", "")
    text = inspect.getdoc(entry) if isinstance(entry, type) else str(own)
    return next(iter((text or "").splitlines()), "")
