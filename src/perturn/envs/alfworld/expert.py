"""An expert that solves ALFWorld games by searching: it knows only the observations.

The expert reads the task, searches the likeliest places first, and remembers all objects that it has seen. Since the
expert does not know where objects are, it may search a wrong place. The expert can also continue an episode that
another policy began, from that policy's commands and observations.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perturn.envs.alfworld.game_text import TREATED_AT, promise
from perturn.errors import EnvironmentFailure
from perturn.types import Observation

_PATIENCE = 100
"""Number of turns after which the expert gives up."""
_TASKS = tuple(
    re.compile(pattern)
    for pattern in (
        r"look at (?P<thing>\w+) under the (?P<lamp>\w+)",
        r"examine the (?P<thing>\w+) with the (?P<lamp>\w+)",
        r"(?:put|find) (?P<two>two) (?P<thing>\w+) (?:and put them )?in (?P<place>\w+)",
        r"(?P<treatment>clean|heat|cool) some (?P<thing>\w+) and put it in (?P<place>\w+)",
        r"put a (?P<treatment>clean|hot|cool) (?P<thing>\w+) in (?P<place>\w+)",
        r"put (?:a|some) (?P<thing>\w+) (?:in|on) (?P<place>\w+)",
    )
)
Promise = Callable[[str, str, int], float]
"""Function (thing, kind of receptacle, number of receptacles of the kind) -> score of a search there; see `promise`."""
_SEEN = re.compile(r"\ba ([a-z]+ \d+)")
_COMMANDS = re.compile(
    r"(?P<verb>go to|[a-z]+) (?P<thing>[a-z]+ \d+)(?: (?:from|to|in/on|with) (?P<place>[a-z]+ \d+))?"
)


@dataclass(frozen=True)
class Wish:
    """The goal of a task."""

    thing: str
    """Kind of thing that the task is about, such as `mug`."""
    place: str = ""
    """Kind of receptacle into which to put the thing."""
    treatment: str = ""
    """Treatment before putting the thing down: `clean`, `heat` or `cool`; empty if none."""
    lamp: str = ""
    """Kind of lamp under which to look at the thing; empty if it must be put into a place instead."""
    count: int = 1
    """Number of things to put into the place."""


def read_task(text: str) -> Wish:
    """Parse the goal in the first observation of a game.

    Raises:
        EnvironmentFailure: If the task has an unknown form.
    """
    said = text.rpartition("Your task is to: ")[2].strip().rstrip(".")
    for pattern in _TASKS:
        if match := pattern.fullmatch(said):
            found = match.groupdict()
            place, treatment, lamp = (found.get(name, "") for name in ("place", "treatment", "lamp"))
            treatment = "heat" if treatment == "hot" else treatment
            return Wish(found["thing"], place, treatment, lamp, 2 if found.get("two") else 1)
    raise EnvironmentFailure(f"the expert does not understand the task {said!r}.")


class Player:
    """The expert's knowledge of a running game, collected from commands and observations."""

    def __init__(
        self, first: Observation, step: Callable[[str], Observation], promise: Promise = promise
    ) -> None:
        """Read the task and the receptacles in the first observation.

        Args:
            first: Observation that `reset` returned.
            step: Function that plays an action.
            promise: Function that ranks the places of a search.
        """
        self.script: list[tuple[str, str]] = []
        self.wish = read_task(first.text)
        self.places = _SEEN.findall(first.text.rpartition("Your task")[0])
        self.seen: dict[str, list[str]] = {}
        """Receptacle -> its contents when last observed, and things put there since."""
        self.unsearched: set[str] = set(self.places)
        """Receptacles whose contents were never observed."""
        self.brought: list[str] = []
        """Things that the expert has put into the target receptacle."""
        self.treated: set[str] = set()
        """Things that have received the treatment of the task."""
        self.held = ""
        self.here = ""
        self.promise = promise
        self._last = first
        self._step = step

    def recall(self, command: str, answer: Observation) -> None:
        """Update the knowledge with a command of another policy and its observation."""
        self._last = answer
        match = _COMMANDS.fullmatch(command.strip()) if answer.valid else None
        if match is None:
            return
        verb, thing, place = match["verb"], match["thing"] or "", match["place"] or ""
        if verb in ("go to", "open", "examine") and thing in self.places:
            self.here = thing
            self._look_at(thing)
        elif verb == "take":
            self.held = thing
            self.seen[place] = [each for each in self.seen.get(place, ()) if each != thing]
        elif verb in ("move", "put"):
            self.put_down(thing, place)
        elif verb == self.wish.treatment:
            self.treated.add(thing)
        elif verb in ("heat", "cool"):
            self.treated.discard(thing)

    @property
    def won(self) -> bool:
        """Whether the task is solved."""
        return self._last.success

    @property
    def ended(self) -> bool:
        """Whether the episode is over, or the expert has reached its turn limit."""
        return self._last.terminated or len(self.script) >= _PATIENCE

    def can(self, *words: str) -> str:
        """Return the first admissible command that starts with the first word and has all others; empty if none."""
        for command in self._last.admissible:
            said = f"{command} "
            if said.startswith(f"{words[0]} ") and all(f" {word} " in said for word in words[1:]):
                return command
        return ""

    def do(self, thought: str, command: str) -> None:
        """Play a command and record it with its thought; do nothing if the command is empty or the episode is over."""
        if command and not self.ended:
            self._last = self._step(command)
            self.script.append((thought, command))

    def visit(self, place: str, why: str) -> None:
        """Go to a receptacle, open it and observe its contents. Put down an unwanted thing there."""
        if place != self.here:
            self.do(why, self.can("go", place) or self.can("examine", place))
            self.here = place
            self._look_at(place)
        if self.can("open", place):
            self.do(f"The {place} is closed. I open it.", self.can("open", place))
            self._look_at(place)
        self.lay_down()

    def _look_at(self, place: str) -> None:
        """Remember the contents of a receptacle from the last observation, unless it is closed."""
        if not self._last.text.endswith(" is closed."):
            self.seen[place] = _SEEN.findall(self._last.text)
            self.unsearched.discard(place)

    @property
    def burdened(self) -> bool:
        """Whether the agent holds a thing of another kind than the wanted kind."""
        return bool(self.held) and kind(self.held) != self.wish.thing

    def lay_down(self) -> None:
        """Put down an unwanted thing if that is possible here."""
        if self.burdened and (put := self.can("move", self.held) or self.can("put", self.held)):
            self.do(f"I do not need the {self.held}. I put it down.", put)
            self.put_down(self.held, " ".join(put.split()[-2:]))

    def put_down(self, thing: str, place: str) -> None:
        """Record that the held thing is now in a receptacle."""
        self.seen.setdefault(place, []).append(thing)
        self.held = ""


