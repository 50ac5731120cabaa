"""Index of the tables of names that a recipe can use; a table is imported on first use, since some need torch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from perturn.errors import ConfigError
from perturn.io.user_code import load_object
from perturn.table import at_defaults, locate
from perturn.types import EpisodeProtocol

TABLES = {
    "losses": "perturn.losses:LOSSES",
    "token-inputs": "perturn.losses.token_inputs:TOKEN_INPUTS",
    "credits": "perturn.credit:CREDITS",
    "quantities": "perturn.quantities:QUANTITIES",
    "explorers": "perturn.explore:EXPLORERS",
    "rows": "perturn.rows:ROWS",
    "selectors": "perturn.select:SELECTORS",
    "environments": "perturn.envs:ENVIRONMENTS",
    "engines": "perturn.engines:ENGINES",
    "backends": "perturn.backends:BACKENDS",
    "protocols": "perturn.envs.named_protocols:PROTOCOLS",
    "templates": "perturn.chat.templates:TEMPLATES",
}
"""For each kind of entry, the module and name of its table."""

LISTED = {
    "losses": "Losses that the alignment minimizes: align.loss.name.",
    "token-inputs": "Values of each token that a loss may read: LossTraits.reads.",
    "credits": "Methods that give each turn its weight: credit.name.",
    "quantities": "Values of turns that credits and losses read.",
    "explorers": "Ways to sample the episodes of an iteration: explore.name.",
    "rows": "Ways to make training rows from episodes: rows.name.",
    "selectors": "Scores for best-of-n and reranking: evaluate.select.name.",
    "environments": "Environments with tasks to play: environment.name.",
    "engines": "Inference engines that sample actions: engine.name.",
    "backends": "Where policies are trained: backend.name.",
    "protocols": "Rules of an episode, such as its turn limit: protocol.name.",
    "templates": "Chat templates for many turns: model.chat_template.",
    "recipes": "Recipes of the package: perturn run NAME.",
}
"""For each kind of entry, the description that `perturn list` shows."""


def table(kind: str) -> Mapping[str, Any]:
    """Import and return the table of a kind of entry."""
    found: Mapping[str, Any] = locate(TABLES[kind])
    return found


def entry_named(kind: str, name: str) -> Any:
    """Return an entry by its name, or as `file.py:Class`; None if there is none, such as code that no longer exists."""
    if ":" not in name:
        return table(kind).get(name)
    try:
        return load_object(name)
    except ConfigError:
        return None


def describe(kind: str) -> dict[str, str]:
    """Return a one-line description of each entry of a table, by the entry's name.

    An entry of a package that cannot be loaded is described by its error.
    """
    return {name: _description(kind, name) for name in table(kind)}


def _description(kind: str, name: str) -> str:
    try:
        return _first_line(table(kind)[name])
    except ConfigError as error:
        return f"cannot be loaded: {error}"


@dataclass(frozen=True)
class Method:
    """Description of a loss, a credit or a quantity, taken from its class."""

    says: str
    source: str
    """Paper or code from which the method comes."""
    reads: tuple[str, ...]
    """Inputs of the method with its default settings: kinds of rows, and quantities."""
    cost: str
    """Additional work for the inputs, besides rollouts and training."""


def methods(kind: str) -> dict[str, Method]:
    """Return a description of each loss, credit or quantity, by its name.

    Args:
        kind: `losses`, `credits` or `quantities`.
    """
    read = {"losses": _reads_of_loss, "credits": _reads_of_credit, "quantities": _reads_of_quantity}[kind]
    return {name: _method(entry, read) for name, entry in table(kind).items()}


def _method(entry: Any, read: Callable[[Any], dict[str, str]]) -> Method:
    one = at_defaults(entry)
    found = read(entry if one is None else one)
    source = re.search(r"Source: (.*?)(?:\nDiffers:|\n\n|\Z)", inspect.getdoc(entry) or "", re.DOTALL)
    return Method(
        _first_line(entry),
        " ".join(source[1].split()) if source else "",
        tuple(filter(None, found)),
        "; ".join(dict.fromkeys(filter(None, found.values()))),
    )


def _reads_of_credit(credit: Any) -> dict[str, str]:
    """Return the cost of each input of a credit, by the input's name."""
    found = {
        name: one.traits.cost for name, (one, _) in locate("perturn.quantities:wanted")(credit.needs).items()
    }
    if credit.traits.needs_group:
        found["groups"] = ""
    if credit.traits.trains_branches:
        found["branches"] = "episodes that branch from recorded ones"
    return found


def _reads_of_quantity(quantity: Any) -> dict[str, str]:
    """Return the cost of each input of a quantity, by the input's name."""
    traits = quantity.traits
    read = [f"policy {role}" for role in sorted(traits.policies)]
    read += ["environment"] * traits.reads_world + ["branches"] * traits.reads_branches
    return dict.fromkeys(read or [""], traits.cost)  # without inputs, the cost is still reported


def _reads_of_loss(loss: Any) -> dict[str, str]:
    """Return the cost of each input of a loss, by the input's name."""
    found = {named: cost for claim, (named, cost) in _NEEDS.items() if getattr(loss.traits, claim)}
    return found | {each if isinstance(each, str) else each.name: "" for each in loss.traits.reads}


_NEEDS = {
    "needs_rejected": ("pairs", ""),
    "needs_reference": ("reference", "a pass of the reference over the rows, kept"),
    "needs_mismatched": ("labels", "a pass of the policy over rows with others' actions"),
    "needs_behavior": ("behavior", ""),
    "needs_proximal": ("proximal", "a pass of the policy over the rows before the first step"),
}
"""For each requirement that a loss may declare, the name of the required input, and its cost."""


def _first_line(entry: Any) -> str:
    """Return the first line of a class's docstring, of a protocol's system text, or of a template's description."""
    if isinstance(entry, type):
        text = inspect.getdoc(entry) or ""
    else:
        text = entry.system if isinstance(entry, EpisodeProtocol) else entry.says
    return next(iter(text.splitlines()), "")
