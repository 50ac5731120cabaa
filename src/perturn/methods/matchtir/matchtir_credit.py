"""MatchTIR: match tool calls with the task's gold calls, and use the matches as rewards of turns and episodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, isfinite
from typing import Annotated, Any, ClassVar

from torch import Tensor

from perturn.extend import Bound, Need, Needs, OneOf, Status, Trajectory
from perturn.extend.tensors import (
    EPSILON,
    RLOO,
    TRLOO,
    CreditTraits,
    GroupCredit,
    Numbers,
    Singleton,
    episode_advantages,
    mean,
    normalized_within,
    on_each_turn,
    returns_to_go,
    weigh_tasks,
)

ASSIGNMENTS = ("hard", "greedy", "soft")
"""Matching of calls with gold calls. hard: one to one, with the largest sum of similarities. greedy: one to one, the
most similar pair first. soft: each call has a share of each gold call."""

BASELINES = ("group", "others")
"""Baseline of a turn. group: mean and deviation of the group, including the turn itself. others: the mean of the other
trajectories."""

Matches = Sequence[Sequence[Sequence[float]]]
"""Similarity of each call to its matched gold call, in [0, 1]; 0: no match `[trajectories][turns][calls]`."""


@dataclass(frozen=True)
class ToolMatches(Need):
    """Similarity of each tool call to its matched gold call.

    The credit gets it as argument `tool_matches` `[trajectories][turns][calls]`; 0: no match.
    """

    name: ClassVar[str] = "tool-matches"
    assignment: str = "hard"
    """Matching of calls with gold calls, one of ASSIGNMENTS."""
    regularization: float = 0.1
    """Entropy regularization of the soft assignment, in units of similarity."""


@dataclass(frozen=True)
class MatchTIR(GroupCredit):
    """Mean of an episode and a turn advantage, with rewards for tool calls that match the task's gold calls.

        A_it = (A_i + A'_it) / 2,   r_it = mean match of its calls + reward
        A_i = (S_i - mean(S)) / (std(S) + 1e-6),   S_i = sum_t r_it
        A'_it = (G_it - mean_t(G)) / (std_t(G) + 1e-6),   G_it = sum_k lam^(k - t) r_ik

    mean_t and std_t are over the trajectories of the group that have a turn t. The similarity of two calls is
    `call_similarity` of `perturn.episodes.tool_calls`.

    Source: Qu et al. 2026, "MatchTIR: Fine-Grained Supervision for Tool-Integrated Reasoning via Bipartite Matching",
    arXiv:2601.10712, by its abstract and its code (a copy, CyberSculptor96/MatchTIR at 02ee2a5: `tool.py` and
    `core_algos.py`), not by its equations.
    Differs: `hard` finds the largest sum. The authors' function named Hungarian matches greedily, as `greedy` does. The
    code adds the F1 of a final answer to the reward of its turn, ignores calls next to an answer, and has no other
    outcome. Here a turn's reward also contains the environment's reward. A malformed action counts as one call that
    matches nothing; the code stops at such an action or ignores it. In the code, a turn index that no other trajectory
    reached keeps its return as advantage, and a trajectory alone keeps its score, as with `singleton` raw. With
    `singleton` zero both get 0. Equal values have advantage 0. A FAILED trajectory counts with rewards of 0. `baseline`
    others is Perturn's addition: RLOO and TRLOO over the same rewards.

    The credit is biased, for two reasons. First, the mean at a turn index is over the trajectories that reached it,
    which depends on their actions. Second, a later call can take the gold call of an earlier call, and the returns from
    the later turn on do not contain this loss.
    """

    assignment: Annotated[str, OneOf(ASSIGNMENTS)] = "hard"
    """Matching of calls with gold calls. hard: one to one, with the largest sum of similarities. greedy: one to one,
    the most similar pair first, as in the released code. soft: each call has a share of each gold call."""

    regularization: Annotated[float, Bound(least=1e-6, most=1e6)] = 0.1
    """Regularization of the soft assignment, in units of similarity; from 1e-6 to 1e6. A smaller value is closer to a
    one-to-one matching."""

    unmatched_penalty: Annotated[float, Bound(least=0, most=1e6)] = 0.0
    """Penalty of a call without a match, in units of similarity; >= 0. The default of the authors' function is 0.5, but
    their training uses 0. The soft assignment ignores it, since every call has a share there."""

    lam: Annotated[float, Bound(above=0, most=1)] = 0.9
    """Discount from one turn to the next in G, in (0, 1]; `lam` in the code. S is not discounted."""

    baseline: Annotated[str, OneOf(BASELINES)] = "group"
    """Baseline. group: subtract the mean and divide by the deviation of the group, as in the paper's code. others:
    subtract the mean of the other trajectories, without division."""

    singleton: Singleton = "zero"
    """Advantage of a trajectory alone in its group and, with `baseline` group, of a turn index that no other
    trajectory reached: zero, or raw (the return, as in the code)."""

    def __post_init__(self) -> None:
        """Reject settings outside their range."""
        super().__post_init__()
        if self.baseline == "others" and self.singleton == "raw":
            raise ValueError("singleton raw keeps a score without a baseline; it goes with baseline group.")

    @property
    def needs(self) -> Needs:
        """See `Credit.needs`."""
        return (ToolMatches(self.assignment, self.regularization),)

    @property
    def traits(self) -> CreditTraits:
        """See `CreditTraits`."""
        return CreditTraits(needs_group=True, weighs_alone=self.singleton == "raw")

    def __call__(
        self, group: Sequence[Trajectory], *, tool_matches: Matches | None = None, **_: Any
    ) -> list[Tensor]:
        """Return the advantage of every turn, one tensor per trajectory [turns].

        It has no unit, or is in units of reward with `baseline` others.
        """
        rewards = self.turn_rewards(group, tool_matches)
        return weigh_tasks(group, lambda _: rewards, self._weigh, self.singleton)

    def turn_rewards(self, group: Sequence[Trajectory], matches: Matches | None) -> Numbers:
        """Return r of each turn, in units of reward `[trajectories][turns]`.

        Raises:
            ValueError: If `matches` is None or not finite, or does not have one list per turn.
        """
        if matches is None:
            raise ValueError(
                "this credit needs tool_matches=, how well each tool call of each turn matches gold calls."
            )
        if [len(of_one) for of_one in matches] != [len(one.turns) for one in group]:
            raise ValueError(
                "tool_matches must hold one list of calls for each turn of each trajectory of the group."
            )
        if not all(isfinite(call) for of_one in matches for turn in of_one for call in turn):
            raise ValueError("tool_matches must hold finite numbers.")
        return [
            rewards
            if one.status is Status.FAILED
            else [reward + self._of_calls(turn) for reward, turn in zip(rewards, calls, strict=True)]
            for one, rewards, calls in zip(group, self.returns(group), matches, strict=True)
        ]

    def _of_calls(self, matches: Sequence[float]) -> float:
        """Return the mean match of the calls of a turn, with the penalty for unmatched calls; 0 without calls."""
        lost = self.unmatched_penalty if self.assignment != "soft" else 0.0
        return mean([match if match else -lost for match in matches]) if matches else 0.0

    def _weigh(self, group: Sequence[Trajectory], rewards: Numbers) -> Numbers:
        of_trajectory, of_turn = (
            self._of_group(rewards)
            if self.baseline == "group"
            else (RLOO()._weigh(group, rewards), TRLOO(gamma=self.lam)._weigh(group, rewards))
        )
        return [
            [(whole + turn) / 2 for whole, turn in zip(*both, strict=True)]
            for both in zip(of_trajectory, of_turn, strict=True)
        ]

    def _of_group(self, rewards: Numbers) -> tuple[Numbers, Numbers]:
        """Return A_i and A'_it, normalized by the mean and deviation of the group, each `[trajectories][turns]`."""
        scores = [fsum(of_one) for of_one in rewards]
        copies = on_each_turn(scores, rewards)
        whole = episode_advantages(
            scores, copies, normalize="std", statistics="trajectories", singleton=self.singleton
        )
        return whole, self._at_index([returns_to_go(of_one, self.lam) for of_one in rewards])

    def _at_index(self, to_go: Numbers) -> Numbers:
        """Return A' of each turn: G normalized over all turns with the same index `[trajectories][turns]`."""
        turns = range(max(map(len, to_go)))
        index = [[(i, t) for i, of_one in enumerate(to_go) if len(of_one) > t] for t in turns]
        found = normalized_within(index, to_go, "std")
        for (i, t), *others in index if self.singleton == "raw" else []:
            if not others:
                found[i][t] = to_go[i][t] / (1 + EPSILON)
        return found
