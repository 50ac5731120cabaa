"""Play ALFWorld games command by command, and check the settings that all ALFWorld environments share."""

from __future__ import annotations

from perturn.envs.alfworld.game_text import GRAMMARS, Grammar
from perturn.envs.alfworld.games import GameText
from perturn.envs.alfworld.pddl import Problem, parse_problem
from perturn.envs.alfworld.shortest import shortest
from perturn.envs.alfworld.world import World
from perturn.envs.benchmark import NO_EPISODE
from perturn.errors import EnvironmentFailure, check_fit
from perturn.types import Observation


class TextGame:
    """Player of ALFWorld games, one at a time: it turns commands into observations."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._world: World | None = None
        self._admissible: tuple[str, ...] = ()
        self._listed: object = None

    def reset(self, game: GameText) -> Observation:
        """Start a game."""
        self._world = None
        return self.begin(parse_problem(game.problem, game.source or f"game {game.id!r}"), game.task)

    def begin(self, problem: Problem, task: str) -> Observation:
        """Start a game from its problem and its task text; return the first observation."""
        self._world = world = World(problem, self._grammar)
        welcome = "-= Welcome to TextWorld, ALFRED! =-"
        return self._observe(f"{welcome}\n\n{world.opening()}\n\nYour task is to: {task}.")

    def shortest(self) -> int | None:
        """Return the number of commands in a shortest win from here, with full knowledge of the house.

        The result is 0 after a win, and None if the game cannot be won any more.
        """
        return 0 if self._world is None else shortest(self._world.house())

    def step(self, action: str) -> Observation:
        """Play a command.

        Raises:
            EnvironmentFailure: If no game is running.
        """
        if self._world is None:
            raise EnvironmentFailure(NO_EPISODE)
        act = self._world.commands.get(action.strip())
        if act is None:
            return self._observe("Nothing happens.", valid=False)
        observation = self._observe(act())
        if observation.terminated:
            self._world = None
        return observation

    def _observe(self, text: str, valid: bool = True) -> Observation:
        world = self._world
        assert world is not None
        if self._listed is not world.commands:
            self._listed = world.commands
            self._admissible = tuple(sorted(world.commands))
        return Observation(
            text,
            reward=float(world.won),
            terminated=world.won,
            success=world.won,
            valid=valid,
            state_key=world.state_key(),
            admissible=self._admissible,
        )


def check_grammar(grammar: str) -> Grammar:
    """Return the grammar of a name.

    Raises:
        ConfigError: If the name is neither `0.3` nor `0.4`.
    """
    must = "be '0.4' (move X to Y) or '0.3' (put X in/on Y), written in quotes"
    check_fit(grammar in GRAMMARS, "grammar", must, grammar)
    return GRAMMARS[grammar]
