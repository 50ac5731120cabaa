"""ALFWorld: household tasks as text games (Shridhar et al. 2021, arXiv:2010.03768), played in pure Python.

The environment needs only the game files: the files that `alfworld-download` fetches, or a compact archive of them.
`games.py` describes both formats. No engine has to be built. Observations, admissible commands, rewards and wins equal
the official engine's, which `alfworld-official` runs. `docs/environments.md` describes how this was checked.
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
"""Version of the environment's behavior; raised whenever an observation, a list of commands, a reward or a win changes.
"""


class ALFWorld(GamesTaught):
    """ALFWorld as an `Environment` and an `Expert`.

    Observations have the text of the official engine. The first observation is the room, a blank line, and the task.
    Only a win gives reward 1 and ends the episode. A command that is not admissible gets the answer `Nothing happens.`,
    reward 0 and `valid=False`.

    `state_key` is a hash of all changes in the house, observed or not, and of the agent's position.

    Games are deterministic, so the seed has no effect. Instances share nothing but the archives they have read.
    """

    traits: ClassVar[EnvironmentTraits] = EnvironmentTraits(
        in_process=True,
        protocol="alfworld-eto",
        reads=lambda settings: game_files(settings.get("data")),
    )

    def __init__(self, data: str | None = None, grammar: str = "0.4", kinds: tuple[str, ...] = ()) -> None:
        """Check the settings. No game is read yet.

        Args:
            data: Folder of the games. None: `$ALFWORLD_DATA`; if that is not set, `~/.cache/alfworld`.
            grammar: Wording of commands. `0.4` has `move X to Y`. `0.3` has `put X in/on Y` and no `help`, as in scores
                published before alfworld 0.4.
            kinds: Kinds of tasks to list, such as `pick_and_place_simple`. Empty: all six.
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
        """Return the game of a task. Its `walkthrough` is a planner's solution, if the data has one."""
        return self._games.read(task.id)

    def close(self) -> None:
        """Do nothing, since the environment holds no resources."""
