"""The rule on choices that go together: needs are provided, imposed properties are taken, and nothing goes to waste."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import MISSING, fields, replace
from typing import TYPE_CHECKING, Any

from perturn.needs import Distance
from perturn.settings.exploring import ExploreSettings
from perturn.settings.sections import require
from perturn.table import name_of
from perturn.tables import table

if TYPE_CHECKING:
    from perturn.settings.recipe import Recipe

IMPOSED = {
    "unfinished": "episodes that are not over",
    "some-episodes": "branches of some episodes alone, which tell how these ended",
    "prover": "branches of another policy than the one that explored",
    "cut-branches": "branches that are not over",
    "dependent-branches": "branches at turns that depend on the other samples of the task",
}
"""Property of an explorer's episodes that their readers must take -> in words."""
_PROVIDED = {
    "tree": "a tree",
    "regular-branches": "branches at regular turns",
    "turn-branches": "branches at every turn (explore.every=1)",
}
"""Episodes that an explorer provides -> in words, where they differ from the name."""

Needs = Iterable[str | Collection[str]]
"""Needs of a reader of the explorer; of a collection any one will do."""


def explorer_name(recipe: Recipe) -> str:
    """Return the name of the explorer of a recipe that explores."""
    return name_of(table("explorers"), type(recipe.explore))


def providers(*needs: str) -> list[str]:
    """Return the explorers that provide any of these with their default settings."""
    found: dict[str, ExploreSettings] = {name: entry() for name, entry in table("explorers").items()}
    return [name for name, one in found.items() if not one.traits.provides.isdisjoint(needs)]


def misfit(recipe: Recipe, reader: str, needs: Needs, takes: Collection[str]) -> str | None:
    """Return why a reader cannot read what the explorer gathers; None: it can.

    Args:
        recipe: With an explorer.
        reader: Who reads, such as `rows.name=tree-pairs`.
        needs: What it needs of the explorer.
        takes: Properties of episodes that it takes, of `IMPOSED`.
    """
    assert recipe.explore is not None
    name, traits = explorer_name(recipe), recipe.explore.traits
    for need in needs:
        options = (need,) if isinstance(need, str) else tuple(sorted(need))
        if traits.provides.isdisjoint(options):
            has, others = ", ".join(sorted(traits.provides)) or "none", providers(*options)
            tail = f"; explorers that do: {', '.join(others)}" if others else ""
            return (
                f"{reader} needs {' or '.join(_PROVIDED.get(each, each) for each in options)}, and explore.name={name} "
                f"provides {has}{tail}."
            )
    imposed = next((each for each in sorted(traits.imposes) if each not in takes), None)
    if imposed is None:
        return None
    return (
        f"{reader} does not take {IMPOSED.get(imposed, imposed)}, which explore.name={name} has; "
        f"{_without(recipe.explore, imposed)}."
    )


def _without(explorer: ExploreSettings, imposed: str) -> str:
    """How to have episodes without a property: the setting that brings it, else another explorer."""
    for each in fields(explorer):
        default: Any = each.default_factory() if each.default_factory is not MISSING else each.default
        plain = replace(explorer, **{each.name: default})
        if imposed not in plain.traits.imposes:
            return f"set explore.{each.name}={'null' if default is None else default}"
    others = (name for name, entry in table("explorers").items() if imposed not in entry().traits.imposes)
    return f"take explore.name={' or '.join(others)}"


def check_compatible(recipe: Recipe) -> None:
    """Reject a recipe whose rows and evaluation cannot read what its explorer gathers.

    What a credit reads is checked before work, as it may need torch.

    Raises:
        ValueError: Saying what to set.
    """
    explorer = recipe.explore
    if explorer is None:
        return
    traits, reader, needs = explorer.traits, _rows_of(recipe), needs_of_rows(recipe)
    if reader:
        problem = misfit(recipe, reader, needs, takes_of_rows(recipe))
        require(problem is None, problem or "")
    read = {each for need in needs for each in ((need,) if isinstance(need, str) else need)}
    require(
        recipe.groups is not None or not traits.provides or bool(traits.provides & read),
        f"explore.name={explorer_name(recipe)} provides {', '.join(sorted(traits.provides))}, which "
        f"{reader or 'nothing'} reads{' not' if reader else ''}; take explore.name=rollouts.",
    )
    choice = recipe.evaluate and (recipe.evaluate.best_of or recipe.evaluate.rerank)
    if choice and choice.by == "value":
        problem = misfit(recipe, "by=value", (), set(IMPOSED) - {"unfinished"})
        require(problem is None, problem or "")
    require(
        not traits.resumes_earlier or recipe.iterations > 1,
        f"explore.name={explorer_name(recipe)} resumes episodes in the next iteration; set iterations > 1.",
    )
    require(
        traits.policy != "sft" or recipe.sft is not None,
        "explore.policy is sft, and the recipe has no section sft; add one, or take explore.policy=base.",
    )
    _check_senses(explorer, recipe.pair or recipe.groups)


def _check_senses(explorer: ExploreSettings, rows: Any) -> None:
    """Reject distances in two senses."""
    sense = next((need.sense for need in explorer.needs if isinstance(need, Distance)), None)
    other = rows.remaining if rows else None
    require(
        None in (sense, other) or sense == other,
        f"explore.distance is {sense}, and the rows read {other}; a run measures one sense alone.",
    )


def _rows_of(recipe: Recipe) -> str:
    """The maker of rows of the explored episodes, for messages; empty: there is none."""
    if recipe.groups is not None:
        return "groups"
    if recipe.outcomes is not None:
        return f"outcomes.name={recipe.outcomes.name}"
    return f"pair.within={recipe.pair.within}" if recipe.pair and recipe.pair.file is None else ""


def needs_of_rows(recipe: Recipe) -> tuple[str | frozenset[str], ...]:
    """Return what the rows need of the explorer; groups need what their credit needs."""
    pair = recipe.pair
    if pair is None or pair.file is not None:
        return ()
    if pair.within == "branch" and pair.by == "drop":
        return ("turn-branches" if pair.one_turn else "regular-branches",)
    found: dict[str, tuple[str | frozenset[str], ...]] = {
        "branch": (frozenset({"branches", "wrong-branches", "expert-branches"}),),
        "step": ("expert-branches",),
        "tree": ("tree",),
    }
    return found.get(pair.within, ())


def takes_of_rows(recipe: Recipe) -> frozenset[str]:
    """Return the properties of episodes that the rows take; of groups those that no credit has a say in."""
    if recipe.groups is not None:
        return frozenset(IMPOSED) - ({"unfinished"} if recipe.groups.drop_equal_outcomes else set())
    pair = recipe.pair
    cut = {"cut-branches"} if pair and pair.by == "progress" and pair.one_turn else set()
    return frozenset({"some-episodes", "prover", "dependent-branches"} | cut)
