"""Where things are in a household: what an explorer expects, and how a made-up house is furnished.

Orders follow common sense, and were compared with where things lie in ALFWorld's train games.
"""

from __future__ import annotations

import re

_TABLE = """
alarmclock: countertop diningtable desk dresser sidetable shelf
apple: diningtable countertop fridge sidetable microwave garbagecan sinkbasin
baseballbat: bed desk
basketball: bed armchair desk dresser sofa
book: countertop bed coffeetable desk tvstand diningtable dresser sofa armchair cabinet drawer sidetable
    shelf
bowl: desk tvstand diningtable fridge countertop dresser coffeetable cabinet shelf sidetable sinkbasin
    microwave
box: diningtable desk coffeetable sofa shelf dresser cabinet tvstand sidetable armchair
bread: countertop diningtable fridge sidetable
butterknife: countertop diningtable sidetable drawer sinkbasin
candle: sidetable countertop toilet diningtable coffeetable dresser shelf cart tvstand cabinet drawer
cd: diningtable desk dresser sidetable drawer shelf garbagecan cabinet safe
cellphone: countertop diningtable desk coffeetable bed dresser sidetable ottoman armchair sofa drawer shelf
    safe cabinet
cloth: bathtubbasin cabinet dresser drawer shelf cart countertop sinkbasin toilet
creditcard: countertop dresser desk sofa sidetable tvstand drawer ottoman coffeetable shelf diningtable
    armchair
cup: diningtable countertop fridge sidetable cabinet sinkbasin microwave shelf
desklamp: sidetable desk dresser shelf coffeetable diningtable
dishsponge: cart bathtubbasin countertop diningtable sidetable sinkbasin toilet garbagecan drawer cabinet
    shelf
egg: fridge countertop diningtable sidetable sinkbasin garbagecan microwave
floorlamp: sidetable desk dresser sofa armchair bed
fork: countertop diningtable sidetable drawer sinkbasin
glassbottle: diningtable countertop sinkbasin fridge garbagecan cabinet shelf
handtowel: handtowelholder countertop
kettle: stoveburner countertop diningtable cabinet
keychain: desk coffeetable dresser sidetable diningtable drawer tvstand safe armchair sofa ottoman shelf
knife: diningtable countertop drawer sidetable sinkbasin
ladle: countertop diningtable drawer cabinet
laptop: bed countertop diningtable desk coffeetable sofa dresser tvstand armchair ottoman sidetable
lettuce: diningtable countertop fridge sidetable sinkbasin
mug: desk countertop diningtable coffeemachine dresser sidetable fridge microwave sinkbasin cabinet shelf
newspaper: diningtable dresser sofa coffeetable shelf sidetable ottoman armchair tvstand drawer
pan: stoveburner countertop diningtable fridge cabinet
pen: desk diningtable coffeetable countertop dresser sidetable tvstand shelf drawer garbagecan
pencil: desk coffeetable diningtable dresser sidetable countertop shelf drawer tvstand garbagecan
peppershaker: countertop diningtable sidetable cabinet drawer shelf
pillow: bed sofa armchair
plate: diningtable countertop coffeetable fridge cabinet dresser tvstand sidetable shelf
potato: diningtable countertop fridge sidetable sinkbasin microwave garbagecan
pot: stoveburner countertop diningtable fridge cabinet shelf
remotecontrol: desk coffeetable tvstand diningtable dresser countertop sidetable ottoman sofa armchair
    drawer shelf
saltshaker: diningtable countertop sidetable cabinet drawer shelf
soapbar: sinkbasin toilet bathtubbasin countertop sidetable cart shelf garbagecan drawer cabinet
soapbottle: countertop diningtable toilet sidetable cart dresser garbagecan shelf cabinet drawer sinkbasin
spatula: diningtable countertop drawer sinkbasin sidetable
spoon: diningtable countertop drawer sidetable sinkbasin
spraybottle: sidetable countertop toilet diningtable cart garbagecan dresser shelf cabinet
statue: countertop diningtable coffeetable tvstand dresser sidetable desk shelf
tissuebox: coffeetable desk countertop diningtable sidetable cart tvstand shelf cabinet drawer toilet
    dresser
toiletpaper: toilet toiletpaperhanger countertop sidetable dresser cart garbagecan shelf cabinet drawer
tomato: fridge countertop diningtable sidetable sinkbasin garbagecan
vase: countertop dresser diningtable coffeetable tvstand sidetable desk shelf cabinet
watch: tvstand diningtable desk coffeetable sidetable dresser drawer shelf
wateringcan: coffeetable sidetable shelf
winebottle: diningtable countertop cabinet fridge garbagecan shelf
"""

LIKELY: dict[str, tuple[str, ...]] = {
    thing: tuple(places.split()) for thing, places in re.findall(r"(\w+):((?: +\w+|\n +\w+)+)", _TABLE)
}
"""Thing -> kinds of receptacles that may hold it, the likeliest first."""

CLOSED = ("cabinet", "drawer", "fridge", "microwave", "safe", "laundryhamper")
"""Kinds of receptacles that have to be opened."""

TREATED_AT = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
"""Treatment -> the kind of receptacle where it is done."""

_UNLIKELY = 0.02
_FIRST, _FALL = 0.65, 0.88


def promise(thing: str, place: str, places: int) -> float:
    """How much a look into one receptacle promises, for each turn that it takes.

    Args:
        thing: What is looked for, such as `mug`.
        place: The kind of receptacle, such as `cabinet`.
        places: How many of that kind there are: the more, the less each promises.
    """
    likely = LIKELY.get(thing, ())
    chance = _FIRST * _FALL ** likely.index(place) if place in likely else _UNLIKELY
    return float(chance / places**0.7 / (2 if place in CLOSED else 1))
