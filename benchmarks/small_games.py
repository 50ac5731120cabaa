"""Find small games of `alfworld-like`, and define a policy whose exact values on them can be computed.

The policy chooses uniformly among the commands of a short list that are admissible. Game and policy form a Markov chain
on the states of the game. So the probability of winning within the remaining turns can be summed exactly over all
outcomes. Tests compare the results of `perturn measure` with these values, and `truncated.py` computes variances from
them.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from math import fsum

from perturn.envs.alfworld.generated_games import ALFWorldLike
from perturn.types import Action, EpisodeProtocol, Prompt, Sampling, Task, Trajectory

TURNS = 12
PROTOCOL = EpisodeProtocol(name="plain", format="action", system="Play.", max_turns=TURNS)
LONGEST = 5
"""Maximum number of the expert's commands in a small game."""
VAIN = 2
"""Number of other commands on the list: ways to places that the expert does not visit."""


@dataclass
class Game:
    """A game, its list of commands, and the states that were reached."""

    task: Task
    menu: tuple[str, ...]
    opening: str
    _worlds: dict[str, tuple[list[str], bool, tuple[str, ...]]] = field(default_factory=dict)
    """For each state key: commands that lead there, whether the game is won, and the admissible commands of the
    list."""
    _after: dict[tuple[str, str], str] = field(default_factory=dict)
    _chance: dict[tuple[str, int], float] = field(default_factory=dict)

    @cached_property
    def start(self) -> str:
        """Key of the first state."""
        return self._state([])

    def _state(self, commands: Sequence[str]) -> str:
        """Return the key of the state after some commands. All commands must be admissible."""
        env = ALFWorldLike()
        seen = env.reset(self.task)
        for command in commands:
            seen = env.step(command)
        key = "won" if seen.success else str(seen.state_key)
        can = tuple(command for command in self.menu if command in (seen.admissible or ()))
        self._worlds.setdefault(key, (list(commands), seen.success, can))
        return key

    def after(self, key: str, command: str) -> str:
        """Return the key of the state after a command in another state."""
        if (key, command) not in self._after:
            self._after[key, command] = self._state([*self.commands(key), command])
        return self._after[key, command]

    def commands(self, key: str) -> list[str]:
        """Return commands that lead to a state."""
        return self._worlds[key][0]

    def options(self, key: str) -> tuple[str, ...]:
        """Return the admissible commands of the list in a state."""
        return self._worlds[key][2]

    def chance(self, key: str, left: int) -> float:
        """Return the exact probability of winning from a state within `left` turns, with uniform choices."""
        if self._worlds[key][1] or left == 0:
            return float(self._worlds[key][1])
        if (key, left) not in self._chance:
            ends = [self.chance(self.after(key, command), left - 1) for command in self.options(key)]
            self._chance[key, left] = fsum(ends) / len(ends)
        return self._chance[key, left]

    @property
    def states(self) -> int:
        """Number of states that were reached."""
        return len(self._worlds)


def small_games(number: int) -> list[Game]:
    """Return the first games of `train` that the expert wins in a few commands."""
    return list(islice(_small(), number))


def _small() -> Iterator[Game]:
    env = ALFWorldLike()
    for task in env.tasks("train"):
        script = list(env.expert(task))
        if len(script) > LONGEST:
            continue
        seen = env.reset(task)
        vain = [each for each in seen.admissible or () if each.startswith("go to") and each not in script]
        yield Game(task, (*dict.fromkeys(script), *vain[:VAIN]), seen.text)


class Chooser:
    """Policy that chooses uniformly among the admissible commands of the list, by the seed of the prompt."""

    name = "chooser"

    def __init__(self, games: Sequence[Game]) -> None:
        self._games = games

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Action]:
        """Return an action for each prompt, chosen from the words of the prompt."""
        return [self._choose(prompt) for prompt in prompts]

    def _choose(self, prompt: Prompt) -> Action:
        first = (*prompt.turns, None)[0]
        text = (first.observation if first else prompt.observation)[-1]["content"]
        game = next(game for game in self._games if game.opening in text)
        key = game.start
        for turn in prompt.turns:
            key = game.after(key, said(turn.action))
        return Action(f"Action: {random.Random(prompt.seed).choice(game.options(key))}")

    def forget(self, conversation: str) -> None:
        """Do nothing, since the policy keeps no conversation."""


def said(action: Action) -> str:
    """Return the command of an action."""
    return action.text.removeprefix("Action: ")


def exact_values(game: Game, one: Trajectory) -> list[float]:
    """Return the exact value before each turn of an episode, and after the last turn [turns + 1]."""
    keys = [game.start]
    for turn in one.turns:
        keys.append(game.after(keys[-1], said(turn.action)))
    values = [game.chance(key, TURNS - turn) for turn, key in enumerate(keys)]
    return [*values[:-1], 0.0]
