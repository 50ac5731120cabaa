"""Row maker `step-pairs`: pairs of an expert's step and a worse step of the policy from the same turn (IPR)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Annotated, ClassVar

from perturn.extend import (
    ANY_BRANCHES,
    NOT_NEGATIVE,
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
    parting,
    score,
)

STEPS = ("steps_failed", "steps_alike", "steps_gap", "steps_kept")
"""Outcomes of a step of the expert; only the first outcome that applies is counted. `steps_failed`: every branch that
starts before the step, or every branch that starts after it, FAILED. `steps_alike`: all branches took the expert's
step. `steps_gap`: the expert's step is not clearly better."""


@dataclass(frozen=True)
@bounded
class StepPairs:
    """Pair the expert with explored episodes, as `ExpertPairs`, and each step of the expert with a worse step.

    A step consists of the expert's turns from one branching turn t to the next. Two values are compared:

        v_expert(t) = mean score of the branches that start after the step; after the last step, the expert's score
        v_policy(t) = mean score of the branches that start at turn t and take another step

    The step gives a pair if v_expert(t) - v_policy(t) > threshold. The chosen side is the expert's episode, and the
    rejected side is the worst branch of v_policy. Both share the first t turns. The expert's total reward must be
    higher than the branch's by more than the threshold too.

    Source: Xiong et al. 2024, "Watch Every Step! LLM Agent Learning via Iterative Step-Level Process Refinement" (IPR),
    arXiv:2406.11176, and its published code (tau = 0.5).
    Differs: at each turn, the paper samples one step of the policy, and branches after this step and after the expert's
    step. Here the branches that start before the step provide the policy's steps and their value. So v_policy is a mean
    over several steps, and no extra episodes are needed. The worst of these branches is rejected; the paper rejects the
    sampled step. Both kinds of pairs have one threshold; the paper's code has 0.01 for whole episodes. If the policy is
    better, the paper's code chooses the policy's episode; here there is no pair, as in `pair_with_expert`.
    """

    traits: ClassVar[RowTraits] = RowTraits(
        "pairs", expert=True, branches=frozenset({"expert-branches"}), takes=ANY_BRANCHES
    )
    needs: ClassVar[tuple[Need, ...]] = ()

    threshold: Annotated[float, NOT_NEGATIVE] = 0.4
    """Difference that a pair must exceed, in total reward and in the value of a step, in units of reward; >= 0. The
    paper uses 0.5."""
    max_extra_turns: Annotated[int, Bound(least=0)] | None = None
    """Maximum number of turns by which the rejected side may exceed the expert's episode. A longer side is cut at
    its end. None: no limit."""

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the pairs of whole episodes, followed by the pairs of steps."""
        tasks = {one.task.id for one in inputs.explored}
        experts = [one for one in (*inputs.begun, *inputs.experts) if one.task.id in tasks]
        pairs, counts = pair_with_expert_steps(
            experts, inputs.explored, inputs.branches, self.threshold, max_extra_turns=self.max_extra_turns
        )
        episodes = [pair for pair in pairs if pair.rejected.origin is None]
        steps = [pair for pair in pairs if pair.rejected.origin is not None]
        episodes, counts = parting((episodes, counts), inputs)
        steps, counts = parting((steps, counts), inputs, prefix="steps_")
        return made(([*episodes, *steps], counts), f"rows.threshold={self.threshold:g}")


def pair_with_expert_steps(
    experts: Iterable[Trajectory],
    explored: Iterable[Trajectory],
    branches: Iterable[Trajectory],
    threshold: float = 0.5,
    *,
    max_extra_turns: int | None = None,
) -> Paired:
    """Pair the expert with explored episodes, as `pair_with_expert`, and each step of the expert with a worse step.

    See `StepPairs`.

    Args:
        experts: Trajectories of an expert; the best trajectory of each task is used.
        explored: Trajectories of the policy.
        branches: Branches of the expert's best trajectories. FAILED branches are left out: the environment or the
            engine raised an error, so their scores are no estimate of a turn's value.
        threshold: Difference that a pair must exceed, in units of reward; finite and >= 0.
        max_extra_turns: Maximum number of turns by which the rejected side may exceed the expert's trajectory.
            None: no limit.

    Returns:
        The pairs of whole episodes in the order of `explored`, followed by the pairs of steps, ordered by task and
        turn; and the counts of `pair_with_expert`, with the number of steps for each outcome of `STEPS`, and the number
        of cut rejected sides of steps under `steps_cut`.
    """
    best = best_by_task(experts)
    pairs, counts = pair_with_expert(best.values(), explored, threshold, max_extra_turns=max_extra_turns)
    counts |= dict.fromkeys((*STEPS, "steps_cut", "steps_too_long"), 0)
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
    """Return the outcome of the expert's step from `turn` to `after`, and the rejected branch, or an empty list."""
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
