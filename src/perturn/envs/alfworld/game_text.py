"""Texts of ALFWorld games: names of things, lists of things, and the sentences of the two grammars.

The sentences are word for word the sentences of the official games, so policies can be compared across engines.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_COMMANDS = (
    ("look", "look around your current location"),
    ("inventory", "check your current inventory"),
    ("go to (receptacle)", "move to a receptacle"),
    ("open (receptacle)", "open a receptacle"),
    ("close (receptacle)", "close a receptacle"),
    ("take (object) from (receptacle)", "take an object from a receptacle"),
    ("move (object) to (receptacle)", "place an object in or on a receptacle"),
    ("examine (something)", "examine a receptacle or an object"),
    ("use (object)", "use an object"),
    ("heat (object) with (receptacle)", "heat an object using a receptacle"),
    ("clean (object) with (receptacle)", "clean an object using a receptacle"),
    ("cool (object) with (receptacle)", "cool an object using a receptacle"),
    ("slice (object) with (object)", "slice an object using a sharp object"),
)
_PADDED = {"move (object) to (receptacle)": 32}
"""Command -> width of its left column in the help text, if it is not 34 characters."""


@dataclass(frozen=True)
class Grammar:
    """Texts in which the two grammars differ."""

    put: str
    """Command that puts an object down."""
    has_put: str
    """Answer to the command `put`."""
    arrives: str
    """Start of the answer to `go to`."""
    helps: bool
    """Whether the command `help` exists."""


GRAMMARS = {
    "0.4": Grammar(
        put="move {object} to {receptacle}",
        has_put="You move the {object} to the {receptacle}.",
        arrives="You arrive at {receptacle}. ",
        helps=True,
    ),
    "0.3": Grammar(
        put="put {object} in/on {receptacle}",
        has_put="You put the {object} in/on the {receptacle}.",
        arrives="You arrive at {location}. ",
        helps=False,
    ),
}
"""Version of the alfworld package -> grammar of its games."""


def help_text() -> str:
    """Return the answer to `help`."""
    rows = [f"  {f'{command}:'.ljust(_PADDED.get(command, 34))}{what}" for command, what in _COMMANDS]
    return "Available commands:\n" + "\n".join(rows) + "\n"


def name_entities(ids: Iterable[str]) -> dict[str, str]:
    """Return the names, such as `cabinet 3`, of things with ids such as `cabinet_bar_..._bar_...`.

    Within a kind, the largest id gets number 1. Ids of types and of the agent contain no `_bar_` and get no name.
    """
    kinds: dict[str, list[str]] = defaultdict(list)
    for each in ids:
        if "_bar_" in each:
            kinds[kind_of_id(each)].append(each)
    return {
        each: f"{kind} {number}"
        for kind, members in kinds.items()
        for number, each in enumerate(sorted(members, reverse=True), start=1)
    }


def kind_of_id(each: str) -> str:
    """Return the kind of an id: `cabinet` for `cabinet_bar_...`, and `sinkbasin` for the basin of a sink."""
    kind = each.partition("_bar_")[0]
    return f"{kind}basin" if "basin" in each else kind


def listed(names: Sequence[str], article: str = "a ") -> str:
    """Return names as an English list, such as `a cup 1, a pen 2, and a pen 1`; `nothing` if there are none."""
    if not names:
        return "nothing"
    *first, last = [f"{article}{name}" for name in names]
    return f"{', '.join(first)}, and {last}" if first else last


def describe(name: str, states: Collection[str]) -> str:
    """Return the answer to examining an object, whose states may be hot, cool, clean, on or sliced."""
    heat = "hot" if "hot" in states else "cool"
    felt = " and ".join(word for word in (heat, "clean") if word in states)
    if felt and "sliced" in states:
        return f"This is a {felt} sliced {name}."
    if felt:
        return f"This is a {'cold' if felt == 'cool' else felt} {name}."
    if "on" in states:
        return f"This {name} is on."
    return f"This is a sliced {name}." if "sliced" in states else f"There's nothing special about {name}."


_TABLE: dict[str, str] = json.loads(Path(__file__).with_name("places.json").read_text(encoding="utf-8"))

LIKELY: dict[str, tuple[str, ...]] = {thing: tuple(places.split()) for thing, places in _TABLE.items()}
"""Kind of thing -> kinds of receptacles that may hold it, likeliest first."""

CLOSED = ("cabinet", "drawer", "fridge", "microwave", "safe", "laundryhamper")
"""Kinds of receptacles that have to be opened."""

TREATED_AT = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
"""Treatment -> kind of receptacle that it needs."""

_UNLIKELY = 0.02
_FIRST, _FALL = 0.65, 0.88


def promise(thing: str, place: str, places: int) -> float:
    """Return the score of a kind of receptacle for a search; the expert searches the highest scores first.

    The score estimates the probability per turn of finding the thing in such a receptacle.

    Args:
        thing: Kind of thing.
        place: Kind of receptacle.
        places: Number of receptacles of that kind in the room.
    """
    likely = LIKELY.get(thing, ())
    chance = _FIRST * _FALL ** likely.index(place) if place in likely else _UNLIKELY
    return float(chance / places**0.7 / (2 if place in CLOSED else 1))
