"""Length of the shortest solution of an ALFWorld game from its current state, with full knowledge of the house.

A solution is a sequence of subtasks: fetch a thing, treat it, put it down, or light a lamp. Walking to a receptacle and
opening it belong to the subtask that needs them. So an edge of the search is a subtask, not a single command. Commands
that no shortest solution contains are not searched. Examples are opening an unused receptacle, taking an unwanted
thing, and putting a fetched thing anywhere but into the target.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from perturn.envs.alfworld.pddl import Literal
from perturn.errors import EnvironmentFailure

TREATMENTS = {
    "sinkbasintype": ("clean", "cleanable"),
    "sinktype": ("clean", "cleanable"),
    "microwavetype": ("heat", "heatable"),
    "fridgetype": ("cool", "coolable"),
}
"""Type of receptacle -> (treatment that is possible there, flag that a thing must have for this treatment)."""
_STATES = {"isclean": "clean", "ishot": "heat", "iscool": "cool"}
"""State that a goal requires -> treatment that sets it."""


@dataclass(frozen=True)
class House:
    """Current state of a game, with ids of the PDDL problem as names. The fields belong to `World`: only read them."""

    goal: Sequence[Literal]
    here: str
    """Location of the agent."""
    location: Mapping[str, str]
    """Receptacle -> its location. Several receptacles may share a location."""
    kind: Mapping[str, str]
    """Receptacle or thing -> its type."""
    contents: Mapping[str, Sequence[str]]
    """Receptacle -> things in it. A thing may be in several receptacles."""
    held: Sequence[str]
    """Things that the agent holds."""
    flags: Mapping[str, Collection[str]]
    """Flag, such as `openable`, `opened` or `ishot` -> receptacles or things that have it."""
    fits: Collection[tuple[str, str]]
    """Pairs (type of receptacle, type of thing) such that the receptacle can contain the thing."""


@dataclass(frozen=True)
class _Aim:
    """A winning state: enough suitable things in one receptacle, or a suitable thing held next to a lit lamp."""

    things: Collection[str]
    """Suitable things."""
    place: str
    """Receptacle into which to put the things; for a lamp, the receptacle that holds the lamp."""
    many: int
    """Number of things that must be in the receptacle."""
    state: str = ""
    """Flag that the things must have, such as `ishot`; empty if none."""
    lamp: str = ""
    """Lamp to light; empty if the task has none."""


@dataclass(frozen=True)
class _State:
    here: str
    held: str
    opened: frozenset[str]
    """Receptacles that the solution has opened and may need again."""
    lies: frozenset[tuple[str, str]]
    """Pairs (suitable thing, receptacle that holds it)."""
    ready: frozenset[str]
    """Things that have the required state, and the lamp if it is on."""


def shortest(house: House) -> int | None:
    """Return the number of commands in a shortest solution: 0 if the goal holds, None if it cannot be reached.

    Raises:
        EnvironmentFailure: If the goal is not of one of ALFWorld's six kinds.
    """
    found = (_Search(house, aim).length() for aim in _aims(house))
    return min((length for length in found if length is not None), default=None)


def _aims(house: House) -> Iterator[_Aim]:
    """Yield one aim for each suitable receptacle or lamp."""
    asked = {literal[0]: literal[1:] for literal in house.goal}
    types = {literal[1]: literal[2] for literal in house.goal if literal[0] == "objecttype"}
    lamp = types.pop(asked["istoggled"][0], "") if "istoggled" in asked else ""
    if len(set(types.values())) != 1 or not (lamp or "receptacletype" in asked):
        raise EnvironmentFailure(f"the goal {house.goal!r:.200} is none of ALFWorld's six kinds.")
    known = [house.flags[flag] for flag in ("cleanable", "heatable", "coolable") if flag in asked]
    alike = [each for each, kind in house.kind.items() if kind in types.values()]
    things = frozenset(each for each in alike if all(each in flag for flag in known))
    for place in house.location:
        if lamp:
            here = [each for each in house.contents.get(place, ()) if house.kind.get(each) == lamp]
            yield from (
                _Aim(things, place, 1, lamp=each) for each in here if each in house.flags["toggleable"]
            )
        elif house.kind.get(place) == asked["receptacletype"][1]:
            state = next((name for name in _STATES if name in asked), "")
            yield _Aim(things, place, len(types), state)


class _Search:
    """Dijkstra's algorithm with subtasks as edges, for one aim."""

    def __init__(self, house: House, aim: _Aim) -> None:
        self._house, self._aim = house, aim
        lies = [
            (each, place) for place, those in house.contents.items() for each in those if each in aim.things
        ]
        self._lies = frozenset(lies)
        self._matters = {aim.place, *(place for _, place in lies)}
        self._shut = set(house.flags["openable"]) - set(house.flags["opened"])

    def length(self) -> int | None:
        """Return the number of commands in a shortest solution of the aim; None if there is no solution."""
        order, first = count(), self._first()
        open_, best = [(0, next(order), first)], {first: 0}
        while open_:
            length, _, state = heapq.heappop(open_)
            if self._is_reached(state):
                return length
            if length > best[state]:
                continue
            for more, after in self._errands(state, is_first=state is first):
                if length + more < best.get(after, length + more + 1):
                    best[after] = length + more
                    heapq.heappush(open_, (length + more, next(order), after))
        return None

    def _first(self) -> _State:
        flags, aim = self._house.flags, self._aim
        ready = {each for each in aim.things if aim.state and each in flags[aim.state]}
        ready |= {aim.lamp} & set(flags["istoggled"])
        held = next(iter(self._house.held), "")
        return _State(self._house.here, held, frozenset(), self._lies, frozenset(ready))

    def _is_reached(self, state: _State) -> bool:
        aim = self._aim
        if aim.lamp:
            is_lit = aim.lamp in state.ready and state.here == self._house.location[aim.place]
            return is_lit and state.held in aim.things
        there = [each for each, place in state.lies if place == aim.place]
        return sum(not aim.state or each in state.ready for each in there) >= aim.many

    def _errands(self, state: _State, is_first: bool) -> Iterator[tuple[int, _State]]:
        """Yield the possible next subtasks, each as its number of commands and the state after it."""
        if not state.held:
            yield from self._fetch(state)
            return
        if state.held in self._aim.things:
            yield from self._treat(state)
        yield from self._put(state, self._house.location if is_first else [self._aim.place])

    def _fetch(self, state: _State) -> Iterator[tuple[int, _State]]:
        """Yield the ways to take a suitable thing, in the form of `_errands`."""
        for each, place in state.lies:
            if each in self._house.flags["pickupable"]:
                length, there = self._reach(state, place, opens=True)
                yield length + 1, replace(there, held=each, lies=state.lies - {(each, place)})

    def _treat(self, state: _State) -> Iterator[tuple[int, _State]]:
        """Yield the ways to treat the held thing, or to carry it to the lamp and light it, as in `_errands`."""
        house, aim, held = self._house, self._aim, state.held
        if aim.lamp:
            length, there = self._reach(state, aim.place)
            yield length + (aim.lamp not in state.ready), replace(there, ready=state.ready | {aim.lamp})
        for place in house.location if aim.state and held not in state.ready else ():
            treatment, flag = TREATMENTS.get(house.kind.get(place, ""), ("", ""))
            if treatment == _STATES[aim.state] and held in house.flags[flag]:
                length, there = self._reach(state, place)
                yield length + 1, replace(there, ready=state.ready | {held})

    def _put(self, state: _State, places: Iterable[str]) -> Iterator[tuple[int, _State]]:
        """Yield the ways to put the held thing into a receptacle in `places`, in the form of `_errands`."""
        kind = self._house.kind
        for place in places:
            if (kind.get(place), kind.get(state.held)) in self._house.fits:
                length, there = self._reach(state, place, opens=True)
                is_wanted = state.held in self._aim.things
                lies = state.lies | {(state.held, place)} if is_wanted else state.lies
                yield length + 1, replace(there, held="", lies=lies)

    def _reach(self, state: _State, place: str, opens: bool = False) -> tuple[int, _State]:
        """Return the number of commands to walk to a receptacle and, if needed, open it; and the state after them."""
        location = self._house.location[place]
        is_shut = opens and place in self._shut and place not in state.opened
        opened = state.opened | {place} if is_shut and place in self._matters else state.opened
        return (location != state.here) + is_shut, replace(state, here=location, opened=opened)
