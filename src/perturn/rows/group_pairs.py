"""Row maker `group-pairs`: the policy's best episode of a task over its worst."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from perturn.bounds import Bound, check_bounds
from perturn.config.row_maker_settings import Made, RowInputs, RowTraits
from perturn.config.sections import COUNT
from perturn.config.signal_filter import Signals
from perturn.episodes.triage import check_signals, left_out
from perturn.needs import Need
from perturn.rows.pairing import made, pair_within_groups, starting


@dataclass(frozen=True)
class GroupPairs:
    """Pair the best episode of each task with its worst, the second best with the second worst, and so on.

    A pair is kept if total_reward(best) - total_reward(worst) > threshold. Among equal rewards, the episode with the
    lower sample number comes first.

    Source: Perturn, for online learning; the condition comes from tlm-DRE, Appendix B.
    Differs: the paper's chosen side is an expert's trajectory.
    """

    traits: ClassVar[RowTraits] = RowTraits("pairs", several_samples=True)
    needs: ClassVar[tuple[Need, ...]] = ()

    threshold: Annotated[float, Bound(least=0)] = 0.4
    """Score gap a pair must exceed."""
    per_group: Annotated[int, COUNT] | None = 1
    """Pairs of a task, at most; None: as many as there are, each episode in one."""
    signals: Signals = field(default_factory=Signals)
    """Explored episodes that are left out."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_signals(self.signals)

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the pairs, by task and then by gap, largest first."""
        chosen, filtered = left_out(inputs.explored, self.signals)
        fitting = starting(chosen, inputs)
        pairs, counts = pair_within_groups(fitting, self.threshold, per_group=self.per_group)
        counts["too_long"] = len(chosen) - len(fitting)
        counts.update(filtered)
        return made((pairs, counts), f"rows.threshold={self.threshold:g}")
