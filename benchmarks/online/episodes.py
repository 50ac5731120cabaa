"""Episodes to teach a small policy from: the expert's, and those of an expert who errs and recovers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from perturn.envs.alfworld.environment import ALFWorld
from perturn.envs.alfworld.expert import Player, demonstrate
from perturn.envs.alfworld.places import promise
from perturn.envs.alfworld.play import TextGame
from perturn.episodes.episode import Job, episode
from perturn.episodes.formats import FORMATS
from perturn.types import Action, EpisodeProtocol, Observation, Task, Trajectory

PROTOCOL = EpisodeProtocol(name="alfworld-small", format="action", max_turns=30)
"""No system text, no worked example, no list of commands, the whole history."""
_JITTER = 0.5
"""Standard deviation of the logarithm by which a promise is multiplied."""
_DETOUR, _FAILURE = 0.10, 0.12
"""Chance, at each of the expert's turns, of a walk elsewhere and of a command that fails before it."""


class Clumsy:
    """A game whose player strays and slips before some of the commands that were asked for."""

    def __init__(self, game: TextGame, first: Observation, draw: random.Random) -> None:
        self.said: list[str] = []
        self._game, self._draw, self._last = game, draw, first

    def step(self, command: str) -> Observation:
        """Do what was asked for, some nonsense before it; the answer is that of the command."""
        if self._draw.random() < _FAILURE:
            self._do(self._failing(command))
        if command.startswith("go to ") and self._draw.random() < _DETOUR:
            for _ in range(3):
                self._do(self._draw.choice([each for each in self._last.admissible if each[:6] == "go to "]))
                if command in self._last.admissible:
                    break
        self._do(command)
        return self._last

    def _failing(self, command: str) -> str:
        """A command that cannot be done now, like the one that was asked for: a wrong number, or too early."""
        verb, *rest = command.split(" ")
        numbers = [index for index, word in enumerate(rest) if word.isdecimal()]
        if numbers and self._draw.random() < 0.7:
            rest[self._draw.choice(numbers)] = str(self._draw.randint(1, 5))
        wrong = " ".join([verb, *rest])
        return wrong if wrong not in self._last.admissible else self._again()

    def _again(self) -> str:
        """The command before, if it cannot be done twice; else a look."""
        before = self.said[-1] if self.said else "look"
        return before if before not in self._last.admissible else self._draw.choice(["look", "inventory"])

    def _do(self, command: str) -> None:
        self._last = self._game.step(command)
        self.said.append(command)


def expert_script(env: ALFWorld, task: Task) -> Sequence[str]:
    """Commands of the expert."""
    return env.expert(task)


def clumsy_script(env: ALFWorld, task: Task, seed: int) -> Sequence[str]:
    """Commands of the expert who searches in an order of its own, strays and slips."""
    draw, game = random.Random(f"{task.id} {seed}"), TextGame(env.grammar)
    noise: dict[tuple[str, str], float] = {}

    def jittered(thing: str, place: str, places: int) -> float:
        factor = noise.setdefault((thing, place), draw.lognormvariate(0, _JITTER))
        return factor * promise(thing, place, places)

    first = game.reset(env.game(task))
    clumsy = Clumsy(game, first, draw)
    demonstrate(Player(first, clumsy.step, jittered))
    return clumsy.said


def play(env: ALFWorld, task: Task, script: Sequence[str]) -> Trajectory:
    """An episode in which these commands are given, under the benchmark's rules."""
    write: Callable[[str, str], str] = FORMATS[PROTOCOL.format].write
    steps = episode(env, Job(task, 0), protocol=PROTOCOL, policy="expert")
    commands = iter(script)
    try:
        next(steps)
        while True:
            steps.send(Action(write("", next(commands))))
    except StopIteration as end:
        if not isinstance(end.value, Trajectory):
            raise ValueError(f"the script of {task.id} ends before its game.") from end
        return end.value


def solved(env: ALFWorld, tasks: Sequence[Task], noisy: int) -> Iterator[Trajectory]:
    """Of each task an episode of the expert and some of the clumsy one: those that end well within the limit."""
    for task in tasks:
        scripts = [expert_script(env, task), *(clumsy_script(env, task, seed) for seed in range(noisy))]
        for script in scripts:
            if len(script) <= PROTOCOL.max_turns:
                found = play(env, task, script)
                if found.success:
                    yield found


def wander(env: ALFWorld, tasks: Sequence[Task], every: int = 8, steps: int = 60) -> Iterator[str]:
    """Messages of games in which any possible command is given, so that all that a game says is heard once."""
    for task in tasks[::every]:
        draw, game = random.Random(task.id), TextGame(env.grammar)
        seen = game.reset(env.game(task))
        for _ in range(steps):
            yield seen.text
            if seen.terminated:
                break
            near = [each for each in seen.admissible if each[:6] != "go to "]
            command = draw.choice(near if draw.random() < 0.7 else seen.admissible)
            yield FORMATS[PROTOCOL.format].write("", command)
            seen = game.step(command)
