"""The tree of an explored episode, its branches, and their branches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import log, nan, sqrt
from statistics import fmean

from perturn.types import Trajectory, failed, score


@dataclass
class Node:
    """The first turns that some episodes of a tree have in common, by their actions."""

    depth: int
    """How many turns."""
    passed: list[Trajectory] = field(default_factory=list)
    """The episodes that begin with them, in the order in which they were played."""
    children: dict[object, Node] = field(default_factory=dict)
    """Nodes by the next action, in the order in which the actions were first tried."""

    @property
    def drawn(self) -> int:
        """Number of actions that the policy has drawn here, without actions of episodes that took the turn over."""
        return sum(len(one.turns) > self.depth >= one.taken_over for one in self.passed)

    @property
    def value(self) -> float:
        """Mean score of its episodes that did not FAIL, in units of reward; NaN where all did."""
        ended = [score(one) for one in self.passed if not failed(one)]
        return fmean(ended) if ended else nan

    @property
    def example(self) -> Trajectory | None:
        """The first episode that can be resumed here; None where all ended, or FAILED."""
        return next((one for one in self.passed if len(one.turns) > self.depth and not failed(one)), None)

    def walk(self) -> Iterator[Node]:
        """Yield it and all nodes below, each before its children."""
        left = [self]
        while left:
            node = left.pop()
            yield node
            left += reversed(node.children.values())


def grow(explored: Trajectory, played_on: Iterable[Trajectory]) -> Node:
    """Return the tree of an explored episode: its root, where nothing is done yet.

    Args:
        explored: The episode.
        played_on: The branches of its tree, in any order. A branch that FAILED while it replayed the turns before it
            gives no information on any state, and is left out.
    """
    root = Node(0)
    for one in (explored, *sorted(played_on, key=lambda one: one.sample)):
        if len(one.turns) < one.taken_over:
            continue
        node = root
        node.passed.append(one)
        for turn in one.turns:
            did = turn.action.text, repr(turn.action.tool_calls)
            node = node.children.setdefault(did, Node(node.depth + 1))
            node.passed.append(one)
    return root


def next_node(root: Node, width: int, exploration: float) -> Node | None:
    """Return the node at which the next episode of a tree branches; None if there is nothing left to try.

    From the root on, as long as `width` actions were drawn at a node, the child is followed with the largest

        mean score + exploration * sqrt(ln(episodes of the node) / episodes of the child)

    and of equal ones the first that was tried.

    Source: Kocsis and Szepesvári 2006, "Bandit based Monte-Carlo Planning", ECML (UCT).
    Differs: actions are drawn from the policy, so a node is left for its children when so many were drawn, whether they
    are different or not. Every turn of an episode gets a node, not the first new one alone. Nodes below which all is
    tried are left out.

    Args:
        root: Of the tree.
        width: Actions to draw at a node.
        exploration: Bonus of rarely tried actions, in units of reward.
    """
    node = root
    while node.drawn >= width:
        ahead = [child for child in node.children.values() if _can_grow(child, width)]
        if not ahead:
            return None
        tried = log(len(node.passed))
        node = max(ahead, key=lambda child: child.value + exploration * sqrt(tried / len(child.passed)))
    return node if node.example else None


def _can_grow(node: Node, width: int) -> bool:
    """Return whether an episode can branch from a node or one below."""
    if node.example is None:
        return False
    return node.drawn < width or any(_can_grow(child, width) for child in node.children.values())
