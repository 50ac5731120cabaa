"""The tables of names that a recipe can use, by kind; each is loaded when it is asked for, since losses need torch."""

from __future__ import annotations

import inspect
from typing import Any

from perturn.table import Table, locate

TABLES = {
    "losses": "perturn.losses:LOSSES",
    "credits": "perturn.credit:CREDITS",
    "environments": "perturn.envs:ENVIRONMENTS",
    "engines": "perturn.engines:ENGINES",
    "protocols": "perturn.envs.protocols:PROTOCOLS",
}
"""Kind -> where its table is."""


def table(kind: str) -> Table[Any]:
    """The table of a kind."""
    found: Table[Any] = locate(TABLES[kind])
    return found


def describe(kind: str) -> dict[str, str]:
    """Each entry of a table and a line on it: how its own documentation begins, or its system text."""
    return {name: _first_line(entry) for name, entry in table(kind).items()}


def _first_line(entry: Any) -> str:
    text = inspect.getdoc(entry) if isinstance(entry, type) else str(getattr(entry, "system", ""))
    return next(iter((text or "").splitlines()), "")
