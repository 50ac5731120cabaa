"""Where things are in a household: what an explorer expects, and how a made-up house is furnished.

Orders follow common sense, and were compared with where things lie in ALFWorld's train games.
"""

from __future__ import annotations

import json
from pathlib import Path

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
    """How much a look for a thing into one of so many `places` of a kind promises, for each turn that it takes."""
    likely = LIKELY.get(thing, ())
    chance = _FIRST * _FALL ** likely.index(place) if place in likely else _UNLIKELY
    return float(chance / places**0.7 / (2 if place in CLOSED else 1))
