"""Row maker `step-pairs`: the expert's steps against the policy's own from the same turn (IPR)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Annotated, ClassVar

from perturn.extend import (
    ANY_BRANCHES,
    Bound,
    Made,
    Need,
    Paired,
    RowInputs,
    RowTraits,
    Trajectory,
    actions_of,
    best_by_task,
    bounded,
    branches_of,
    exceeds,
    failed,
    made,
    pair_with_expert,
    score,
)

STEPS = ("steps_failed", "steps_alike", "steps_gap", "steps_kept")
"""Outcomes of a step of the expert: the first that holds. `steps_failed`: no branch says what one of both is worth;
`steps_alike`: all took the expert's step; `steps_gap`: it is not clearly better."""


@dataclass(frozen=True)
@bounded
class StepPairs:
    """Pair the expert with explored episodes, as `ExpertPairs`, and each step of the expert with a worse step.

    A step is the expert's turns from one branching turn to the next. Its value is

        v_expert(t) = mean score of the branches from the turn after it; after the last, the expert's own
        v_policy(t) = mean score of the branches from the turn before it whose step is another

    The step gives a pair if v_expert(t) - v_policy(t) > threshold. The chosen side is the expert's episode, and the
    rejected side is the worst branch of v_policy. Both share the first t turns, and the expert's total reward must be
    higher by more than the threshold.

    Source: Xiong et al. 2024, "Watch Every Step! LLM Agent Learning via Iterative Step-Level Process Refinement" (IPR),
    arXiv:2406.11176, and its published code (tau = 0.5).
    Differs: the paper samples one step of the policy at each turn, and branches after it as after the expert's step.
    Here the branches that begin before the step give both samples and value, so v_policy is the mean over the
    policy's other steps, and nothing is played twice. The worst of these branches is rejected; in the paper, the
    sampled step is. One threshold is used for both kinds of pairs; the paper's code has 0.01 for whole episodes. If
    the policy is better, the paper's code chooses the policy's episode; here there is no pair, as in
    `pair_with_expert`.
    """

    traits: ClassVar[RowTraits] = RowTraits(
        "pairs", expert=True, branches=frozenset({"expert-branches"}), takes=ANY_BRANCHES
    )
    needs: ClassVar[tuple[Need, ...]] = ()

    threshold: Annotated[float, Bound(least=0)] = 0.4
    """Gap that a pair must exceed, in total reward and in the value of a step; the paper has 0.5."""
    max_extra_turns: Annotated[int, Bound(least=0)] | None = None
    """Turns by which the rejected side may be longer than the expert's episode; a longer side is cut. None: no
    limit."""

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the pairs of whole episodes, and then the pairs of steps."""
        tasks = {one.task.id for one in inputs.explored}
        experts = [one for one in inputs.experts if one.task.id in tasks]
        pairs, counts = pair_with_expert_steps(
            experts, inputs.explored, inputs.branches, self.threshold, max_extra_turns=self.max_extra_turns
        )
        # Cut where both sides are still the same, they would be no pair.
        cut = inputs.limit.too_long([pair.rejected for pair in pairs if pair.rejected.origin is not None])
        counts["steps_too_long"] = len(cut)
        counts["steps_kept"] -= len(cut)
        left = [pair for pair in pairs if pair.rejected.key not in cut]
        return made((left, counts), f"rows.threshold={self.threshold:g}")


def pair_with_expert_steps(
    experts: Iterable[Trajectory],
    explored: Iterable[Trajectory],
    branches: Iterable[Trajectory],
    threshold: float = 0.5,
    *,
    max_extra_turns: int | None = None,
) -> Paired:
    """Pair the expert with explored episodes, as `pair_with_expert`, and each step of his with a worse one.

    See `StepPairs`.

    Args:
        experts: Trajectories of an expert; of each task the best one counts.
        explored: Trajectories of the policy.
        branches: Branches from turns of the best ones. FAILED branches are left out, since the
            environment or the engine broke them off: they say nothing of what a turn is worth.
        threshold: tau, in units of total reward; finite and >= 0.
        max_extra_turns: Cut the rejected side to this many turns more than the expert has, as in `pair_with_expert`.

    Returns:
        The pairs of whole episodes in the order of `explored`, then the pairs of steps, by task and turn; and the
        counts of `pair_with_expert`, each step under one of `STEPS`, and under `steps_cut` how many of the kept were
        cut.
    """
    best = best_by_task(experts)
    pairs, counts = pair_with_expert(best.values(), explored, threshold, max_extra_turns=max_extra_turns)
    counts |= dict.fromkeys((*STEPS, "steps_cut"), 0)
    walked = [best[task] for task in sorted(best)]
    for expert, by_turn in zip(walked, branches_of(walked, branches), strict=True):
        for turn, after in pairwise([*sorted(by_turn), len(expert.turns)]):
            outcome, rejected = _compare(expert, turn, after, by_turn, threshold)
            found, how = pair_with_expert([expert], rejected, threshold, max_extra_turns=max_extra_turns)
            counts["steps_gap" if rejected and not found else outcome] += 1
            counts["steps_cut"] += how["cut"]
            pairs += found
    return pairs, counts


def _compare(
    expert: Trajectory, turn: int, after: int, by_turn: Mapping[int, Sequence[Trajectory]], threshold: float
) -> tuple[str, list[Trajectory]]:
    """Return the outcome of the expert's step from a turn to another, and the branch rejected for it, if any."""
    there, beyond = (
        [one for one in by_turn.get(each, ()) if len(one.turns) > each and not failed(one)]
        for each in (turn, after)
    )
    is_last = after == len(expert.turns)
    if not there or not (beyond or is_last):
        return "steps_failed", []
    step = actions_of(expert)[turn:after]
    others = [one for one in there if actions_of(one)[turn:after] != step]
    if not others:
        return "steps_alike", []
    worth = expert.total_reward if is_last else fmean(map(score, beyond))
    if not exceeds(worth - fmean(map(score, others)), threshold):
        return "steps_gap", []
    return "steps_kept", [min(others, key=score)]
