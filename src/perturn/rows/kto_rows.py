"""Row maker `kto`: successes labelled as desirable and failures as undesirable, for the loss kto."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perturn.config.row_maker_settings import Made, RowInputs, RowTraits
from perturn.needs import Need
from perturn.rows.endings import Divided, divide, weighted


@dataclass(frozen=True)
class KtoRows:
    """Successes with weight 1 and failures with weight -1. The expert's episodes on explored tasks are successes too.

    Source: Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization", arXiv:2402.01306,
    Section 4: outputs are labelled as desirable or undesirable, and need not share prompts.
    Differs: the labels come from the environment, and the expert's episodes are desirable too.
    """

    traits: ClassVar[RowTraits] = RowTraits("labelled", expert=True, names_policy=True)
    needs: ClassVar[tuple[Need, ...]] = ()

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the successes, followed by the failures."""
        divided = divide(inputs, starts_over=False)
        good = [*divided.experts, *divided.successes]
        rows = [*map(weighted, good), *(weighted(one, -1.0) for one in divided.failures)]
        lacks = lacking(divided)
        return Made([] if lacks else rows, divided.counts, lacks)


def lacking(divided: Divided) -> str:
    """Return a text that says what is missing: a failure, a success, or a second task; empty if nothing is."""
    good = (*divided.experts, *divided.successes)
    tasks = {one.task.id for one in (*good, *divided.failures)}
    lacks = {
        "none is a failure": not divided.failures,
        "none is a success": not good,
        "all are of one task": len(tasks) < 2,
    }
    return next((says for says, holds in lacks.items() if holds), "")
