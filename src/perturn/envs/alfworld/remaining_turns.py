"""How much of the way to a win is left after each action of an ALFWorld episode, in two senses.

`shortest`: commands of the shortest way, for one who knows the whole house. `searching`: commands that the expert would
take who takes over there, and knows no more of the house than the episode has shown; so a look into a likely place that
proves empty is no mistake, since the expert would have looked there too.

A game can be lost: some things, such as a paper towel roll, fit into no receptacle of their house, and who has taken
one can never take another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perturn.envs.alfworld.expert import Player, demonstrate
from perturn.envs.alfworld.game_settings import TextGame
from perturn.envs.alfworld.game_text import Grammar
from perturn.envs.alfworld.games import GameText
from perturn.envs.alfworld.pddl import Problem, parse_problem
from perturn.errors import ConfigError, did_you_mean


def remaining(game: GameText, grammar: Grammar, actions: Sequence[str], sense: str) -> list[int | None]:
    """Commands that are left at the start of an episode and after each of its actions [actions + 1]; None: no win.

    Args:
        game: Its game.
        grammar: How commands are said.
        actions: The commands that were said; one that does nothing leaves the way as it was.
        sense: `shortest` or `searching`.

    Raises:
        ConfigError: If there is no such sense.
    """
    if sense not in SENSES:
        raise ConfigError(f"unknown sense {sense!r} of the remaining path.{did_you_mean(sense, SENSES)}")
    return SENSES[sense](game, grammar, actions)


def take_over(game: GameText, grammar: Grammar, actions: Sequence[str]) -> list[tuple[str, str]] | None:
    """Thought and command of the expert, a pair a turn, who goes on after an episode's first actions; None: no win.

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
