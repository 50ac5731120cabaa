"""ALFWorld: household tasks as text games (Shridhar et al. 2021, arXiv:2010.03768), read and played in pure Python.

Needs the games alone: those that `alfworld-download` fetches, or a compact archive of them (`games.py` says
how either looks). There is no engine to build. Observations, admissible commands, rewards and wins equal those in the
official engine, which `alfworld-official` runs; `docs/environments.md` says how that was checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from perturn.envs.alfworld.game_settings import TextGame, check_grammar
from perturn.envs.alfworld.games import KINDS, Games, GameText, game_files
from perturn.envs.alfworld.teaching import GamesTaught
from perturn.envs.benchmark import choose_kinds
from perturn.traits import EnvironmentTraits
from perturn.types import Observation, Task

VERSION = "1.0"
"""Changes whenever an observation, a list of commands, a reward or a win does."""


class ALFWorld(GamesTaught):
    """ALFWorld as an `Environment` and an `Expert`.

    The text of an observation is the official engine's. The first one is the room, a blank line, and the task.
    Winning pays 1, and nothing else pays; it ends the episode, and nothing else does. A command that is not among
    the admissible ones answers `Nothing happens.`, costs nothing and is `valid=False`.

    `state_key` hashes all that has changed in the house, seen or not, and where the agent is.

    A game has no chance in it: the seed has no effect. Instances share the archives they have read, and nothing else.
    """

    traits: ClassVar[EnvironmentTraits] = EnvironmentTraits(
        in_process=True,
        protocol="alfworld-eto",
        reads=lambda settings: game_files(settings.get("data")),
    )

    def __init__(self, data: str | None = None, grammar: str = "0.4", kinds: tuple[str, ...] = ()) -> None:
        """Check the settings; no game is read yet.

        Args:
            data: Folder of the games. None: `$ALFWORLD_DATA`, or `~/.cache/alfworld` where that is not set.
            grammar: How commands are said: 0.4 (`move X to Y`), or 0.3 (`put X in/on Y`, no `help`) as in scores
                published before alfworld 0.4.
            kinds: Kinds of tasks to list, such as `pick_and_place_simple`. Empty is all six.
        """
        self.grammar = check_grammar(grammar)
        self.kinds = choose_kinds(kinds, KINDS, "alfworld")
        self.name = f"alfworld-{VERSION}+grammar-{grammar}"
        self._games = Games(data)
        self._game = TextGame(self.grammar)

    def tasks(self, split: str) -> Sequence[Task]:
        """Return all tasks of a split, in the order of their ids.

        Args:
            split: `train` (3553 games), `valid_train` (200), `valid_seen` (140) or `valid_unseen` (134).
        """
        return self._games.tasks(split, self.kinds)

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start an episode; the seed has no effect."""
        return self._game.reset(self._games.read(task.id))

    def step(self, action: str) -> Observation:
        """Take one action, a command such as `go to desk 1`."""
        return self._game.step(action)

    def game(self, task: Task) -> GameText:
        """Return the game of a task, with the planner's walkthrough if the data has it."""
        return self._games.read(task.id)

    def close(self) -> None:
        """Do nothing: nothing is held."""
