"""Row maker `nat`: all episodes, with a text in each prompt that says whether the episode succeeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perturn.extend import (
    Made,
    Need,
    RowInputs,
    RowTraits,
    SuffixRows,
    divide,
    suffixed,
    suffixed_successes,
    weighted,
)


@dataclass(frozen=True)
class NatRows(SuffixRows):
    """All episodes with weight 1, and with a text after the task that says whether the episode succeeds.

    Source: NAT, Wang et al. 2024, "Learning From Failure: Integrating Negative Examples when Fine-tuning Large
    Language Models as Agents", arXiv:2402.11651: a suffix to the query says whether a trajectory is positive or
    negative, the loss is on the actions of both, and at inference the positive suffix is used.
    Differs: the expert's episodes are positive rows too. The texts are Perturn's, since the paper's texts are about
        answers to questions.
    """

    needs: ClassVar[tuple[Need, ...]] = ()

    @property
    def traits(self) -> RowTraits:
        """Traits of the rows, including the texts that say whether an episode succeeds."""
        return RowTraits(
            "single", expert=True, starts_over=True, names_policy=True, suffixes=(self.success, self.failure)
        )

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the successes, followed by the failures."""
        divided = divide(inputs, starts_over=True, suffixes=(self.success, self.failure))
        if not divided.failures:
            return Made([], divided.counts, "none is a failure")
        bad = [weighted(suffixed(one, self.failure)) for one in divided.failures]
        return Made([*suffixed_successes(divided, self.success), *bad], divided.counts)
