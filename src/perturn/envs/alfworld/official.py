"""Environment `alfworld-official`: ALFWorld in its official package, which uses TextWorld and Fast Downward in C++.

The package needs `pip install "perturn[alfworld]"`, which compiles for some minutes (gcc, g++, make, cmake). The
environment `alfworld` plays the same games hundreds of times faster and is checked against the official package. A few
games that `alfworld` rejects can be played only here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from perturn.envs.alfworld.expert import Player, demonstrate
from perturn.envs.alfworld.games import KINDS, Games, GameText, game_files
from perturn.envs.benchmark import NO_EPISODE, check_installed, choose_kinds
from perturn.errors import EnvironmentFailure
from perturn.traits import EnvironmentTraits
from perturn.types import Observation, Task

_PARTS = {
    "alfworld": "alfworld",
    "textworld": "textworld",
    "fast_downward": "fast-downward-textworld",
}
_MODULES = ("alfworld.agents.environment.alfred_tw_env", "textworld.envs.pddl.pddl")
_REMARK = " (it compiles for some minutes), or play the same games with alfworld"
_CHANGING = "atlocation opened inreceptacle objectatlocation holds isclean ishot iscool istoggled issliced"


class ALFWorldOfficial:
    """The official engine as an `Environment` and an `Expert`, with the settings and tasks of `ALFWorld`.

    The game file determines the wording of commands. Games from an archive have no grammar, and get the grammar of the
    installed package. The engine changes `sys.argv` and `sys.stdout` while it loads a game, so several engines in one
    process would disturb each other. Recipes run each in a process of its own.
    """

    traits: ClassVar[EnvironmentTraits] = EnvironmentTraits(
        protocol="alfworld-eto",
        distributions=tuple(_PARTS.values()),
        reads=lambda settings: game_files(settings.get("data")),
    )

    def __init__(self, data: str | None = None, kinds: tuple[str, ...] = ()) -> None:
        """Check the settings. No game is read yet.

        Args:
            data: Folder of the games, as for `ALFWorld`.
            kinds: Kinds of tasks to list. Empty: all six.
        """
        check_installed("alfworld-official", "alfworld", _MODULES, remark=_REMARK)
        versions = [f"{part}-{metadata.version(package)}" for part, package in _PARTS.items()]
        self.name = f"alfworld-official-{'+'.join(versions)}"
        self.kinds = choose_kinds(kinds, KINDS, "alfworld")
        self._games = Games(data)
        self._game: OfficialGame | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        """Return all tasks of a split, as `ALFWorld.tasks` lists them."""
        return self._games.tasks(split, self.kinds)

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start an episode; the seed has no effect."""
        self._game = self._game or OfficialGame()
        return self._game.reset(self._games.read(task.id))

    def step(self, action: str) -> Observation:
        """Take one action."""
        if self._game is None:
            raise EnvironmentFailure(NO_EPISODE)
        return self._game.step(action)

    def expert(self, task: Task) -> Sequence[str]:
        """Return the actions of the expert of `ALFWorld`, which plays a second copy of the game."""
        return [action for _, action in self.demonstration(task)]

    def demonstration(self, task: Task) -> Sequence[tuple[str, str]]:
        """Return one pair (thought, action) of the expert per turn."""
        game = OfficialGame()
        return demonstrate(Player(game.reset(self._games.read(task.id)), game.step))

    def close(self) -> None:
        """Release the engine."""
        self._game = None


class OfficialGame:
    """Player of games in the official engine, one at a time: it turns commands into observations."""

    def __init__(self, logic: tuple[str, str] | None = None) -> None:
        """Load the engine.

        Args:
            logic: PDDL domain and grammar for games that have none. None: the domain and grammar of the installed
                package.
        """
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
        from textworld import EnvInfos
        from textworld.envs.pddl.pddl import PddlEnv

        self._logic = logic or (_text(ALFRED_PDDL_PATH), _text(ALFRED_TWL2_PATH))
        infos = EnvInfos(won=True, admissible_commands=True, feedback=True)
        self._engine: Any = AlfredDemangler(PddlEnv(infos))
        self._admissible: tuple[str, ...] | None = None

    def reset(self, game: GameText) -> Observation:
        """Start a game."""
        self._admissible = None
        self._engine.load(self.game_data(game))
        return self._observe(self._engine.reset(), valid=True)

    def step(self, action: str) -> Observation:
        """Play a command.

        Raises:
            EnvironmentFailure: If no game is running.
        """
        if self._admissible is None:
            raise EnvironmentFailure(NO_EPISODE)
        valid = action.strip() in self._admissible
        observation = self._observe(self._engine.step(action)[0], valid)
        if observation.terminated:
            self._admissible = None
        return observation

    def game_data(self, game: GameText) -> dict[str, Any]:
        """Return a game in the form that the official engine loads: the content of a game file."""
        domain, grammar = game.logic or self._logic
        return {
            "pddl_domain": domain,
            "grammar": grammar.replace("UNKNOWN GOAL", game.task),
            "pddl_problem": game.problem,
            "walkthrough": list(game.walkthrough),
            "solvable": True,
        }

    def _observe(self, state: Mapping[str, Any], valid: bool) -> Observation:
        self._admissible = tuple(state["admissible_commands"])
        won = bool(state["won"])
        facts = sorted(str(fact) for fact in state["_facts"] if fact.name in _CHANGING.split())
        return Observation(
            state["feedback"],
            reward=float(won),
            terminated=won,
            success=won,
            valid=valid,
            state_key=hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest(),
            admissible=self._admissible,
        )


def _text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")
