"""Texts of an ALFWorld game: names of things, lists of them, and the sentences of two grammars.

The sentences equal the official games' word for word, so a policy can be compared across engines.
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
"""Width of the left column where it is not 34."""


@dataclass(frozen=True)
class Grammar:
    """Texts in which the two grammars differ."""

    put: str
    """The command that puts something down."""
    has_put: str
    """The answer to it."""
    arrives: str
    """Answer after going somewhere."""
    helps: bool
    """Whether there is a command `help`."""


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
"""Grammars by the version of the alfworld package whose games they came with."""


def help_text() -> str:
    """Return the answer to `help`."""
    rows = [f"  {f'{command}:'.ljust(_PADDED.get(command, 34))}{what}" for command, what in _COMMANDS]
    return "Available commands:\n" + "\n".join(rows) + "\n"


def name_entities(ids: Iterable[str]) -> dict[str, str]:
    """Turn ids such as `cabinet_bar_..._bar_...` into names such as `cabinet 3`.

    Things of a kind are numbered down in the order of their ids. What has no place (a type, the agent) has no number.
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
    """Turn `cabinet_bar_...` into `cabinet`; a basin is named after what it belongs to."""
    kind = each.partition("_bar_")[0]
    return f"{kind}basin" if "basin" in each else kind


def listed(names: Sequence[str], article: str = "a ") -> str:
    """Return a list in words: `a cup 1, a pen 2, and a pen 1`, or `nothing`."""
    if not names:
        return "nothing"
    *first, last = [f"{article}{name}" for name in names]
    return f"{', '.join(first)}, and {last}" if first else last


def describe(name: str, states: Collection[str]) -> str:
    """Answer to examining an object, which may be hot, cool, clean, on or sliced."""
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
"""Thing -> kinds of receptacles that may hold it, the likeliest first."""

CLOSED = ("cabinet", "drawer", "fridge", "microwave", "safe", "laundryhamper")
"""Kinds of receptacles that have to be opened."""

TREATED_AT = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
"""Treatment -> the kind of receptacle where it is done."""

_UNLIKELY = 0.02
_FIRST, _FALL = 0.65, 0.88


def promise(thing: str, place: str, places: int) -> float:
    """Return the chance per turn of finding a thing by a look into one of `places` places of a kind."""
    likely = LIKELY.get(thing, ())
    chance = _FIRST * _FALL ** likely.index(place) if place in likely else _UNLIKELY
    return float(chance / places**0.7 / (2 if place in CLOSED else 1))
