"""Trees of explored episodes and their branches, with the return of each segment of turns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import fsum, isnan

from torch import Tensor

from perturn.credit.returns import Numbers
from perturn.types import Trajectory

BranchValues = Sequence[Sequence[float] | Tensor]
"""Mean return of the branches that start at each turn, from this turn on, in units of reward `[trajectories][turns]`;
NaN: no branch starts at the turn."""

PLAYED = "the mean return of the branches from before each turn"
"""`BranchValues` in words, for errors."""

VALUES = ("tree", "leaves")
"""Value of a stretch of turns: the mean value of the children of the next fork, or the mean return of all leaves below
the stretch."""


@dataclass(frozen=True)
class Stretch:
    """Turns of a trajectory from one fork to the next; the start and the end of the trajectory count as forks."""

    member: int
    """Index of the trajectory in the group."""
    start: int
    """Index of the first turn of the stretch."""
    stop: int
    """Index of the last turn of the stretch, plus one."""
    value: float
    """Mean return from the first turn of the stretch on, in units of reward."""
    before: float
    """Sum of the rewards before the stretch, in units of reward."""
    leaves: int
    """Number of trajectories that contain the stretch."""
    share: float
    """Share of the stretch, in (0, 1]. It is 1 before the first fork, and each fork divides it by its number of
    children."""
    siblings: tuple[float, ...] = ()
    """Values of the other children of the fork where the stretch starts. For a first stretch, values of the other
    trees."""

    @property
    def score(self) -> float:
        """Rewards before the stretch plus its mean return, in units of reward."""
        return self.before + self.value


@dataclass(frozen=True)
class Tree:
    """An explored episode and its branches."""

    stretches: tuple[Stretch, ...]
    """Stretches of the tree; the first stretch starts at the first turn."""
    scores: tuple[float, ...]
    """Total reward of each trajectory of the tree, in units of reward [leaves]."""

    @property
    def value(self) -> float:
        """Mean return from the first turn on, in units of reward."""
        return self.stretches[0].value


Forks = dict[int, list[int]]
"""Turn -> indices of the branches that start at this turn, in ascending order of the turns."""


def forest(group: Sequence[Trajectory], rewards: Numbers, value: str = "tree") -> list[Tree]:
    """Return one tree per explored episode of a task.

        V(stretch) = its rewards + mean of V(child) over the children of the next fork          tree
        V(stretch) = mean over the leaves below it of the rewards from its first turn on         leaves

    Args:
        group: Explored episodes, and branches of these episodes.
        rewards: Reward of each turn `[trajectories][turns]`. Shared turns take the reward of the explored episode.
        value: One of VALUES.

    Raises:
        ValueError: If the explored episode of a branch is missing or occurs twice in the group, or the branch does not
            share its first turns. A branch must share at least one turn, and not all turns.
    """
    trees = [_tree(i, forks, rewards, value) for i, forks in forks_of(group).items()]
    values = [tree.value for tree in trees]
    for index, tree in enumerate(trees):
        first = replace(tree.stretches[0], siblings=(*values[:index], *values[index + 1 :]))
        trees[index] = replace(tree, stretches=(first, *tree.stretches[1:]))
    return trees


def forks_of(group: Sequence[Trajectory]) -> dict[int, Forks]:
    """Return the forks of each explored episode, by the index of the episode in the group.

    Raises:
        ValueError: See `forest`.
    """
    found: dict[int, Forks] = {i: {} for i, one in enumerate(group) if one.origin is None}
    for i, one in sorted(enumerate(group), key=lambda each: each[1].taken_over):
        if one.origin is None:
            continue
        explored = [j for j in found if group[j].sample == one.origin]
        if len(explored) != 1:
            raise ValueError(
                f"sample {one.sample} is a branch of {one.origin}, which is {len(explored) or 'not'} "
                f"{'times ' if explored else ''}in the group."
            )
        _check_shared(one, group[explored[0]])
        found[explored[0]].setdefault(one.taken_over, []).append(i)
    return found


def _check_shared(branch: Trajectory, explored: Trajectory) -> None:
    """Reject a branch whose shared turns differ from the explored episode, such as a branch of a branch.

    Raises:
        ValueError: If the number of shared turns or a shared action differs.
    """
    shared, turns = branch.taken_over, len(explored.turns)
    if not 0 < shared < turns or len(branch.turns) < shared:
        raise ValueError(
            f"sample {branch.sample} must share some turns of sample {branch.origin}, and not all of its {turns}, got "
            f"{shared}."
        )
    did = [[turn.action.text for turn in one.turns[:shared]] for one in (branch, explored)]
    if did[0] != did[1]:
        at = next(t for t, (one, other) in enumerate(zip(*did, strict=True)) if one != other)
        raise ValueError(
            f"sample {branch.sample} must share its first {shared} turns with sample {branch.origin}, and did "
            f"otherwise at turn {at}."
        )


def _tree(explored: int, forks: Forks, rewards: Numbers, value: str) -> Tree:
    own, cuts = rewards[explored], [0, *forks, len(rewards[explored])]
    ends = [[(i, fsum(rewards[i][turn:])) for i in branches] for turn, branches in forks.items()]
    # For the stretches of the explored episode, starting with the last stretch.
    values, leaves = [fsum(own[cuts[-2] :])], [1]
    for number, found in reversed(list(enumerate(ends))):
        copies = leaves[-1] if value == "leaves" else 1
        after = fsum([copies * values[-1], *(end for _, end in found)]) / (copies + len(found))
        values.append(fsum([*own[cuts[number] : cuts[number + 1]], after]))
        leaves.append(leaves[-1] + len(found))
    stretches, scores, share = [], [], 1.0
    for number, (start, stop) in enumerate(pairwise(cuts)):
        before, theirs = fsum(own[:start]), ends[number - 1] if number else []
        share /= 1 + len(theirs)
        children = [(explored, values[-1 - number], stop, leaves[-1 - number])]
        children += [(i, end, len(rewards[i]), 1) for i, end in theirs]
        for at, (member, its, last, below) in enumerate(children):
            siblings = tuple(each[1] for each in (*children[:at], *children[at + 1 :]))
            stretches.append(Stretch(member, start, last, its, before, below, share, siblings))
        # Exact sums: leaves with equal rewards get equal scores.
        scores += [fsum([*own[:start], *rewards[i][start:]]) for i, _ in theirs]
    return Tree(tuple(stretches), (fsum(own), *scores))


def segment_advantages(rewards: Sequence[float], values: Sequence[float], start: float) -> list[float]:
    """Return the change in expected return over the segment of each turn, in units of reward [turns].

        A_t = sum_(k in [c, d)) r_k + V_d - V_c,   c <= t < d,   V = 0 after the end

    A segment starts at the first turn and at each turn whose value is known. All turns of a segment get one number.

    Args:
        rewards: Reward of each turn [turns].
        values: V before each turn, in units of reward; NaN: not known [turns]. The first entry is ignored.
        start: V before the first turn, in units of reward.
    """
    found = [0.0] * len(rewards)
    after, end = 0.0, len(rewards)
    for turn in range(len(rewards) - 1, -1, -1):
        value = start if turn == 0 else values[turn]
        if isnan(value):
            continue
        found[turn:end] = [fsum((*rewards[turn:end], after, -value))] * (end - turn)
        after, end = value, turn
    return found
