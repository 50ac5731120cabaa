"""Generate games that resemble ALFWorld's: a room with things, and a solvable task.

The games are not ALFWorld's, so all results on them are named `alfworld-like`. A split and a number determine a
game completely. The task is chosen first. Then the things that it needs are placed, so that it is not solved yet but
can be solved.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from perturn.envs.alfworld.game_text import CLOSED, LIKELY, TREATED_AT, kind_of_id, name_entities
from perturn.envs.alfworld.games import KINDS, GameText

SPLITS = {"train": 600, "valid_seen": 600, "valid_unseen": 600}
"""Split -> default number of games."""

_LAYOUTS = 20
"""Number of layouts of each room that `train` and `valid_seen` share. `valid_unseen` has as many other layouts."""

_ROOMS = {
    "kitchen": (
        "cabinet:3-9 drawer:2-6 countertop:1-3 diningtable:0-1 fridge:1-1 microwave:1-1 sinkbasin:1-1 stoveburner:2-4 "
        "coffeemachine:1-1 garbagecan:1-1 shelf:0-3 toaster:1-1",
        "apple bread butterknife cup egg fork knife lettuce mug pan plate potato pot saltshaker peppershaker spatula "
        "spoon tomato bowl dishsponge soapbottle kettle ladle winebottle",
    ),
    "bedroom": (
        "bed:1-2 desk:1-1 drawer:2-6 dresser:1-1 shelf:0-4 sidetable:1-2 garbagecan:1-1 safe:0-1 armchair:0-1",
        "alarmclock book cd cellphone creditcard keychain laptop mug bowl pen pencil pillow desklamp",
    ),
    "bathroom": (
        "sinkbasin:1-2 bathtubbasin:0-1 toilet:1-1 toiletpaperhanger:1-1 handtowelholder:1-2 cabinet:2-4 "
        "countertop:1-1 garbagecan:1-1 shelf:0-2 sidetable:0-1",
        "soapbar soapbottle spraybottle toiletpaper candle cloth dishsponge handtowel tissuebox",
    ),
    "livingroom": (
        "sofa:1-1 armchair:1-2 coffeetable:1-1 tvstand:1-1 sidetable:1-3 diningtable:0-1 drawer:2-4 shelf:0-3 "
        "garbagecan:1-1 ottoman:0-1",
        "book box creditcard keychain laptop newspaper pillow remotecontrol statue tissuebox vase watch plate desklamp",
    ),
}
"""Room -> its receptacles as `kind:minimum-maximum` (the number per room), and the kinds of things found in it."""

_FLAGS = {
    "cleanable": "apple bowl butterknife cloth cup dishsponge egg fork kettle knife ladle lettuce mug pan plate pot "
    "potato soapbar spatula spoon tomato",
    "heatable": "apple bread cup egg mug plate potato tomato",
    "coolable": "apple bowl bread cup egg lettuce mug pan plate pot potato tomato winebottle",
    "sliceable": "apple bread egg lettuce potato tomato",
    "isreceptacleobject": "bowl box cup mug pan plate pot",
    "toggleable": "desklamp",
}
_TREATED = {
    "pick_clean_then_place_in_recep": ("clean", "clean", "cleanable", "isclean"),
    "pick_heat_then_place_in_recep": ("heat", "hot", "heatable", "ishot"),
    "pick_cool_then_place_in_recep": ("cool", "cool", "coolable", "iscool"),
}
"""Kind of task -> treatment, word for a treated thing, flag that a thing needs, and flag that the treatment sets."""
_SAYINGS = {
    "look_at_obj_in_light": ("look at {thing} under the desklamp", "examine the {thing} with the desklamp"),
    "pick_and_place_simple": ("put a {thing} in {place}", "put some {thing} on {place}"),
    "pick_two_obj_and_place": ("put two {thing} in {place}", "find two {thing} and put them in {place}"),
}
_SAYINGS |= {
    kind: (f"put a {state} {{thing}} in {{place}}", f"{treatment} some {{thing}} and put it in {{place}}")
    for kind, (treatment, state, *_) in _TREATED.items()
}
_ALWAYS = ("sinkbasin", "sink", "microwave", "fridge"), ("knife", "butterknife")
"""Kinds of receptacles and things that the PDDL domain mentions, so every problem must declare them."""


@dataclass(frozen=True)
class _Room:
    """A room with its receptacles."""

    name: str
    at: dict[str, str]
    """Receptacle, such as `cabinet_bar_03` -> its location, which drawers may share."""

    def of(self, kind: str) -> list[str]:
        """Return the receptacles of a kind."""
        return [each for each in self.at if kind_of_id(each) == kind]

    def fitting(self, thing: str, *, but: str = "") -> list[str]:
        """Return the receptacles that may hold a kind of thing, without receptacles of the kind `but`."""
        return [each for kind in LIKELY[thing] if kind != but for each in self.of(kind)]


def make_game(split: str, number: int) -> GameText:
    """Return the game with a number in a split; the same number always gives the same game."""
    kind = KINDS[number % len(KINDS)]
    dice = random.Random(f"alfworld-like/{split}/{number}")
    while True:
        layout = dice.randrange(_LAYOUTS) + (_LAYOUTS if split == "valid_unseen" else 0)
        room = _make_room(dice.choice(list(_ROOMS)), layout)
        choices = list(_choices(kind, room))
        if choices:
            return _furnish(f"{split}/{kind}/{number:04d}", kind, room, dice.choice(choices), dice)


def _make_room(name: str, layout: int) -> _Room:
    dice = random.Random(f"alfworld-like/{name}/{layout}")
    found: list[str] = []
    for entry in _ROOMS[name][0].split():
        kind, _, bounds = entry.partition(":")
        few, _, many = bounds.partition("-")
        stem, basin, _ = kind.partition("basin")
        ids = [f"{stem}_bar_{number:02d}" for number in range(dice.randint(int(few), int(many)))]
        found += [f"{each}_bar_{kind}" if basin else each for each in ids]
    at: dict[str, str] = {}
    for number, (before, each) in enumerate(itertools.pairwise(["", *found])):
        twins = kind_of_id(before) == kind_of_id(each) == "drawer"
        at[each] = at[before] if twins and dice.random() < 0.4 else f"loc_bar_{number:02d}"
    return _Room(name, at)


def _choices(kind: str, room: _Room) -> Iterator[tuple[str, str]]:
    """Yield the pairs (kind of thing, kind of receptacle) that a task of this kind can have in a room."""
    things = _ROOMS[room.name][1].split()
    treatment, _, flag, _ = _TREATED.get(kind, ("",) * 4)
    if treatment and not room.of(TREATED_AT[treatment]):
        return
    for thing in things:
        if thing == "desklamp" or (flag and thing not in _FLAGS[flag].split()):
            continue
        if kind == "look_at_obj_in_light":
            if "desklamp" in things and room.fitting(thing):
                yield thing, ""
            continue
        for place in LIKELY[thing]:
            if room.of(place) and room.fitting(thing, but=place):
                yield thing, place


def _furnish(name: str, kind: str, room: _Room, wanted: tuple[str, str], dice: random.Random) -> GameText:
    """Return a game: place the things that the task needs and other things, and write the PDDL problem.

    Args:
        name: Id of the game.
        kind: Kind of task.
        room: Room of the game.
        wanted: Kind of thing and kind of receptacle that the task is about.
        dice: Random generator.
    """
    thing, place = wanted
    count = 2 if kind == "pick_two_obj_and_place" else 1
    lies: dict[str, str] = {}
    needed = [thing] * count + (["desklamp"] if kind == "look_at_obj_in_light" else [])
    others = [each for each in _ROOMS[room.name][1].split() if each != "desklamp" and dice.random() < 0.7]
    for each in needed + [other for other in others for _ in range(dice.randint(1, 2))]:
        choices = room.fitting(each, but=place if each == thing else "")
        if choices:
            lies[f"{each}_bar_{len(lies):02d}"] = dice.choice(choices)
    task = dice.choice(_SAYINGS[kind]).format(thing=thing, place=place)
    problem = _write_problem(room, lies, _write_goal(kind, thing, place))
    walk = _walk(kind, room, lies, list(lies)[: len(needed)], place)
    return GameText(name, task, problem, tuple(walk))


def _write_goal(kind: str, thing: str, place: str) -> str:
    if kind == "look_at_obj_in_light":
        return (
            "(and (exists (?lamp - object ?r - receptacle ?a - agent ?l - location) (and "
            "(objecttype ?lamp desklamptype) (toggleable ?lamp) (istoggled ?lamp) "
            "(receptacleatlocation ?r ?l) (atlocation ?a ?l) (inreceptacle ?lamp ?r))) "
            f"(exists (?o - object ?a - agent) (and (objecttype ?o {thing}type) (holds ?a ?o))))"
        )
    lies = f"(objecttype {{0}} {thing}type) (receptacletype ?r {place}type) (inreceptacle {{0}} ?r)"
    if kind == "pick_two_obj_and_place":
        second = f"(exists (?p - object) (and (not (= ?o ?p)) {lies.format('?p')}))"
        return f"(exists (?r - receptacle) (exists (?o - object) (and {lies.format('?o')} {second})))"
    _, _, flag, state = _TREATED.get(kind, ("",) * 4)
    more = f" ({flag} ?o) ({state} ?o)" if flag else ""
    return f"(exists (?r - receptacle) (exists (?o - object) (and {lies.format('?o')}{more})))"


def _write_problem(room: _Room, lies: dict[str, str], goal: str) -> str:
    """Return the PDDL problem, with one declaration or fact per line."""
    places = sorted({*map(kind_of_id, room.at), *_ALWAYS[0]})
    things = sorted({*map(kind_of_id, lies), *_ALWAYS[1]})
    declared = [
        "agent1 - agent",
        *(f"{each} - object" for each in lies),
        *(f"{kind}type - rtype" for kind in places),
        *(f"{kind}type - otype" for kind in things),
        *(f"{each} - receptacle" for each in room.at),
        *(f"{each} - location" for each in sorted({"loc_bar_99", *room.at.values()})),
    ]
    facts = ["atlocation agent1 loc_bar_99"]
    for each, location in room.at.items():
        facts += [f"receptacletype {each} {kind_of_id(each)}type", f"receptacleatlocation {each} {location}"]
        facts += [f"openable {each}"] if kind_of_id(each) in CLOSED else []
    for each, place in lies.items():
        kind = kind_of_id(each)
        facts += [f"objecttype {each} {kind}type", f"inreceptacle {each} {place}"]
        facts += [f"objectatlocation {each} {room.at[place]}"]
        facts += [f"{flag} {each}" for flag, kinds in _FLAGS.items() if kind in kinds.split()]
        facts += [] if kind == "desklamp" else [f"pickupable {each}"]
    for place in places:
        facts += [f"cancontain {place}type {kind}type" for kind in things if place in LIKELY.get(kind, ())]
    lines = ["(define (problem alfworld_like)", "(:domain alfred)", "(:objects", *declared, ")", "(:init"]
    return "\n".join([*lines, *(f"({fact})" for fact in facts), ")", f"(:goal {goal})", ")"]) + "\n"


def _walk(kind: str, room: _Room, lies: dict[str, str], needed: Sequence[str], place: str) -> Iterator[str]:
    """Yield the commands of a solution, found with full knowledge of the room, in the grammar 0.4."""
    names = name_entities([*room.at, *lies])
    opened: set[str] = set()
    here = ""

    def go(receptacle: str) -> Iterator[str]:
        nonlocal here
        if room.at[receptacle] != here:
            here = room.at[receptacle]
            yield f"go to {names[receptacle]}"

    def visit(receptacle: str) -> Iterator[str]:
        yield from go(receptacle)
        if kind_of_id(receptacle) in CLOSED and receptacle not in opened:
            opened.add(receptacle)
            yield f"open {names[receptacle]}"

    for each in needed:
        yield from visit(lies[each])
        if kind_of_id(each) == "desklamp":
            yield f"use {names[each]}"
            return
        yield f"take {names[each]} from {names[lies[each]]}"
        if kind in _TREATED:
            treatment = _TREATED[kind][0]
            device = room.of(TREATED_AT[treatment])[0]
            yield from go(device)
            yield f"{treatment} {names[each]} with {names[device]}"
        if place:
            target = room.of(place)[0]
            yield from visit(target)
            yield f"move {names[each]} to {names[target]}"
