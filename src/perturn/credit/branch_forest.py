"""Explored episodes and their branches as trees, with the return of each segment of turns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import fsum, isnan

from torch import Tensor

from perturn.credit.returns import Numbers
from perturn.types import Trajectory

BranchValues = Sequence[Sequence[float] | Tensor]
"""Mean return from each turn on of the episodes that branch off before it, in units of reward `[trajectories][turns]`;
NaN: none does."""

PLAYED = "the mean return of the branches from before each turn"
"""`BranchValues` in words, for errors."""

VALUES = ("tree", "leaves")
"""Value of a stretch of turns: the mean over the children of the fork after it, or over all leaves below it."""


@dataclass(frozen=True)
class Stretch:
    """Turns of a trajectory from its first, or from a fork, to the next fork, or to its end."""

    member: int
    """Index of the trajectory in the group."""
    start: int
    stop: int
    """One more than its last turn."""
    value: float
    """Mean reward from its first turn on."""
    before: float
    """Rewards before it."""
    leaves: int
    """Ends of trajectories that share it."""
    share: float
    """1 before the first fork; after a fork, the number before it divided by the number of children."""
    siblings: tuple[float, ...] = ()
    """Values of the other children of its fork; for a first stretch, values of the other trees."""

    @property
    def score(self) -> float:
        """Rewards before the segment, and its return."""
        return self.before + self.value


@dataclass(frozen=True)
class Tree:
    """An explored episode and its branches."""

    stretches: tuple[Stretch, ...]
    """The first turns' is the first."""
    scores: tuple[float, ...]
    """Of each leaf, from the first turn on, in units of reward."""

    @property
    def value(self) -> float:
        """Mean reward from its first turn on."""
        return self.stretches[0].value


Forks = dict[int, list[int]]
"""Turn -> indices of the branches that begin there, by turn."""


def forest(group: Sequence[Trajectory], rewards: Numbers, value: str = "tree") -> list[Tree]:
    """Return the trajectories of a task as trees.

        V(stretch) = its rewards + mean over the children of the fork after it of V(child)      tree
        V(stretch) = mean over the leaves below it of the rewards from its first turn on         leaves

    Args:
        group: Explored episodes, and branches of these.
        rewards: Those that count `[trajectories][turns]`. Of a branch, turns that it shares are the explored one's.
        value: One of VALUES.

    Raises:
        ValueError: If a branch does not begin with some turns, and not all, of one explored episode of the group.
    """
    trees = [_tree(i, forks, rewards, value) for i, forks in forks_of(group).items()]
    values = [tree.value for tree in trees]
    for index, tree in enumerate(trees):
        first = replace(tree.stretches[0], siblings=(*values[:index], *values[index + 1 :]))
        trees[index] = replace(tree, stretches=(first, *tree.stretches[1:]))
    return trees


def forks_of(group: Sequence[Trajectory]) -> dict[int, Forks]:
    """Turn the index of each explored episode into its forks.

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
    """Reject a branch that does not begin as the explored episode does, such as a branch from a branch.

    Raises:
        ValueError: Saying where it differs.
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
    values, leaves = [fsum(own[cuts[-2] :])], [1]  # of the explored episode's stretches, the last one first
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
        # Exact sums, so that leaves with equal rewards are equal.
        scores += [fsum([*own[:start], *rewards[i][start:]]) for i, _ in theirs]
    return Tree(tuple(stretches), (fsum(own), *scores))


def segment_advantages(rewards: Sequence[float], values: Sequence[float], start: float) -> list[float]:
    """Return what each segment changed in the expected return, the same for all its turns, in units of reward [turns].

        A_t = sum_(k in [c, d)) r_k + V_d - V_c,   c <= t < d,   V = 0 after the end

    A segment begins with the episode, and at each turn whose value is known.

    Args:
        rewards: Of each turn [turns].
        values: V before each turn, NaN where it is not known; the value of the first turn is not read [turns].
        start: V before the first turn.
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
