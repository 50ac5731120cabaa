"""Row maker `groups`: all episodes of each task, which a credit compares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from perturn.config.row_maker_settings import ANY_BRANCHES, Made, RowInputs, RowTraits
from perturn.config.signal_filter import Signals
from perturn.episodes.triage_signals import check_signals, left_out
from perturn.needs import Need
from perturn.types import came_back


@dataclass(frozen=True)
class GroupRows:
    """Group of all episodes of each task. A credit computes weights by comparing them, and a loss uses the weights.

    Source: the groups of GRPO: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300.
    Differs: rows are trajectories. Each episode is counted in one of `perturn.data.group_account.BINS`.
    """

    needs: ClassVar[tuple[Need, ...]] = ()

    drop_equal_outcomes: bool = False
    """Whether to leave out groups whose trajectories all have the same total reward and success. Their credit can
    differ from 0, for example because of a penalty on invalid actions. Groups with credit 0 are always left out."""
    failed: Literal["leave_out", "zero"] = "leave_out"
    """Whether a FAILED episode, in which the environment or the engine raised an error, counts in the statistics of its
    group: leave_out (no) or zero (with score 0). It is never trained on."""
    signals: Signals = field(default_factory=Signals)
    """Filter of episodes by their signals, such as a loop. Filtered episodes count in the statistics of their group,
    but are not trained on."""

    def __post_init__(self) -> None:
        check_signals(self.signals)

    @property
    def traits(self) -> RowTraits:
        """Traits of the rows. With `drop_equal_outcomes`, the explorer may leave no episode unfinished."""
        takes = {*ANY_BRANCHES, "cut-branches", *([] if self.drop_equal_outcomes else ["unfinished"])}
        return RowTraits(
            "groups",
            takes=frozenset(takes),
            failed=self.failed,
            drop_equal_outcomes=self.drop_equal_outcomes,
        )

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the members of all groups: explored episodes, and their branches."""
        members = [*inputs.explored, *filter(came_back, inputs.branches)]
        chosen, _ = left_out(members, self.signals)
        kept = {one.key for one in chosen}
        return Made(members, filtered={one.key for one in members if one.key not in kept})
