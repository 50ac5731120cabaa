"""Row maker `corrections`: failures that the expert corrects from their first wrong turn on, over the failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from perturn.bounds import Bound, check_bounds
from perturn.config.row_maker_settings import Made, RowInputs, RowTraits
from perturn.config.sections import Sense
from perturn.config.signal_filter import Signals
from perturn.data.origins import actions_of, ending_at
from perturn.episodes.triage import check_signals, left_out
from perturn.needs import Distance
from perturn.remaining import wrong_turns
from perturn.rows.pairing import Paired, check_comparable, cut, exceeds, made, parting
from perturn.types import PreferencePair, Trajectory, failed, succeeded

CORRECTED = ("failed", "succeeded", "no_turns", "no_wrong_turn", "not_corrected", "identical", "gap", "kept")
"""Outcomes of an explored trajectory that may be corrected: the first that holds. `no_wrong_turn`: a limit of turns
ended it on its way; `not_corrected`: the expert did not succeed from there either."""


@dataclass(frozen=True)
class Corrections:
    """Pair each failed episode with its correction, which the expert plays from the first wrong turn on.

    Both sides share the turns before the first wrong turn; `align.shared_prefix` keeps or masks these turns in
    training. A pair is kept if the correction succeeds and total_reward(correction) - total_reward(explored) >
    threshold.

    Source: Lai et al. 2024, "Step-DPO: Step-wise Preference Optimization for Long-chain Reasoning of LLMs",
    arXiv:2406.18629 (the first wrong step against a right one, given what both share); and SCOPE, of "Recycling
    Failures: Salvaging Exploration in RLVR via Fine-Grained Off-Policy Guidance" (what follows the first error is
    replaced), both by their abstracts.
    Differs: both sides go on to the end of the episode; Step-DPO compares one step, as `one_turn` does. Corrections
    are preferred to failures; SCOPE learns from them as rollouts. The distance to a success shows the first error,
    and not a process reward model. Step-DPO's right step is the policy's own, as in row maker `progress-pairs`.
    """

    traits: ClassVar[RowTraits] = RowTraits("pairs", corrects=1)

    distance: Sense = "shortest"
    """How the distance to a success is measured, which shows the first wrong turn; see
    `perturn.envs.abilities.Pathfinder`."""
    threshold: Annotated[float, Bound(least=0)] = 0.4
    """Score gap a pair must exceed."""
    max_extra_turns: Annotated[int, Bound(least=0)] | None = None
    """Turns by which the rejected side may be longer than the correction; a longer side is cut. None: no limit."""
    length: Literal["episode", "turn"] = "episode"
    """Where both sides end: at the end of their episodes; or with one turn, the first wrong turn and the expert's
    turn."""
    signals: Signals = field(default_factory=Signals)
    """Explored episodes that are left out."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_signals(self.signals)
        if self.length == "turn" and self.max_extra_turns is not None:
            raise ValueError(
                "max_extra_turns cuts nothing with length=turn, where both sides end together; leave it out."
            )

    @property
    def needs(self) -> tuple[Distance, ...]:
        """The way to a success that is left around each turn."""
        return (Distance(self.distance),)

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the pairs, in the order of the explored episodes."""
        chosen, filtered = left_out(inputs.explored, self.signals)
        explored = inputs.measure(chosen)
        wanted = [(one, turns) for one in explored if (turns := to_correct(one)) is not None]
        pairs, counts = pair_with_corrected(
            explored,
            inputs.measure(inputs.correct(wanted)),
            self.threshold,
            max_extra_turns=self.max_extra_turns,
            one_turn=self.length == "turn",
        )
        counts.update(filtered)
        return made(parting((pairs, counts), inputs), f"rows.threshold={self.threshold:g}")


def to_correct(explored: Trajectory) -> int | None:
    """Return the number of turns before the first wrong turn of a failed episode; None if there is nothing to correct.

    Raises:
        DataError: If its remaining path was not measured.
    """
    if failed(explored) or succeeded(explored):
        return None
    wrong = wrong_turns(explored)
    return wrong.index(True) if True in wrong else None


def pair_with_corrected(
    explored: Iterable[Trajectory],
    corrections: Iterable[Trajectory],
    threshold: float = 0.4,
    *,
    max_extra_turns: int | None = None,
    one_turn: bool = False,
) -> Paired:
    """Pair each failed episode with its correction, which the expert plays from the first wrong turn on.

    See `Corrections`.

    Args:
        explored: Trajectories of the policy, with the remaining path of their turns.
        corrections: Trajectories of the same tasks and samples, of those for which `to_correct` has a number.
        threshold: tau, in units of total reward; finite and >= 0.
        max_extra_turns: Cut the rejected side to this many turns more than its correction has, as in
            `pair_with_expert`.
        one_turn: Whether both sides end with the first wrong turn and the expert's in its place; their total rewards
            still count the whole episodes.

    Returns:
        The pairs in the order of `explored`, and counts: each explored trajectory under one of `CORRECTED`, and beside
        these, under `cut`, how many of the kept ones were cut.
    """
    mended = {one.key: one for one in corrections if succeeded(one)}
    pairs: list[PreferencePair] = []
    counts = Counter(dict.fromkeys((*CORRECTED, "cut"), 0))
    for trajectory in explored:
        correction, rejected = mended.get(trajectory.key), trajectory
        if correction is not None and one_turn:
            turns = correction.taken_over + 1
            correction, rejected = ending_at(correction, turns), ending_at(trajectory, turns)
        outcome = _nothing_to_correct(trajectory) or _corrected(correction, rejected, threshold)
        counts[outcome] += 1
        if correction is not None and outcome == "kept":
            whole, rejected = rejected, cut(rejected, correction, max_extra_turns)
            counts["cut"] += rejected is not whole
            pairs.append(PreferencePair(chosen=correction, rejected=rejected))
    return pairs, counts


def _nothing_to_correct(explored: Trajectory) -> str | None:
    """Return why an explored trajectory is not corrected; None if it is to be."""
    if failed(explored):
        return "failed"
    if succeeded(explored):
        return "succeeded"
    if not explored.turns:
        return "no_turns"
    return "no_wrong_turn" if to_correct(explored) is None else None


def _corrected(correction: Trajectory | None, explored: Trajectory, threshold: float) -> str:
    if correction is None:
        return "not_corrected"
    check_comparable(correction, explored)
    if actions_of(correction) == actions_of(explored):
        return "identical"
    gap = correction.total_reward - explored.total_reward
    return "kept" if exceeds(gap, threshold) else "gap"
