"""Demonstrations of ALFWorld games: expert play, expert continuations of other episodes, and noisy or random play."""

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
    """Base class that adds the methods of `Teacher`, `Pathfinder` and `Corrector` to an ALFWorld environment.

    Each method plays its own copy of the game, so a running episode is not affected.
    """

    grammar: Grammar

    @abstractmethod
    def game(self, task: Task) -> GameText:
        """Return the game of a task."""

    def expert(self, task: Task) -> Sequence[str]:
        """Return the actions of an expert that knows only the observations."""
        return [action for _, action in self.demonstration(task)]

    def demonstration(self, task: Task) -> Sequence[tuple[str, str]]:
        """Return one pair (thought, action) of the expert per turn."""
        game = TextGame(self.grammar)
        return demonstrate(Player(game.reset(self.game(task)), game.step))

    def remaining(self, task: Task, actions: Sequence[str], sense: str) -> Sequence[int | None]:
        """Return the number of turns to success at the start and after each action; see `Pathfinder.remaining`."""
        return remaining(self.game(task), self.grammar, actions, sense)

    def correct(self, task: Task, actions: Sequence[str]) -> Sequence[tuple[str, str]] | None:
        """Return one pair (thought, action) of the expert per turn after given actions; see `Corrector.correct`."""
        return take_over(self.game(task), self.grammar, actions)

    def clumsy(self, task: Task, seed: int) -> Sequence[str]:
        """Return actions of an expert that makes mistakes and recovers; each seed gives other mistakes."""
        game = TextGame(self.grammar)
        return clumsy_script(game, game.reset(self.game(task)), random.Random(f"{task.id} {seed}"))

    def aimless(self, task: Task, seed: int, turns: int) -> Sequence[str]:
        """Return at most `turns` actions of random play among admissible commands."""
        game = TextGame(self.grammar)
        return aimless_script(game, game.reset(self.game(task)), random.Random(f"{task.id} {seed}"), turns)


_JITTER = 0.5
"""Standard deviation of the log-normal factor that multiplies the search scores of `promise`."""
_DETOUR, _FAILURE = 0.10, 0.12
"""Probabilities that a walk to another place, or a command that fails, is inserted before a command of the expert."""
_DETOURS = 3
"""Largest number of walks in one detour."""
_WRONG_NUMBER = 0.7
"""Probability that a failing command has a wrong number, if the expert's command contains a number."""
_NEAR = 0.7
"""Probability that random play chooses a command other than `go to`."""


def clumsy_script(game: TextGame, first: Observation, draw: random.Random) -> Sequence[str]:
    """Return the commands of an expert that searches in a perturbed order, takes detours and makes mistakes.

    Args:
        game: Game that has just begun; it is played to its end.
        first: First observation of the game.
        draw: Random generator.
    """
    noise: dict[tuple[str, str], float] = defaultdict(lambda: draw.lognormvariate(0, _JITTER))

    def jittered(thing: str, where: str, many: int) -> float:
        return noise[thing, where] * promise(thing, where, many)

    clumsy = _Clumsy(game, first, draw)
    demonstrate(Player(first, clumsy.step, jittered))
    return clumsy.said


def aimless_script(game: TextGame, first: Observation, draw: random.Random, turns: int) -> Sequence[str]:
    """Return random admissible commands, so that training data contain many texts of a game.

    Args:
        game: Game that has just begun.
        first: First observation of the game.
        draw: Random generator.
        turns: Largest number of commands.
    """
    said: list[str] = []
    seen = first
    while len(said) < turns and not seen.terminated:
        near = [each for each in seen.admissible if not each.startswith("go to ")]
        said.append(draw.choice(near if draw.random() < _NEAR else seen.admissible))
        seen = game.step(said[-1])
    return said


class _Clumsy:
    """A game that inserts detours and failing commands before some commands of the expert."""

    def __init__(self, game: TextGame, first: Observation, draw: random.Random) -> None:
        self.said: list[str] = []
        self._game, self._draw, self._last = game, draw, first

    def step(self, command: str) -> Observation:
        """Play a command, with random detours and failures before it; return the last observation."""
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
        """Return a command that fails now: the given command with a wrong number, or else the result of `_again`."""
        verb, *rest = command.split(" ")
        numbers = [index for index, word in enumerate(rest) if word.isdecimal()]
        if numbers and self._draw.random() < _WRONG_NUMBER:
            rest[self._draw.choice(numbers)] = str(self._draw.randint(1, 5))
        wrong = " ".join([verb, *rest])
        return wrong if wrong not in self._last.admissible else self._again()

    def _again(self) -> str:
        """Return the previous command if it is not admissible now; else `look` or `inventory`."""
        before = self.said[-1] if self.said else "look"
        return before if before not in self._last.admissible else self._draw.choice(["look", "inventory"])

    def _do(self, command: str) -> None:
        self._last = self._game.step(command)
        self.said.append(command)


def remaining(game: GameText, grammar: Grammar, actions: Sequence[str], sense: str) -> list[int | None]:
    """Return the number of commands to a win at the start of an episode and after each of its actions.

    Args:
        game: Game of the episode.
        grammar: Grammar of the commands.
        actions: Commands of the episode.
        sense: `shortest` or `searching`; see `Pathfinder.remaining`.

    Returns:
        Number of commands [actions + 1]; None where no win is found.

    Raises:
        ConfigError: If the sense is unknown.
    """
    check_known(sense, SENSES, f"unknown sense {sense!r} of the remaining path")
    return SENSES[sense](game, grammar, actions)


def take_over(game: GameText, grammar: Grammar, actions: Sequence[str]) -> list[tuple[str, str]] | None:
    """Return the expert's pairs (thought, command) that continue an episode; None if the expert does not win.

    Args:
        game: Game of the episode.
        grammar: Grammar of the commands.
        actions: Commands of the episode so far.
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
"""Sense -> function (game, grammar, actions) that returns the numbers of commands to a win [actions + 1]."""
