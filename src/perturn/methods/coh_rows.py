"""Row maker `coh`: as `nat`, but a failure stands before a success of its task, in one conversation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from perturn.extend import (
    Made,
    Need,
    RowInputs,
    RowTraits,
    ToldRows,
    Trajectory,
    divide,
    told,
    told_successes,
    weighted,
)


@dataclass(frozen=True)
class CohRows(ToldRows):
    """All episodes, each told whether it succeeds; a failure stands before a success of its task in one conversation.

    The success is the expert's episode, or else the policy's first success. A failure is trained alone if its task
    has no success, or if both together exceed the length limit.

    Source: CoH, Liu et al. 2023, "Chain of Hindsight Aligns Language Models with Feedback", arXiv:2302.02676: outputs
    stand in one sequence with words of feedback before each, and the loss is on all outputs and not on those words. At
    inference the words of the good episodes are used. As in the authors' code, single outputs with their words are
    taught too.
    Differs: the paper ranks answers of one turn, and no paper says how CoH became a baseline for agents. Assumed
    here: only the order failure, then success; one wording, from `success` and `failure`; no random masking of past
    tokens; and the expert's episodes in place of the pretraining term.
    """

    needs: ClassVar[tuple[Need, ...]] = ()

    @property
    def traits(self) -> RowTraits:
        """The prompt tells the policy how its episode ends."""
        told = self.success, self.failure
        return RowTraits(
            "single", expert=True, starts_over=True, names_policy=True, told=told, needs_history=True
        )

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the successes, then the failures."""
        divided = divide(inputs, starts_over=True)
        if not divided.failures:
            return Made([], divided.counts, "none is a failure")
        good = {one.task.id: one for one in reversed((*divided.experts, *divided.successes))}
        rows = told_successes(divided, self.success)
        for one in divided.failures:
            after, alone = good.get(one.task.id), told(one, self.failure)
            both = _chain(alone, told(after, self.success)) if after and after.is_linear else None
            rows.append(weighted(both if both is not None and inputs.limit.whole(both) else alone))
        return Made(rows, divided.counts)


def _chain(bad: Trajectory, good: Trajectory) -> Trajectory:
    """Return two episodes of a task in one conversation."""
    return replace(good, turns=(*bad.turns, *good.turns))
