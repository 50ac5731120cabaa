"""Demonstrations of a game whose state can be read: by the expert, after other play, and by noisy players."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence

from perturn.envs.alfworld.expert import Player, demonstrate
from perturn.envs.alfworld.game_settings import TextGame
from perturn.envs.alfworld.game_text import Grammar, promise
from perturn.envs.alfworld.games import GameText
from perturn.envs.alfworld.pddl import Problem, parse_problem
from perturn.errors import check_known
from perturn.types import Observation, Task


class GamesTaught(ABC):
    """A `Teacher`, `Pathfinder` and `Corrector`; each plays its own game, so that a running episode goes on."""

    grammar: Grammar

    @abstractmethod
    def game(self, task: Task) -> GameText:
        """Return the game of a task."""

    def expert(self, task: Task) -> Sequence[str]:
        """Return actions of an explorer that sees observations alone."""
        return [action for _, action in self.demonstration(task)]

    def demonstration(self, task: Task) -> Sequence[tuple[str, str]]:
        """Return thought and action of the expert, a pair a turn."""
        game = TextGame(self.grammar)
        return demonstrate(Player(game.reset(self.game(task)), game.step))

    def remaining(self, task: Task, actions: Sequence[str], sense: str) -> Sequence[int | None]:
        """Return the commands left at the start and after each action, as a `Pathfinder` does; see `way.py`."""
        return remaining(self.game(task), self.grammar, actions, sense)

    def correct(self, task: Task, actions: Sequence[str]) -> Sequence[tuple[str, str]] | None:
        """Return thought and action of the expert, a pair a turn, after the actions of another; see `way.py`."""
        return take_over(self.game(task), self.grammar, actions)

    def clumsy(self, task: Task, seed: int) -> Sequence[str]:
        """Return actions of the expert that errs and recovers, different ones for each seed."""
        game = TextGame(self.grammar)
        return clumsy_script(game, game.reset(self.game(task)), random.Random(f"{task.id} {seed}"))

    def aimless(self, task: Task, seed: int, turns: int) -> Sequence[str]:
        """Return actions of a player without a goal, who tries everything possible."""
        game = TextGame(self.grammar)
        return aimless_script(game, game.reset(self.game(task)), random.Random(f"{task.id} {seed}"), turns)


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
    """Return commands of an expert that searches in its own order, takes detours and makes mistakes.

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
    """Return commands that try everything possible, so that every text of a game is seen once.

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
        """Do the wanted command after some useless ones; return the answer to it."""
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
        """Return a similar command that cannot be done now: a wrong number, or too early."""
        verb, *rest = command.split(" ")
        numbers = [index for index, word in enumerate(rest) if word.isdecimal()]
        if numbers and self._draw.random() < _WRONG_NUMBER:
            rest[self._draw.choice(numbers)] = str(self._draw.randint(1, 5))
        wrong = " ".join([verb, *rest])
        return wrong if wrong not in self._last.admissible else self._again()

    def _again(self) -> str:
        """Return the command before, if it cannot be done twice; else a look."""
        before = self.said[-1] if self.said else "look"
        return before if before not in self._last.admissible else self._draw.choice(["look", "inventory"])

    def _do(self, command: str) -> None:
        self._last = self._game.step(command)
        self.said.append(command)


def remaining(game: GameText, grammar: Grammar, actions: Sequence[str], sense: str) -> list[int | None]:
    """Return commands left at the start of an episode and after each of its actions [actions + 1]; None without a win.

    Args:
        game: Its game.
        grammar: How commands are said.
        actions: The commands so far; a command without effect does not change the way.
        sense: `shortest` or `searching`.

    Raises:
        ConfigError: If there is no such sense.
    """
    check_known(sense, SENSES, f"unknown sense {sense!r} of the remaining path")
    return SENSES[sense](game, grammar, actions)


def take_over(game: GameText, grammar: Grammar, actions: Sequence[str]) -> list[tuple[str, str]] | None:
    """Return the expert's (thought, command) pairs after an episode's first actions; None without a win.

    Args:
        game: The game of the episode.
        grammar: How commands are said.
        actions: The commands that were said before.
    """
    return _onward(game, _problem(game), grammar, actions)


def _onward(
    game: GameText, problem: Problem, grammar: Grammar, actions: Sequence[str]
) -> list[tuple[str, str]] | None:
    play = TextGame(grammar)
    seen = play.begin(problem, game.task)
    player = Player(seen, play.step)
    for action in actions:
        seen = play.step(action)
        player.recall(action, seen)
    if seen.terminated:
        return []
    script = list(demonstrate(player))
    return script if player.won else None


def _shortest(game: GameText, grammar: Grammar, actions: Sequence[str]) -> list[int | None]:
    play = TextGame(grammar)
    play.reset(game)
    found = [play.shortest()]
    for action in actions:
        seen = play.step(action)
        found.append(play.shortest() if seen.valid else found[-1])
    return found


def _searching(game: GameText, grammar: Grammar, actions: Sequence[str]) -> list[int | None]:
    problem = _problem(game)
    scripts = (_onward(game, problem, grammar, actions[:turns]) for turns in range(len(actions) + 1))
    return [None if script is None else len(script) for script in scripts]


def _problem(game: GameText) -> Problem:
    return parse_problem(game.problem, game.source or f"game {game.id!r}")


SENSES: dict[str, Callable[[GameText, Grammar, Sequence[str]], list[int | None]]] = {
    "shortest": _shortest,
    "searching": _searching,
}
"""Sense -> from a game, its grammar and an episode's actions to the commands that are left [actions + 1]."""