def kind(name: str) -> str:
    """Return the kind of a named thing: `mug` for `mug 2`."""
    return name.partition(" ")[0]


def demonstrate(player: Player) -> Sequence[tuple[str, str]]:
    """Play a game until it is won or all places are searched; return one pair (thought, action) per turn."""
    player.lay_down()
    if player.wish.lamp:
        _look_under_lamp(player)
        return player.script
    while len(_placed(player)) < player.wish.count and not player.ended:
        if not _bring(player):
            break
    return player.script


def _look_under_lamp(player: Player) -> None:
    """Take the thing, find the lamp, and switch it on."""
    thing = "" if player.burdened else player.held
    thing = thing or _take(player, *_find(player, player.wish.thing, ()))
    lamp, place = _find(player, player.wish.lamp, ())
    if thing and lamp:
        player.visit(place, f"I have the {thing}. Now I need the {lamp}, which is at {place}.")
        player.do(f"I turn on the {lamp} to look at the {thing}.", player.can("use", lamp))


def _bring(player: Player) -> bool:
    """Find one more thing, treat it if needed, and put it into the target; return whether a thing was found."""
    thing = "" if player.burdened else player.held
    if not thing:
        thing, place = _find(player, player.wish.thing, _placed(player))
        if not thing or thing in _placed(player):  # the search may have found it in the target already
            return bool(thing)
        _take(player, thing, place)
    if player.wish.treatment and thing not in player.treated:
        _treat(player, thing)
    _deliver(player, thing, _target(player))
    return True


