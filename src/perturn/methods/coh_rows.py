"""Row maker `coh`: chain of hindsight, a failure followed by a success of the same task in one conversation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from perturn.extend import (
    Made,
    Need,
    RowInputs,
    RowTraits,
    SuffixRows,
    Trajectory,
    divide,
    suffixed,
    suffixed_successes,
    weighted,
)


@dataclass(frozen=True)
class CohRows(SuffixRows):
    """Successes, and failures followed by a success of their task; a text says whether each episode succeeds.

    A failure and the success after it form one conversation. The success is the expert's episode, or else the policy's
    first success. A failure is a row alone if its task has no success, if the success is not one linear text, or if
    both episodes exceed the length limit.

    Source: CoH, Liu et al. 2023, "Chain of Hindsight Aligns Language Models with Feedback", arXiv:2302.02676: outputs
    stand in one sequence, each after a feedback text, and the loss is on all outputs and not on the feedback. At
    inference, the feedback text of good outputs is used. As in the authors' code, training also has single outputs with
    their feedback.
    Differs: the paper ranks answers of one turn, and no paper says how CoH became a baseline for agents. Perturn makes
    four choices: a failure always comes first; there is one wording, `success` and `failure`; past tokens are not
    masked at random; and the expert's episodes replace the pretraining term.
    """

    needs: ClassVar[tuple[Need, ...]] = ()

    @property
    def traits(self) -> RowTraits:
        """Traits of the rows, including the texts that say whether an episode succeeds."""
        suffixes = self.success, self.failure
        return RowTraits(
            "single", expert=True, starts_over=True, names_policy=True, suffixes=suffixes, needs_history=True
        )

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the successes, followed by the failures."""
        divided = divide(inputs, starts_over=True, suffixes=(self.success, self.failure))
        if not divided.failures:
            return Made([], divided.counts, "none is a failure")
        good = {one.task.id: one for one in reversed((*divided.experts, *divided.successes))}
        rows = suffixed_successes(divided, self.success)
        for one in divided.failures:
            after, alone = good.get(one.task.id), suffixed(one, self.failure)
            both = _chain(alone, suffixed(after, self.success)) if after and after.is_linear else None
            rows.append(weighted(both if both is not None and inputs.limit.whole(both) else alone))
        return Made(rows, divided.counts)


def _chain(bad: Trajectory, good: Trajectory) -> Trajectory:
    """Return a failure and a success of a task as one conversation."""
    return replace(good, turns=(*bad.turns, *good.turns))
