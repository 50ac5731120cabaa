"""State of an ALFWorld game: the places of things, the possible commands, and their effects and answers.

A step looks up only the agent's location, the few receptacles there, and their contents. So a step takes microseconds.
The official engine, a planner, goes through all facts and actions of the house.
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from perturn.envs.alfworld.game_text import Grammar, describe, help_text, listed, name_entities
from perturn.envs.alfworld.pddl import Problem, is_satisfied
from perturn.envs.alfworld.shortest import TREATMENTS, House

_ROOM = "You are in the middle of a room. Looking quickly around you, you see "
_KNIVES = ("knifetype", "butterknifetype")
_EFFECTS = {"clean": ("isclean", ""), "heat": ("ishot", "iscool"), "cool": ("iscool", "ishot")}
"""Treatment -> flag that it sets, and flag that it clears."""
_LASTING = "pickupable openable cleanable heatable coolable toggleable sliceable isreceptacleobject"
_CHANGING = "opened isclean ishot iscool istoggled issliced"
_FLAGS = tuple(f"{_LASTING} {_CHANGING}".split())

Commands = dict[str, Callable[[], str]]


class World:
    """State of a running game.

    The game agrees with the official engine, including its oddities:

    - `look` in the middle of the room sees nothing.
    - An object that moved between two receptacles of the same location is described as `next to` the location.
    - An object in a closed receptacle can be switched on or sliced.
    - A lamp stays on once it has been used.
    - Only a held object can be examined.
    """

    def __init__(self, problem: Problem, grammar: Grammar) -> None:
        facts = problem.facts
        self._grammar = grammar
        self._goal = problem.goal
        self._names = name_entities({name for pairs in facts.values() for pair in pairs for name in pair})
        self._types = {name: dict(facts.get(name, ())) for name in ("objecttype", "receptacletype")}
        self._place = dict(facts.get("receptacleatlocation", ()))
        self._flags = {flag: {each for each, _ in facts.get(flag, ())} for flag in _FLAGS}
        self._fits = frozenset(facts.get("cancontain", ()))
        self._within = _grouped(facts.get("inreceptacleobject", ()))
        self._at = _grouped(facts.get("receptacleatlocation", ()))
        self._agent, self._here = facts["atlocation"][0]
        self._contents = _grouped(facts.get("inreceptacle", ()))
        self._lying = _grouped(facts.get("objectatlocation", ()))
        self._held = [each for _, each in facts.get("holds", ())]
        self._left: set[tuple[str, str]] = set()
        self._changes: set[tuple[str, ...]] = set()
        self._travel: dict[str, Commands] = {}
        self._commands: Commands | None = None
        self._won: bool | None = None

    @property
    def commands(self) -> Commands:
        """Admissible command -> function that applies its effect and returns the game's answer."""
        if self._commands is None:
            self._commands = dict(self._list_commands())
        return self._commands

    @property
    def won(self) -> bool:
        """Whether the goal holds."""
        if self._won is None:
            self._won = is_satisfied(self._goal, self._matching)
        return self._won

    def opening(self) -> str:
        """Return the first text of a game, which describes the room."""
        if self._at.get(self._here):
            return self._look()
        return f"{_ROOM}{listed([self._names[each] for each in sorted(self._place)])}."

    def state_key(self) -> str:
        """Return a hash of all changes since the start, except the record of receptacles that objects have left."""
        text = "\n".join(sorted(map(" ".join, self._changes)))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def house(self) -> House:
        """Return the full state of the game for a search. The result is valid only until the next command."""
        return House(
            self._goal,
            self._here,
            self._place,
            self._types["receptacletype"] | self._types["objecttype"],
            self._contents,
            self._held,
            self._flags,
            self._fits,
        )

    # Admissible commands

    def _list_commands(self) -> Iterator[tuple[str, Callable[[], str]]]:
        yield "look", self._look
        yield "inventory", self._inventory
        if self._grammar.helps:
            yield "help", help_text
        yield from self._travels().items()
        for each in self._held:
            yield f"examine {self._names[each]}", partial(self._examine, each)
            yield from self._cuts(each)
        for receptacle in self._at.get(self._here, ()):
            yield from self._receptacle_commands(receptacle)

    def _travels(self) -> Commands:
        """Return the `go to` commands for all receptacles at other locations; cached for each location."""
        if self._here not in self._travel:
            self._travel[self._here] = {
                f"go to {self._names[each]}": partial(self._go, each)
                for each, place in self._place.items()
                if place != self._here
            }
        return self._travel[self._here]

    def _cuts(self, knife: str) -> Iterator[tuple[str, Callable[[], str]]]:
        if self._types["objecttype"].get(knife) in _KNIVES:
            for each in self._lying.get(self._here, ()):
                if each in self._flags["sliceable"]:
                    command = f"slice {self._names[each]} with {self._names[knife]}"
                    yield command, partial(self._slice, each, knife)

    def _receptacle_commands(self, receptacle: str) -> Iterator[tuple[str, Callable[[], str]]]:
        name = self._names[receptacle]
        contents = self._contents.get(receptacle, ())
        yield f"examine {name}", partial(self._examine_receptacle, receptacle)
        is_open = True
        if receptacle in self._flags["openable"]:
            is_open = receptacle in self._flags["opened"]
            yield f"{'close' if is_open else 'open'} {name}", partial(self._open, receptacle, not is_open)
        for each in contents:
            if each in self._flags["toggleable"]:
                yield f"use {self._names[each]}", partial(self._use, each)
        if is_open and not self._held:
            for each in contents:
                if each in self._flags["pickupable"]:
                    yield f"take {self._names[each]} from {name}", partial(self._take, each, receptacle)
        kind = self._types["receptacletype"].get(receptacle, "")
        treatment, flag = TREATMENTS.get(kind, ("", ""))
        for each in self._held:
            if is_open and (kind, self._types["objecttype"].get(each)) in self._fits:
                command = self._grammar.put.format(object=self._names[each], receptacle=name)
                yield command, partial(self._put, each, receptacle)
            if treatment and each in self._flags[flag]:
                command = f"{treatment} {self._names[each]} with {name}"
                yield command, partial(self._treat, treatment, each, receptacle)

    # Effects and answers of commands

    def _look(self) -> str:
        receptacles = self._at.get(self._here, ())
        if not receptacles:
            return f"{_ROOM}nothing."
        beside = [
            self._names[each]
            for each in self._lying.get(self._here, ())
            for receptacle in receptacles
            if (each, receptacle) in self._left
        ]
        facing = listed([self._names[each] for each in receptacles], article="")
        return f"You are facing the {facing}. Next to it, you see {listed(beside)}."

    def _inventory(self) -> str:
        if not self._held:
            return "You are not carrying anything."
        return f"You are carrying: {listed([self._names[each] for each in self._held])}."

    def _go(self, receptacle: str) -> str:
        self._move(self._place[receptacle])
        arrives = self._grammar.arrives.format(
            receptacle=self._names[receptacle], location=self._names[self._here]
        )
        return arrives + self._examine_receptacle(receptacle)

    def _move(self, place: str) -> None:
        self._flip("at", self._here)
        self._here = place
        self._flip("at", place)
        self._commands = None

    def _open(self, receptacle: str, is_open: bool) -> str:
        self._set("opened", receptacle, is_open)
        self._commands = None
        if not is_open:
            return f"You close the {self._names[receptacle]}."
        return f"You open the {self._names[receptacle]}. {self._examine_receptacle(receptacle)}"

    def _examine_receptacle(self, receptacle: str) -> str:
        name = self._names[receptacle]
        seen = listed([self._names[each] for each in self._contents.get(receptacle, ())])
        if receptacle not in self._flags["openable"]:
            return f"On the {name}, you see {seen}."
        if receptacle in self._flags["opened"]:
            return f"The {name} is open. In it, you see {seen}."
        return f"The {name} is closed."

    def _examine(self, each: str) -> str:
        name, flags = self._names[each], self._flags
        if each in flags["isreceptacleobject"]:
            inside = listed([self._names[inner] for inner in self._within.get(each, ())])
            return f"This is a normal {name}. In it, you see {inside}."
        states = {
            "hot": flags["ishot"],
            "cool": flags["iscool"],
            "clean": flags["isclean"],
            "on": flags["toggleable"] & flags["istoggled"],
            "sliced": flags["sliceable"] & flags["issliced"],
        }
        return describe(name, [state for state, members in states.items() if each in members])

    def _take(self, each: str, receptacle: str) -> str:
        self._left.add((each, receptacle))
        self._place_in(self._contents, "in", each, receptacle, False)
        self._place_in(self._lying, "lying", each, self._here, False)
        self._held.append(each)
        self._flip("held", each)
        self._commands = None
        return f"You pick up the {self._names[each]} from the {self._names[receptacle]}."

    def _put(self, each: str, receptacle: str) -> str:
        self._held.remove(each)
        self._flip("held", each)
        self._left.discard((each, receptacle))
        self._place_in(self._contents, "in", each, receptacle, True)
        self._place_in(self._lying, "lying", each, self._here, True)
        self._commands = None
        return self._grammar.has_put.format(object=self._names[each], receptacle=self._names[receptacle])

    def _use(self, each: str) -> str:
        self._set("istoggled", each)
        return f"You turn on the {self._names[each]}."

    def _treat(self, treatment: str, each: str, receptacle: str) -> str:
        gained, lost = _EFFECTS[treatment]
        self._set(gained, each)
        if lost:
            self._set(lost, each, False)
        return f"You {treatment} the {self._names[each]} using the {self._names[receptacle]}."

    def _slice(self, each: str, knife: str) -> str:
        self._set("issliced", each)
        return f"You sliced the {self._names[each]} with the {self._names[knife]}."

    # Changes of the state

    def _set(self, flag: str, each: str, value: bool = True) -> None:
        members = self._flags[flag]
        if (each in members) is not value:
            members ^= {each}
            self._flip(flag, each)

    def _place_in(self, groups: dict[str, list[str]], fact: str, each: str, group: str, value: bool) -> None:
        """Add a thing to a group or remove it, and record the change; do nothing if the group already has that state.

        Args:
            groups: Group -> its sorted members. A thing may be in several groups.
            fact: Name of the fact, such as `in`.
            each: The thing.
            group: The receptacle or location.
            value: True to add, False to remove.
        """
        members = groups.setdefault(group, [])
        if (each in members) is value:
            return
        if value:
            insort(members, each)
        else:
            members.remove(each)
        self._flip(fact, each, group)

    def _flip(self, *fact: str) -> None:
        """Record that a fact changed. A fact that changes twice has its initial value again."""
        self._changes ^= {fact}
        self._won = None

    def _matching(self, predicate: str, wanted: Sequence[str]) -> Iterable[Sequence[str]]:
        """Return the argument lists for which a predicate is true now, as the `matching` of `is_satisfied`."""
        if predicate in self._types:
            return [pair for pair in self._types[predicate].items() if pair[1] == wanted[1]]
        if predicate == "inreceptacle":
            pairs = [(each, place) for place, members in self._contents.items() for each in members]
            return pairs if wanted[0].startswith("?") else [pair for pair in pairs if pair[0] == wanted[0]]
        if predicate == "holds":
            return [(self._agent, each) for each in self._held]
        if predicate == "atlocation":
            return [(self._agent, self._here)]
        if predicate == "receptacleatlocation":
            return self._place.items()
        return [(each,) for each in self._flags[predicate]]


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the sorted members of each group, without duplicates, from pairs (member, group)."""
    found: dict[str, set[str]] = defaultdict(set)
    for member, group in pairs:
        found[group].add(member)
    return {group: sorted(members) for group, members in found.items()}
