"""Values of turns by episodes that were played on, against the exact ones, on games of `alfworld-like`.

    python benchmarks/branch_values.py
    python benchmarks/branch_values.py --games 2 --samples 4 --seeds 0

A policy that takes an even choice among the commands of a short list that can be said is a Markov chain on the states
of a game, so that its chance to win within the turns that are left is a sum over all that can happen. Episodes are
explored by it and played on from each of their turns as a run does: `branch_jobs`, `play`, `branch_values`. Printed are
the mean error, in its standard errors, by seed; of the values by 1, 4 and 16 branches the root of the mean square
error, beside what it should be; and how often an interval of 95 % from all branches of a turn holds the exact value.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from math import fsum, sqrt
from statistics import NormalDist, mean, stdev

from perturn.credit.returns import Return
from perturn.envs.alfworld.generated_games import ALFWorldLike
from perturn.episodes.play_many import Job, play
from perturn.explore.branching import branch_jobs
from perturn.quantities.branch_returns import branch_values
from perturn.stats import rate_interval
from perturn.types import Action, EpisodeProtocol, Prompt, Sampling, Task, Trajectory

TURNS = 12
PROTOCOL = EpisodeProtocol(name="plain", format="action", system="Play.", max_turns=TURNS)
LONGEST = 5
"""Commands of the expert, in the games that are small enough."""
VAIN = 2
"""Commands on the list beside his: ways to places that he does not go to."""
EXPLORED = 3
"""Episodes of each game."""
COUNTS = (1, 4, 16)
"""Branches of a turn that are taken together."""


@dataclass
class Game:
    """A game, the list of commands to choose from, and the states that were reached."""

    task: Task
    menu: tuple[str, ...]
    opening: str
    _worlds: dict[str, tuple[list[str], bool, tuple[str, ...]]] = field(default_factory=dict)
    """Key of a state -> commands that lead there, whether it is won, and what can be said there of the list."""
    _after: dict[tuple[str, str], str] = field(default_factory=dict)
    _chance: dict[tuple[str, int], float] = field(default_factory=dict)

    @cached_property
    def start(self) -> str:
        """Key of the first state."""
        return self._state([])

    def _state(self, commands: Sequence[str]) -> str:
        """Key of the state that commands lead to, each of which can be said."""
        env = ALFWorldLike()
        seen = env.reset(self.task)
        for command in commands:
            seen = env.step(command)
        key = "won" if seen.success else str(seen.state_key)
        can = tuple(command for command in self.menu if command in (seen.admissible or ()))
        self._worlds.setdefault(key, (list(commands), seen.success, can))
        return key

    def after(self, key: str, command: str) -> str:
        """Key of the state that a command leads to from another."""
        if (key, command) not in self._after:
            self._after[key, command] = self._state([*self.commands(key), command])
        return self._after[key, command]

    def commands(self, key: str) -> list[str]:
        """Commands that lead to a state."""
        return self._worlds[key][0]

    def options(self, key: str) -> tuple[str, ...]:
        """What can be said in a state, of the list."""
        return self._worlds[key][2]

    def chance(self, key: str, left: int) -> float:
        """Exact chance of a win within so many turns from a state, if each choice is even."""
        if self._worlds[key][1] or left == 0:
            return float(self._worlds[key][1])
        if (key, left) not in self._chance:
            ends = [self.chance(self.after(key, command), left - 1) for command in self.options(key)]
            self._chance[key, left] = fsum(ends) / len(ends)
        return self._chance[key, left]

    @property
    def states(self) -> int:
        """States that were reached."""
        return len(self._worlds)


def small_games(number: int) -> list[Game]:
    """The first games of `train` that the expert wins in a few commands."""
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
    """The policy: an even choice, by the seed of the prompt, among the commands of the list that can be said."""

    name = "chooser"

    def __init__(self, games: Sequence[Game]) -> None:
        self._games = games

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Action]:
        """Choose for each prompt, by what was said in it."""
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
        """Nothing was kept."""


def said(action: Action) -> str:
    """The command of an action."""
    return action.text.removeprefix("Action: ")


@dataclass(frozen=True)
class Measured:
    """A turn that was played on from."""

    exact: float
    wins: list[float]
    """Of each branch, in the order of their numbers."""
    value: float
    """As `branch_values` has it."""


def measure(games: Sequence[Game], samples: int, seed: int, explored: int = EXPLORED) -> list[Measured]:
    """Explore each game, play on from every turn after the first, and hold what comes of it against what should."""
    engine = Chooser(games)
    playing = partial(play, engine=engine, make_environment=ALFWorldLike, protocol=PROTOCOL)
    first = [Job(game.task, 1000 * seed + sample, sample) for game in games for sample in range(explored)]
    begun = sorted(playing(first, sampling=Sampling()), key=lambda one: one.key)
    turns = {one.key: range(1, len(one.turns)) for one in begun}
    jobs = branch_jobs(begun, turns, seed, branches=samples, samples=explored)
    branches = sorted(playing(jobs, sampling=Sampling()), key=lambda one: one.key)
    by_turn: dict[tuple[str, int | None, int], list[float]] = {}
    for one in sorted(branches, key=lambda one: one.sample):
        by_turn.setdefault((one.task.id, one.origin, one.taken_over), []).append(float(one.success))
    values = branch_values(begun, branches, Return())
    known = {game.task.id: game for game in games}
    return [
        Measured(exact, by_turn[one.task.id, one.sample, turn], values[index][turn])
        for index, one in enumerate(begun)
        for turn, exact in enumerate(exact_values(known[one.task.id], one))
        if turn
    ]


def exact_values(game: Game, one: Trajectory) -> list[float]:
    """Exact value before each turn of an episode [turns]."""
    keys = [game.start]
    for turn in one.turns[:-1]:
        keys.append(game.after(keys[-1], said(turn.action)))
    return [game.chance(key, TURNS - turn) for turn, key in enumerate(keys)]


def z_of_mean(found: Sequence[Measured]) -> float:
    """Mean error of the values over its standard error, which follows from the exact values."""
    error = mean(each.value - each.exact for each in found)
    variance = fsum(each.exact * (1 - each.exact) / len(each.wins) for each in found)
    return error * len(found) / sqrt(variance)


def error_by(found: Sequence[Measured], count: int) -> tuple[float, float]:
    """Root of the mean square error of values by so many branches, and what it should be."""
    parts = [
        (mean(each.wins[at : at + count]) - each.exact) ** 2
        for each in found
        for at in range(0, len(each.wins) - count + 1, count)
    ]
    return sqrt(mean(parts)), sqrt(mean(each.exact * (1 - each.exact) for each in found) / count)


def coverage(found: Sequence[Measured]) -> float:
    """Share of the turns whose interval of 95 % holds the exact value; those that must win or lose are left out."""
    open_ = [each for each in found if 0.01 < each.exact < 0.99]
    held = 0
    for each in open_:
        interval = rate_interval(int(sum(each.wins)), len(each.wins))
        held += interval.low <= each.exact <= interval.high
    return held / len(open_)


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--games", type=int, default=6)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    chosen = parser.parse_args()
    games, found, scores = small_games(chosen.games), list[Measured](), []
    for seed in chosen.seeds:
        own = measure(games, chosen.samples, seed)
        scores.append(z_of_mean(own))
        found += own
    exact = [each.exact for each in found]
    spread = f", between {min(exact):.3f} and {max(exact):.3f}, deviation {stdev(exact):.3f}"
    print(
        f"{len(games)} games of {mean(game.states for game in games):.0f} states reached, {len(chosen.seeds)} seeds"
    )
    print(
        f"{len(found)} turns, {sum(len(each.wins) for each in found)} branches; exact values {mean(exact):.3f}{spread}"
    )
    every = z_of_mean(found)
    chance = 2 * (1 - NormalDist().cdf(abs(every)))
    error = mean(each.value - each.exact for each in found)
    print(
        f"mean error {error:+.5f}, {every:+.2f} standard errors (p = {chance:.2f}); by seed "
        + ", ".join(f"{z:+.2f}" for z in scores)
    )
    for count in (each for each in COUNTS if each <= chosen.samples):
        print("{} branches: error {:.4f}, expected {:.4f}".format(count, *error_by(found, count)))
    print(f"intervals of 95 % hold: {coverage(found):.3f}")


if __name__ == "__main__":
    main()
