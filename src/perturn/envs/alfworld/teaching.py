"""How a game that can be read is shown: by the expert, also after others, and by those who err; and what is left."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

from perturn.envs.alfworld import remaining_turns
from perturn.envs.alfworld.clumsy import aimless_script, clumsy_script
from perturn.envs.alfworld.expert import Player, demonstrate
from perturn.envs.alfworld.game_settings import TextGame
from perturn.envs.alfworld.game_text import Grammar
from perturn.envs.alfworld.games import GameText
from perturn.types import Task


class GamesTaught(ABC):
    """A `Teacher`, `Pathfinder` and `Corrector`; each plays a game of its own, so that a running episode goes on."""

    grammar: Grammar

    @abstractmethod
    def game(self, task: Task) -> GameText:
        """The game of a task."""

    def expert(self, task: Task) -> Sequence[str]:
        """Actions of an explorer who sees observations alone."""
        return [action for _, action in self.demonstration(task)]

    def demonstration(self, task: Task) -> Sequence[tuple[str, str]]:
        """Thought and action of the expert, a pair a turn."""
        game = TextGame(self.grammar)
        return demonstrate(Player(game.reset(self.game(task)), game.step))

    def remaining(self, task: Task, actions: Sequence[str], sense: str) -> Sequence[int | None]:
        """Commands that are left at the start and after each action, as a `Pathfinder` has it; see `way.py`."""
        return remaining_turns.remaining(self.game(task), self.grammar, actions, sense)

    def correct(self, task: Task, actions: Sequence[str]) -> Sequence[tuple[str, str]] | None:
        """Thought and action of the expert, a pair a turn, after the actions of another; see `way.py`."""
        return remaining_turns.take_over(self.game(task), self.grammar, actions)

    def clumsy(self, task: Task, seed: int) -> Sequence[str]:
        """Actions of the expert who errs and recovers, other ones for each seed."""
        game = TextGame(self.grammar)
        return clumsy_script(game, game.reset(self.game(task)), random.Random(f"{task.id} {seed}"))

    def aimless(self, task: Task, seed: int, turns: int) -> Sequence[str]:
        """Actions of somebody without a goal, who tries what can be done."""
        game = TextGame(self.grammar)
        return aimless_script(game, game.reset(self.game(task)), random.Random(f"{task.id} {seed}"), turns)