def _take(player: Player, thing: str, place: str) -> str:
    """Go to a thing, take it, and return its name; do nothing if the name is empty."""
    if thing:
        why = f"I need the {thing}, which is at {place}."
        player.visit(place, why)
        if player.burdened:
            _free_hand(player)
            player.visit(place, why)
        player.do(f"There is the {thing}. I take it.", player.can("take", thing, place))
        player.seen[place] = [each for each in player.seen[place] if each != thing]
    return thing


def _free_hand(player: Player) -> None:
    """Visit places until the unwanted thing can be put down."""
    for place in _ranked(player, kind(player.held)):
        if player.burdened:
            player.visit(place, f"I do not need the {player.held}. I may put it down at {place}.")


def _ranked(player: Player, thing: str) -> list[str]:
    """Return the receptacles, with the likeliest place for a kind of thing first."""
    many = Counter(map(kind, player.places))
    return sorted(player.places, key=lambda each: -player.promise(thing, kind(each), many[kind(each)]))


def _known(player: Player, place: str) -> list[str]:
    """Return the things of the wanted kind that were seen in a receptacle."""
    return [each for each in player.seen.get(place, ()) if kind(each) == player.wish.thing]


def _target(player: Player) -> str:
    """Return the receptacle of the wanted kind in which most wanted things were seen; the first of equals."""
    choices = [each for each in player.places if kind(each) == player.wish.place]
    return max(choices, key=lambda each: len(_known(player, each)), default="")


def _placed(player: Player) -> list[str]:
    """Return the things that count as delivered.

    These are the things that the expert put into the target. If the task wants two things, all wanted things that were
    seen in the target count too.
    """
    found = _known(player, _target(player)) if player.wish.count > 1 else []
    return list(dict.fromkeys([*player.brought, *found]))


def _find(player: Player, thing: str, taken: Sequence[str]) -> tuple[str, str]:
    """Return a thing of a kind and its receptacle, from memory or by searching; two empty texts if none is found.

    Args:
        player: The game.
        thing: Kind of thing.
        taken: Things that do not count.
    """
    order = _ranked(player, thing)
    for search in (False, True):
        for place in order:
            if search and place in player.unsearched:
                player.visit(place, f"I need a {thing}. It may be in or on {place}.")
            for each in player.seen.get(place, ()):
                if kind(each) == thing and each not in taken:
                    return each, place
            if player.ended:
                return "", ""
    return "", ""


def _treat(player: Player, thing: str) -> None:
    """Clean, heat or cool the held thing at the receptacle for that treatment."""
    treatment = player.wish.treatment
    place = next((each for each in player.places if kind(each) == TREATED_AT[treatment]), "")
    if place != player.here:
        player.do(f"I have the {thing}. To {treatment} it I need a {kind(place)}.", player.can("go", place))
        player.here = place
    player.do(f"Now I {treatment} the {thing}.", player.can(treatment, thing))


def _deliver(player: Player, thing: str, place: str) -> None:
    """Put the held thing into the target receptacle."""
    player.visit(place, f"The {thing} goes to {place}.")
    put = player.can("move", thing, place) or player.can("put", thing, place)
    player.do(f"I am at {place}. I put the {thing} there.", put)
    player.put_down(thing, place)
    player.brought.append(thing)
