"""Row maker `group-pairs`: pairs of the policy's best (chosen) and worst (rejected) episode of a task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from perturn.bounds import Bound, check_bounds
from perturn.config.row_maker_settings import Made, RowInputs, RowTraits
from perturn.config.sections import COUNT
from perturn.config.signal_filter import Signals
from perturn.episodes.triage_signals import check_signals, left_out
from perturn.needs import Need
from perturn.rows.pairing import made, pair_within_groups, parting, starting


@dataclass(frozen=True)
class GroupPairs:
    """Pair the best episode of each task with its worst, the second best with the second worst, and so on.

    A pair is kept if total_reward(best) - total_reward(worst) > threshold. Among equal rewards, the episode with the
    lower sample number comes first.

    Source: Perturn, for online learning; the condition comes from tlm-DRE, Appendix B.
    Differs: in the paper, the chosen side is an expert's trajectory.
    """

    traits: ClassVar[RowTraits] = RowTraits("pairs", several_samples=True)
    needs: ClassVar[tuple[Need, ...]] = ()

    threshold: Annotated[float, Bound(least=0)] = 0.4
    """Difference in total reward that a pair must exceed, in units of reward; >= 0."""
    per_group: Annotated[int, COUNT] | None = 1
    """Maximum number of pairs of a task. None: as many as possible, with each episode in one pair."""
    signals: Signals = field(default_factory=Signals)
    """Filter of explored episodes by their signals, such as a loop; filtered episodes are left out."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_signals(self.signals)

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the pairs, ordered by task and by decreasing difference in reward."""
        chosen, filtered = left_out(inputs.explored, self.signals)
        fitting = starting(chosen, inputs)
        pairs, counts = pair_within_groups(fitting, self.threshold, per_group=self.per_group)
        counts["too_long"] = len(chosen) - len(fitting)
        counts.update(filtered)
        return made(parting((pairs, counts), inputs, each=2), f"rows.threshold={self.threshold:g}")
