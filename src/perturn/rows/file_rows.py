"""Row maker `file`: rows from the user's file or dataset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from perturn.bounds import ROWS
from perturn.config.row_maker_settings import Made, RowInputs, RowTraits
from perturn.needs import Need
from perturn.rows.endings import weighted
from perturn.types import Trajectory


@dataclass(frozen=True)
class FileRows:
    """Rows from a file: pairs, trajectories or conversations, optionally with a label or weights (docs: Your data).

    Source: none.
    Differs: nothing.
    """

    needs: ClassVar[tuple[Need, ...]] = ()

    path: Annotated[str, ROWS]
    """File or folder of rows, or a dataset of the Hub as owner/name:split."""
    holds: Literal["pairs", "single", "labelled"] = "pairs"
    """Kind of the rows. pairs: rows with `chosen` and `rejected`. single: trajectories or conversations. labelled:
    trajectories or conversations with a label, or with weights whose sign is the label."""

    @property
    def traits(self) -> RowTraits:
        """Traits of the rows. A policy trained on single rows is named after the row maker, since "sft" is taken."""
        return RowTraits(self.holds, explored=False, names_policy=self.holds != "pairs", source=self.path)

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the given rows in order; a trajectory without weights gets weight 1 at each turn."""
        rows = [weighted(row) if isinstance(row, Trajectory) else row for row in inputs.given]
        return Made(rows, {"kept": len(rows)})
