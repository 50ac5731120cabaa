"""Tree search over an explored episode, its branches, and their branches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import log, nan, sqrt
from statistics import fmean

from perturn.data.origins import without_ids
from perturn.types import Trajectory, failed, score


@dataclass
class Node:
    """A node of a tree of episodes: a sequence of first actions that some episodes share."""

    depth: int
    """Number of actions from the root."""
    passed: list[Trajectory] = field(default_factory=list)
    """Episodes that begin with these actions, in the order in which they were played."""
    children: dict[object, Node] = field(default_factory=dict)
    """Child nodes by the next action, in the order in which the actions were first tried."""

    @property
    def drawn(self) -> int:
        """Number of actions that the policy has sampled at this node. Episodes that took the turn over do not count."""
        return sum(len(one.turns) > self.depth >= one.taken_over for one in self.passed)

    @property
    def value(self) -> float:
        """Mean score, in units of reward, of the node's episodes that are not FAILED; NaN if all are."""
        ended = [score(one) for one in self.passed if not failed(one)]
        return fmean(ended) if ended else nan

    @property
    def example(self) -> Trajectory | None:
        """The first episode that can be resumed at this node; None if all episodes ended here or are FAILED."""
        return next((one for one in self.passed if len(one.turns) > self.depth and not failed(one)), None)

    def walk(self) -> Iterator[Node]:
        """Yield this node and all nodes below it, each before its children."""
        left = [self]
        while left:
            node = left.pop()
            yield node
            left += reversed(node.children.values())


def grow(explored: Trajectory, played_on: Iterable[Trajectory]) -> Node:
    """Return the root of the tree of an explored episode and its branches. The root has no actions.

    Args:
        explored: The episode.
        played_on: The branches of the episode and their branches, in any order. A branch that FAILED while its first
            turns were replayed is left out.
    """
    root = Node(0)
    for one in (explored, *sorted(played_on, key=lambda one: one.sample)):
        if len(one.turns) < one.taken_over:
            continue
        node = root
        node.passed.append(one)
        for turn in one.turns:
            did = turn.action.text, repr(without_ids(turn.action.tool_calls))
            node = node.children.setdefault(did, Node(node.depth + 1))
            node.passed.append(one)
    return root


def next_node(root: Node, width: int, exploration: float) -> Node | None:
    """Return the node at which the next episode of a tree should branch; None if nothing is left to try.

    The search starts at the root. While `width` actions have been sampled at a node, it moves to the child with the
    largest

        mean score + exploration * sqrt(ln(episodes of the node) / episodes of the child)

    Of several such children, it moves to the child whose action was tried first.

    Source: Kocsis and Szepesvári 2006, "Bandit based Monte-Carlo Planning", ECML (UCT).
    Differs: actions are sampled from the policy, so the `width` actions of a node may be equal. Every turn of an
    episode gets a node, not only the first new turn. Nodes that have nothing left to try below them are skipped.

    Args:
        root: Root of the tree.
        width: Number of actions to sample at a node.
        exploration: Weight of the bonus for rarely tried actions, in units of reward.
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
    """Return whether an episode can branch at a node or at a node below it."""
    if node.example is None:
        return False
    return node.drawn < width or any(_can_grow(child, width) for child in node.children.values())
