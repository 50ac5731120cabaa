"""GraphGPO: credit a turn by the distance to a success, in the graph of all states that a group visited."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from perturn.extend import NOT_NEGATIVE, Bound, Trajectory
from perturn.extend.tensors import (
    CreditTraits,
    GroupCredit,
    Numbers,
    Return,
    Visit,
    anchors,
    combined,
    episode_advantages,
    normalized_within,
    solved,
)

_SUCCESS = -1
"""Node in which a solved trajectory ends."""


@dataclass(frozen=True)
class GraphGPO(GroupCredit):
    """Episode advantage, plus a term for the distance to a success in the graph of the group's states.

        A_it = beta_episode A_E + beta_graph A_G
        A_G = C omega^d(next state), standardized over the steps out of the same state

    d is the least number of steps to a success in the graph of all steps that the group took. For a state without a
    path to a success, d is the largest d of other states plus 1. A solved trajectory ends in the state "success", and
    any other trajectory in a state of its own. If the group has no success, A_G is 0. A_E = (S_i - mean(S)) / (std(S) +
    1e-6), with the sample standard deviation over trajectories. S is the score minus the penalty of each invalid turn.

    Source: GraphGPO, as implemented in `graph_credit.py` of redai-infra/Relax.
    Differs: the paper's Eq. 4 has the exponent d + cost. The cost is a constant factor, which standardization removes
    where the standard deviation is large against the 1e-6 in its divisor. As in Relax's code, this 1e-6 makes A_G
    vanish far from a success: between next states with d = 8 and 9 it is 0.04, against 0.71 near a success. The
    source's penalty of 0.1 goes with a success worth 10. If a success is worth 1, `invalid_penalty: 0.01` has the same
    effect. States are equal by `state_key`; a turn without a state key is a state of its own. A trajectory alone in its
    group gets 0.
    """

    omega: Annotated[float, Bound(above=0, below=1)] = 0.1
    """Discount of a state's value per step of distance from a success, in (0, 1)."""

    success_reward: Annotated[float, Bound(above=0)] = 10.0
    """Value C of a success, in units of reward; > 0."""

    beta_episode: Annotated[float, NOT_NEGATIVE] = 1.0
    """Weight of A_E, without unit; >= 0."""

    beta_graph: Annotated[float, NOT_NEGATIVE] = 1.0
    """Weight of A_G, without unit; >= 0."""

    returns: Return = field(default=Return(invalid_penalty=0.1), kw_only=True)
    """Rewards to count in A_E, and the penalty of invalid actions; see `Return`."""

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        return CreditTraits(needs_group=True, compares_states=True)

    def _weigh(self, group: Sequence[Trajectory], rewards: Numbers) -> Numbers:
        scores = [sum(of_one) for of_one in rewards]
        copies = [
            [self.beta_episode * score] * len(each) for score, each in zip(scores, rewards, strict=True)
        ]
        episode = episode_advantages(
            [self.beta_episode * score for score in scores],
            copies,
            normalize="std",
            statistics="trajectories",
        )
        return combined(episode, self._graph(group), self.beta_graph)

    def _graph(self, group: Sequence[Trajectory]) -> Numbers:
        """Return A_G of each turn, without unit `[trajectories][turns]`."""
        states = anchors(group)
        steps = next_nodes(group, states)
        distance = distances(steps)
        if len(distance) == 1:  # no trajectory reached the success
            return [[0.0] * len(trajectory.turns) for trajectory in group]
        far = max(distance.values()) + 1
        values = [
            [self.success_reward * self.omega ** distance.get(to, far) for _, to in each] for each in steps
        ]
        return normalized_within(states, values, "std")


def next_nodes(group: Sequence[Trajectory], states: Sequence[Sequence[Visit]]) -> list[list[tuple[int, int]]]:
    """Return the node before and the node after each turn `[trajectories][turns]`."""
    node = {visit: number for number, visits in enumerate(states) for visit in visits}
    fresh = iter(range(len(states), len(states) + sum(len(each.turns) + 1 for each in group)))
    found = []
    for i, trajectory in enumerate(group):
        visited = [node[i, t] if (i, t) in node else next(fresh) for t in range(len(trajectory.turns))]
        last = _SUCCESS if solved(trajectory) else next(fresh)
        found.append(list(zip(visited, [*visited[1:], last], strict=True)) if visited else [])
    return found


def distances(steps: Sequence[Sequence[tuple[int, int]]]) -> dict[int, int]:
    """Return the least number of steps from each node to the success, for all nodes with a path to it."""
    before: dict[int, set[int]] = defaultdict(set)
    for each in steps:
        for node, to in each:
            before[to].add(node)
    found, waiting = {_SUCCESS: 0}, deque([_SUCCESS])
    while waiting:
        to = waiting.popleft()
        for node in before[to] - found.keys():
            found[node] = found[to] + 1
            waiting.append(node)
    return found
