"""Row maker `groups`: the episodes of each task, which a credit compares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from perturn.config.row_maker_settings import ANY_BRANCHES, Made, RowInputs, RowTraits
from perturn.config.signal_filter import Signals
from perturn.episodes.triage import check_signals, left_out
from perturn.needs import Need
from perturn.types import came_back


@dataclass(frozen=True)
class GroupRows:
    """The episodes of each task: a credit compares them, and a loss on single trajectories reads its weights.

    Source: the groups of GRPO: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300.
    Differs: rows are trajectories; each episode is accounted for by one of `perturn.data.group_account.BINS`.
    """

    needs: ClassVar[tuple[Need, ...]] = ()

    drop_equal_outcomes: bool = False
    """Leave out groups whose trajectories all have the same total reward and success, even if their credit is not
    zero, for example because of a penalty on invalid actions. Groups without credit are always left out."""
    failed: Literal["leave_out", "zero"] = "leave_out"
    """How a FAILED episode, which the environment or the engine broke off, counts in the statistics of its group:
    leave_out (not at all) or zero (with score 0). It is never trained on."""
    signals: Signals = field(default_factory=Signals)
    """Episodes that count in their group's statistics and are not trained."""

    def __post_init__(self) -> None:
        check_signals(self.signals)

    @property
    def traits(self) -> RowTraits:
        """Outcomes that are compared must be known; all else is for the credit to say."""
        takes = {*ANY_BRANCHES, "cut-branches", *([] if self.drop_equal_outcomes else ["unfinished"])}
        return RowTraits(
            "groups",
            takes=frozenset(takes),
            failed=self.failed,
            drop_equal_outcomes=self.drop_equal_outcomes,
        )

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the members of the groups: explored episodes, and branches where the credit trains on them."""
        members = [*inputs.explored, *filter(came_back, inputs.branches)]
        chosen, _ = left_out(members, self.signals)
        kept = {one.key for one in chosen}
        return Made(members, filtered={one.key for one in members if one.key not in kept})
