"""List all groups of trees (episodes and their branches) of a small decision process, with their probabilities.

`meter` uses these groups to measure credits that train on branches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, groupby, product
from math import factorial, prod

from perturn.credit_check.processes import Episodes
from perturn.types import Trajectory


@dataclass(frozen=True)
class ListedTree:
    """An explored episode and its branches, as indices among all episodes of the process."""

    explored: int
    """Index of the explored episode."""
    branches: tuple[tuple[int, int], ...]
    """First own turn of each branch, and the index of its episode."""
    probability: float
    """Probability of the tree."""

    def trajectories(self, episodes: Episodes, origin: int, first: int) -> list[Trajectory]:
        """Return the episodes of the tree as recorded trajectories, the explored episode first.

        Args:
            episodes: All episodes of the process.
            origin: Sample number of the explored episode.
            first: Sample number of the first branch; the other branches get the next numbers.
        """
        return [
            episodes.trajectory(self.explored, origin),
            *(
                replace(episodes.trajectory(episode, first + at), origin=origin, taken_over=turn)
                for at, (turn, episode) in enumerate(self.branches)
            ),
        ]


def list_trees(
    episodes: Episodes,
    every: int,
    samples: int,
    forked: Callable[[int, int], bool] = lambda episode, turn: True,
) -> list[ListedTree]:
    """Return all trees of a process.

    Args:
        episodes: All episodes of the process.
        every: Number of turns from one branching turn to the next.
        samples: Number of branches at each branching turn.
        forked: Function from the index of an episode and of a turn to whether branches start at this turn.
    """
    found = []
    for explored, steps in enumerate(episodes.steps):
        turns = [turn for turn in range(every, len(steps), every) if forked(explored, turn)]
        forks = [_played_on(episodes, explored, turn, samples) for turn in turns]
        for chosen in product(*forks):
            branches = tuple(branch for own, _ in chosen for branch in own)
            chance = prod((chance for _, chance in chosen), start=float(episodes.probability[explored]))
            found.append(ListedTree(explored, branches, chance))
    return found


def _played_on(
    episodes: Episodes, explored: int, turn: int, samples: int
) -> list[tuple[tuple[tuple[int, int], ...], float]]:
    """Return all sets of branches that can start at a turn, ignoring their order, and the probability of each set."""
    begun = episodes.steps[explored][:turn]
    state = episodes.steps[explored][turn].state
    same = [
        episode
        for episode, steps in enumerate(episodes.steps)
        if len(steps) > turn and steps[:turn] == begun and steps[turn].state == state
    ]
    chance = {episode: float(episodes.probability[episode]) for episode in same}
    whole = sum(chance.values())
    return [
        (
            tuple((turn, episode) for episode in drawn),
            orders(drawn) * prod(chance[episode] / whole for episode in drawn),
        )
        for drawn in combinations_with_replacement(same, samples)
    ]


def orders(drawn: Sequence[int]) -> int:
    """Return the number of orders in which the sampled episodes can occur."""
    return factorial(len(drawn)) // prod(factorial(len(list(alike))) for _, alike in groupby(sorted(drawn)))


def list_groups(
    episodes: Episodes, trees: Sequence[ListedTree], size: int
) -> Iterator[tuple[list[Trajectory], list[int], float]]:
    """Yield each group of `size` trees: its trajectories, their episode indices, and the probability of the group."""
    for drawn in combinations_with_replacement(range(len(trees)), size):
        group: list[Trajectory] = []
        members: list[int] = []
        for origin, index in enumerate(drawn):
            tree = trees[index]
            group += tree.trajectories(episodes, origin, size + len(members))
            members += [tree.explored, *(episode for _, episode in tree.branches)]
        yield group, members, orders(drawn) * prod(trees[index].probability for index in drawn)
