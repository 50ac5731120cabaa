"""Environment `alfworld-like`: generated games in the style of ALFWorld, for tests and for use without ALFWorld's data.

The engine, the sentences and the six kinds of tasks are as in `alfworld`. Rooms, things and tasks are generated. A
score on these games does not predict a score on ALFWorld.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from perturn.bounds import Bound
from perturn.envs.alfworld.game_settings import TextGame, check_grammar
from perturn.envs.alfworld.games import KINDS, GameText
from perturn.envs.alfworld.generate import SPLITS, make_game
from perturn.envs.alfworld.teaching import GamesTaught
from perturn.envs.benchmark import check_known, choose_kinds
from perturn.errors import EnvironmentFailure
from perturn.traits import EnvironmentTraits
from perturn.types import Observation, Task

VERSION = "1.0"
"""Version of the environment; raised whenever the game of a task changes, or the version of `alfworld` is raised."""


class ALFWorldLike(GamesTaught):
    """Generated games as an `Environment` and an `Expert`, with the observations and rules of `ALFWorld`.

    `train` and `valid_seen` share layouts of rooms, but not things and tasks. `valid_unseen` has other layouts.
    """

    traits: ClassVar[EnvironmentTraits] = EnvironmentTraits(in_process=True, protocol="alfworld-eto")

    def __init__(
        self,
        grammar: str = "0.4",
        kinds: tuple[str, ...] = (),
        train_games: Annotated[int, Bound(least=1)] = SPLITS["train"],
        valid_games: Annotated[int, Bound(least=1)] = SPLITS["valid_seen"],
    ) -> None:
        """Check the settings.

        Args:
            grammar: Wording of commands, as for `ALFWorld`.
            kinds: Kinds of tasks to list. Empty: all six.
            train_games: Number of games in `train`. With a smaller number, the split has the first of these games.
            valid_games: Number of games in `valid_seen`, and in `valid_unseen`.
        """
        self.grammar = check_grammar(grammar)
        self.kinds = choose_kinds(kinds, KINDS, "alfworld")
        self.name = f"alfworld-like-{VERSION}+grammar-{grammar}"
        self._sizes = {"train": train_games, "valid_seen": valid_games, "valid_unseen": valid_games}
        self._game = TextGame(self.grammar)

    def tasks(self, split: str) -> Sequence[Task]:
        """Return all tasks of a split: `train` (`train_games`), `valid_seen` or `valid_unseen` (`valid_games` each)."""
        check_known("split", split, SPLITS, "alfworld-like")
        return [
            Task(id=f"{split}/{kind}/{number:04d}", kind=kind, split=split, data={"number": number})
            for number in range(self._sizes[split])
            if (kind := KINDS[number % len(KINDS)]) in self.kinds
        ]

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start an episode; the seed has no effect."""
        return self._game.reset(self.game(task))

    def step(self, action: str) -> Observation:
        """Take one action, a command such as `go to desk 1`."""
        return self._game.step(action)

    def game(self, task: Task) -> GameText:
        """Return the game of a task, with a solution in `walkthrough`.

        Raises:
            EnvironmentFailure: If the task is not from `tasks`.
        """
        number = task.data.get("number")
        if not isinstance(number, int) or task.split not in SPLITS:
            raise EnvironmentFailure(
                f"Task {task.id!r} must carry data {{'number': number}} and a split of alfworld-like, got "
                f"{dict(task.data)} and {task.split!r}: take it from tasks()."
            )
        return make_game(task.split, number)

    def close(self) -> None:
        """Do nothing, since the environment holds no resources."""
