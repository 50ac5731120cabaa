"""Parse the PDDL problem of an ALFWorld game: its initial facts and its goal.

A problem declares objects, lists the facts that hold at the start, and states the goal as a formula. Names are read in
lower case, as planners do. The domain (preconditions and effects of actions) is the same for all games and is
implemented in `world.py`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perturn.errors import DataError
from perturn.io.read_input import DEEPEST

Literal = tuple[str, ...]
"""A predicate and its arguments. Arguments that start with `?` are existentially quantified variables."""

_FACT = re.compile(r"\((\w+) ([^\s()]+)(?: ([^\s()]+))?\s*\)")
_TOKEN = re.compile(r"[()]|[^\s()]+")
_ARGUMENTS = {
    "thing": "pickupable moveable openable cleanable heatable coolable toggleable sliceable isreceptacleobject opened "
    "isclean ishot iscool istoggled ison issliced full isreceptacleobjectfull",
    "agent": "holdsany holdsanyreceptacleobject",
    "any": "checked examined",
    "any any": "wasinreceptacle cancontain",
    "thing type": "objecttype receptacletype",
    "agent thing": "atlocation holds",
    "thing thing": "receptacleatlocation objectatlocation inreceptacle inreceptacleobject",
}
_PREDICATES = {name: kinds.split() for kinds, names in _ARGUMENTS.items() for name in names.split()}
"""Predicate of ALFWorld's domain -> kinds of its arguments. Only `thing` is checked: its id must contain `_bar_`."""
_MOST_LITERALS, _MOST_VARIABLES = 16, 8
"""Largest numbers of literals and of variables in a goal. ALFWorld's goals have at most 8 literals and 6 variables."""
_TRIED = """objecttype holds isclean ishot iscool istoggled issliced cleanable heatable coolable toggleable sliceable
    pickupable inreceptacle receptacletype receptacleatlocation atlocation differ"""
_GOAL_ORDER = _TRIED.split()
"""Predicates that a goal may contain, in the order of evaluation: the most selective first."""


@dataclass(frozen=True)
class Problem:
    """Initial facts and goal of a game."""

    facts: Mapping[str, Sequence[tuple[str, str]]]
    """Predicate -> argument pairs for which it holds. The second argument is empty if the predicate has only one."""
    goal: tuple[Literal, ...]
    """Literals that must all hold for some assignment of the variables."""


def parse_problem(text: str, where: str) -> Problem:
    """Parse a PDDL problem.

    Args:
        text: The problem.
        where: Source of the problem, for error messages.

    Raises:
        DataError: If the problem is cut off, or does not have the form of ALFWorld's problems.
    """
    text = text.lower()
    start, goal = text.find("(:init"), text.find("(:goal")
    if start < 0 or goal < start or text.count("(") > text.count(")"):
        raise DataError(
            f"{where}: the PDDL problem is incomplete ({len(text)} characters, "
            f"{'no (:init' if start < 0 else 'no (:goal' if goal < start else 'parentheses left open'}). "
            "Fetch the game again."
        )
    facts = _read_facts(text[start + len("(:init") : goal], where)
    if len(facts["atlocation"]) != 1:
        raise DataError(
            f"{where}: the problem must place one agent (atLocation), got {len(facts['atlocation'])}. "
            "Fetch the game again."
        )
    return Problem(facts, _parse_goal(text, goal, where))


def _read_facts(text: str, where: str) -> dict[str, list[tuple[str, str]]]:
    """Parse and check the initial facts; return the argument pairs of each predicate."""
    facts: dict[str, list[tuple[str, str]]] = defaultdict(list)
    rest = _FACT.sub(" ", text).split()
    if rest != [")"]:
        raise DataError(f"{where}: {' '.join(rest)[:80]!r} among the facts is no fact. Fetch the game again.")
    for match in _FACT.finditer(text):
        predicate, one, two = match.groups(default="")
        if predicate not in _PREDICATES:
            raise DataError(
                f"{where}: the problem has a fact {predicate!r}, which ALFWorld's domain has not. "
                "Play such a game with alfworld-official."
            )
        kinds = _PREDICATES[predicate]
        named = all("_bar_" in name for name, kind in zip((one, two), kinds, strict=False) if kind == "thing")
        if bool(two) is not (len(kinds) == 2) or not named:
            raise DataError(
                f"{where}: the fact {match[0][:200]!r} has other arguments than it must. Fetch the game again."
            )
        facts[predicate].append((one, two))
    return facts


