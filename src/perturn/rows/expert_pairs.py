"""Row maker `expert-pairs`: pairs of the expert's episode (chosen) and the policy's episode (rejected) of a task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from perturn.bounds import Bound, check_bounds
from perturn.config.row_maker_settings import Made, RowInputs, RowTraits
from perturn.config.signal_filter import Signals
from perturn.episodes.triage_signals import check_signals, left_out
from perturn.needs import Need
from perturn.rows.pairing import made, pair_with_expert, parting


@dataclass(frozen=True)
class ExpertPairs:
    """Pair each explored episode with the expert's episode of its task, if the expert's episode is clearly better.

    A pair is kept if

        total_reward(expert) - total_reward(explored) > threshold,

    where a difference as small as a rounding error counts as 0.

    Source: tlm-DRE, Appendix B (tau = 0.4), on the pairs of ETO: Song et al. 2024, "Trial and Error:
    Exploration-Based Trajectory Optimization for LLM Agents", arXiv:2403.02502.
    Differs: ETO has no threshold, and takes the explored trajectory as chosen side if it is better. Here such a
    trajectory is counted and dropped, since the policy should learn the expert's distribution.
    """

    traits: ClassVar[RowTraits] = RowTraits("pairs", expert=True)
    needs: ClassVar[tuple[Need, ...]] = ()

    threshold: Annotated[float, Bound(least=0)] = 0.4
    """Difference in total reward that a pair must exceed, in units of reward; >= 0 (tau of tlm-DRE, Appendix B). At 0
    every positive difference is kept."""
    max_extra_turns: Annotated[int, Bound(least=0)] | None = None
    """Maximum number of turns by which the rejected side may exceed the expert's episode. A longer side is cut at
    its end. ETO and DMPO use 5. None: no limit."""
    signals: Signals = field(default_factory=Signals)
    """Filter of explored episodes by their signals, such as a loop; filtered episodes are left out."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_signals(self.signals)

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the pairs in the order of the explored episodes."""
        chosen, filtered = left_out(inputs.explored, self.signals)
        extra = self.max_extra_turns
        pairs, counts = pair_with_expert(inputs.experts, chosen, self.threshold, max_extra_turns=extra)
        counts.update(filtered)
        return made(parting((pairs, counts), inputs), f"rows.threshold={self.threshold:g}")
