"""Games played badly: by an expert who errs and recovers, and by somebody without a goal.

A policy that is taught from the expert alone never sees what follows a mistake. These play from observations, as the
expert does.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

from perturn.envs.alfworld.expert import Player, demonstrate
from perturn.envs.alfworld.game_settings import TextGame
from perturn.envs.alfworld.places import promise
from perturn.types import Observation

_JITTER = 0.5
"""Standard deviation of the logarithm by which a promise is multiplied."""
_DETOUR, _FAILURE = 0.10, 0.12
"""Chance, at each of the expert's turns, of a walk elsewhere and of a command that fails before it."""
_DETOURS = 3
"""Walks elsewhere, at most, until the command that was asked for can be said again."""
_WRONG_NUMBER = 0.7
"""Chance that a command which fails is one with a wrong number, where it has a number."""
_NEAR = 0.7
"""Chance that one without a goal stays where he is."""


def clumsy_script(game: TextGame, first: Observation, draw: random.Random) -> Sequence[str]:
    """Commands of the expert who searches in an order of its own, strays and slips.

    Args:
        game: Just begun; it is played to its end.
        first: Its first observation.
        draw: Source of all chance.
    """
    noise: dict[tuple[str, str], float] = defaultdict(lambda: draw.lognormvariate(0, _JITTER))

    def jittered(thing: str, where: str, many: int) -> float:
        return noise[thing, where] * promise(thing, where, many)

    clumsy = _Clumsy(game, first, draw)
    demonstrate(Player(first, clumsy.step, jittered))
    return clumsy.said


def aimless_script(game: TextGame, first: Observation, draw: random.Random, turns: int) -> Sequence[str]:
    """Commands of somebody who tries what can be done, so that all that a game says is heard once.

    Args:
        game: Just begun.
        first: Its first observation.
        draw: Source of all chance.
        turns: Commands, at most.
    """
    said: list[str] = []
    seen = first
    while len(said) < turns and not seen.terminated:
        near = [each for each in seen.admissible if not each.startswith("go to ")]
        said.append(draw.choice(near if draw.random() < _NEAR else seen.admissible))
        seen = game.step(said[-1])
    return said


class _Clumsy:
    """A game whose player strays and slips before some of the commands that were asked for."""

    def __init__(self, game: TextGame, first: Observation, draw: random.Random) -> None:
        self.said: list[str] = []
        self._game, self._draw, self._last = game, draw, first

    def step(self, command: str) -> Observation:
        """Do what was asked for, some nonsense before it; the answer is that of the command."""
        if self._draw.random() < _FAILURE:
            self._do(self._failing(command))
        if command.startswith("go to ") and self._draw.random() < _DETOUR:
            for _ in range(_DETOURS):
                self._do(self._draw.choice([each for each in self._last.admissible if each[:6] == "go to "]))
                if command in self._last.admissible:
                    break
        self._do(command)
        return self._last

    def _failing(self, command: str) -> str:
        """A command that cannot be done now, like the one that was asked for: a wrong number, or too early."""
        verb, *rest = command.split(" ")
        numbers = [index for index, word in enumerate(rest) if word.isdecimal()]
        if numbers and self._draw.random() < _WRONG_NUMBER:
            rest[self._draw.choice(numbers)] = str(self._draw.randint(1, 5))
        wrong = " ".join([verb, *rest])
        return wrong if wrong not in self._last.admissible else self._again()

    def _again(self) -> str:
        """The command before, if it cannot be done twice; else a look."""
        before = self.said[-1] if self.said else "look"
        return before if before not in self._last.admissible else self._draw.choice(["look", "inventory"])

    def _do(self, command: str) -> None:
        self._last = self._game.step(command)
        self.said.append(command)