def _parse_goal(text: str, start: int, where: str) -> tuple[Literal, ...]:
    """Parse the goal that begins at a position of the text; return its literals in the order of evaluation."""
    tokens = iter(_TOKEN.findall(text, start))
    next(tokens)
    try:
        literals = list(_flatten(_read_list(tokens)[1], {}))
        _check_goal(literals)
        ranked = [(_GOAL_ORDER.index(literal[0]), literal) for literal in literals]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{where}: the goal is none of ALFWorld's six kinds ({type(error).__name__}: {error}). "
            "Play such a game with alfworld-official."
        ) from error
    return tuple(literal for _, literal in sorted(ranked))


def _check_goal(literals: Sequence[Literal]) -> None:
    """Raise `ValueError` if a literal has a wrong number of arguments, or the goal is too large to evaluate quickly."""
    for literal in literals:
        if len(literal) != 1 + len(_PREDICATES.get(literal[0], ["any", "any"])):
            raise ValueError(f"({' '.join(literal)}) has too few or too many arguments")
    variables = {word for literal in literals for word in literal[1:] if word.startswith("?")}
    if not 0 < len(literals) <= _MOST_LITERALS or len(variables) > _MOST_VARIABLES:
        raise ValueError(f"it has {len(literals)} conditions on {len(variables)} things")


def _read_list(tokens: Iterator[str], level: int = 0) -> list[Any]:
    """Return the tokens up to the closing parenthesis, as nested lists."""
    if level > DEEPEST:
        raise ValueError(f"it has more than {DEEPEST} levels")
    found: list[Any] = []
    for token in tokens:
        if token == ")":
            break
        found.append(_read_list(tokens, level + 1) if token == "(" else token)
    return found


def _flatten(tree: Any, renamed: Mapping[str, str]) -> Iterator[Literal]:
    """Yield the literals of a formula made of `and`, `exists` and inequalities.

    Variables are renamed so that each `exists` has its own.

    Args:
        tree: Formula as nested lists.
        renamed: Variable -> its new name, for the enclosing scopes.
    """
    head = tree[0]
    if head == "and":
        for part in tree[1:]:
            yield from _flatten(part, renamed)
    elif head == "exists":
        new = [word for word in tree[1] if word.startswith("?")]
        yield from _flatten(tree[2], {**renamed, **{name: f"{name}#{id(tree)}" for name in new}})
    elif head == "not" and tree[1][0] == "=":
        yield ("differ", *(renamed[name] for name in tree[1][1:]))
    else:
        yield (head, *(renamed[word] if word.startswith("?") else word for word in tree[1:]))


def is_satisfied(
    goal: Sequence[Literal],
    matching: Callable[[str, Sequence[str]], Iterable[Sequence[str]]],
    bound: Mapping[str, str] | None = None,
) -> bool:
    """Return whether some assignment of the variables makes all literals true.

    Args:
        goal: Literals.
        matching: Function (predicate, arguments) -> argument lists for which the predicate is now true. Arguments may
            still be variables. The result may include lists that do not fit the assigned arguments.
        bound: Variable -> its assigned value.
    """
    if not goal:
        return True
    bound = bound or {}
    predicate, *names = goal[0]
    wanted = [bound.get(name, name) for name in names]
    if predicate == "differ":
        return wanted[0] != wanted[1] and is_satisfied(goal[1:], matching, bound)
    for found in matching(predicate, wanted):
        fits = all(want in (name, have) for name, want, have in zip(names, wanted, found, strict=True))
        if fits and is_satisfied(goal[1:], matching, {**bound, **dict(zip(names, found, strict=True))}):
            return True
    return False
