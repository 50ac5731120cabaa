"""Row maker `file`: rows of the user's own."""

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
    """Rows of your own: pairs, trajectories or conversations, or these with a label or weights (docs: Your data).

    Source: none is needed.
    Differs: nothing.
    """

    needs: ClassVar[tuple[Need, ...]] = ()

    path: Annotated[str, ROWS]
    """A file or folder of rows, or owner/name:split of the Hub."""
    holds: Literal["pairs", "single", "labelled"] = "pairs"
    """Kind of the rows: pairs, which have `chosen` and `rejected`; single trajectories or conversations; or labelled
    rows, with a label or with weights whose sign is the label."""

    @property
    def traits(self) -> RowTraits:
        """Nothing is explored; single rows name the policy, since a loss such as sft does so already."""
        return RowTraits(self.holds, explored=False, names_policy=self.holds != "pairs", source=self.path)

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the rows as they are, in order."""
        rows = [weighted(row) if isinstance(row, Trajectory) else row for row in inputs.given]
        return Made(rows, {"kept": len(rows)})
