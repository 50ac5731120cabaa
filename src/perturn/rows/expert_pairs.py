"""Row maker `expert-pairs`: the expert's episode over the policy's own of the same task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from perturn.bounds import Bound, check_bounds
from perturn.config.row_maker_settings import Made, RowInputs, RowTraits
from perturn.config.signal_filter import Signals
from perturn.episodes.triage import check_signals, left_out
from perturn.needs import Need
from perturn.rows.pairing import made, pair_with_expert


@dataclass(frozen=True)
class ExpertPairs:
    """Pair each explored episode with the expert's of its task, where the expert's is clearly better.

    A pair is kept if

        total_reward(expert) - total_reward(explored) > threshold,

    with differences of rounding error taken as none.

    Source: tlm-DRE, Appendix B (tau = 0.4), on the pairs of ETO: Song et al. 2024, "Trial and Error:
    Exploration-Based Trajectory Optimization for LLM Agents", arXiv:2403.02502.
    Differs: ETO has no threshold and, where the explored trajectory is the better one, makes it chosen; here
    that is counted and dropped, since the expert's is the distribution to learn.
    """

    traits: ClassVar[RowTraits] = RowTraits("pairs", expert=True)
    needs: ClassVar[tuple[Need, ...]] = ()

    threshold: Annotated[float, Bound(least=0)] = 0.4
    """Score gap a pair must exceed (tau, tlm-DRE Appendix B); 0 keeps every gap."""
    max_extra_turns: Annotated[int, Bound(least=0)] | None = None
    """Cut the rejected side to the expert's number of turns plus this many; ETO and DMPO take 5. None: never."""
    signals: Signals = field(default_factory=Signals)
    """Explored episodes that are left out."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_signals(self.signals)

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the pairs, in the order of the explored episodes."""
        chosen, filtered = left_out(inputs.explored, self.signals)
        extra = self.max_extra_turns
        pairs, counts = pair_with_expert(inputs.experts, chosen, self.threshold, max_extra_turns=extra)
        counts.update(filtered)
        return made((pairs, counts), f"rows.threshold={self.threshold:g}")
