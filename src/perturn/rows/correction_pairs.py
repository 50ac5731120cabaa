"""Row maker `corrections`: pairs of a failed episode and the expert's correction from the first wrong turn on."""

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
from perturn.episodes.triage_signals import check_signals, left_out
from perturn.needs import Distance
from perturn.remaining import wrong_turns
from perturn.rows.pairing import Paired, check_comparable, cut, exceeds, made, parting
from perturn.types import PreferencePair, Trajectory, failed, succeeded

CORRECTED = ("failed", "succeeded", "no_turns", "no_wrong_turn", "not_corrected", "identical", "gap", "kept")
"""Outcomes of an explored trajectory; only the first outcome that applies is counted. `no_wrong_turn`: the turn limit
ended the episode, and no turn was wrong. `not_corrected`: the expert did not succeed either."""


@dataclass(frozen=True)
class Corrections:
    """Pair each failed episode with its correction, which the expert plays from the first wrong turn on.

    Both sides share the turns before the first wrong turn; `align.shared_prefix` keeps or masks these turns in
    training. A pair is kept if the correction succeeds and total_reward(correction) - total_reward(explored) >
    threshold.

    Source: Lai et al. 2024, "Step-DPO: Step-wise Preference Optimization for Long-chain Reasoning of LLMs",
    arXiv:2406.18629 (compare the first wrong step with a right step, after the same earlier steps); and SCOPE, of
    "Recycling Failures: Salvaging Exploration in RLVR via Fine-Grained Off-Policy Guidance" (replace the steps from the
    first error on), both by their abstracts.
    Differs: both sides continue to the end of the episode; Step-DPO compares one step, as `length` turn does. A
    correction is preferred to its failure; SCOPE trains on corrections as rollouts. The first error is found by the
    distance to success, not by a process reward model. Step-DPO's right step comes from the policy, as in the row maker
    `progress-pairs`.
    """

    traits: ClassVar[RowTraits] = RowTraits("pairs", corrects=1)

    distance: Sense = "shortest"
    """Measure of the distance to a success, by which the first wrong turn is found; see
    `perturn.envs.abilities.Pathfinder`."""
    threshold: Annotated[float, Bound(least=0)] = 0.4
    """Difference in total reward that a pair must exceed, in units of reward; >= 0."""
    max_extra_turns: Annotated[int, Bound(least=0)] | None = None
    """Maximum number of turns by which the rejected side may exceed the correction. A longer side is cut at its
    end. None: no limit."""
    length: Literal["episode", "turn"] = "episode"
    """Last turn of both sides. episode: the last turn of the episode. turn: the first wrong turn, and the expert's turn
    in its place."""
    signals: Signals = field(default_factory=Signals)
    """Filter of explored episodes by their signals, such as a loop; filtered episodes are left out."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_signals(self.signals)
        if self.length == "turn" and self.max_extra_turns is not None:
            raise ValueError(
                "max_extra_turns cuts nothing with length=turn, where both sides end together; leave it out."
            )

    @property
    def needs(self) -> tuple[Distance, ...]:
        """Distance to a success around each turn."""
        return (Distance(self.distance),)

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the pairs in the order of the explored episodes."""
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
    """Return the number of turns before the first wrong turn of an unsuccessful episode; None: nothing to correct.

    Raises:
        DataError: If the distance to a success was not measured.
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
    """Pair each failed episode with its correction by the expert; see `Corrections`.

    Args:
        explored: Trajectories of the policy, with the measured distance to a success.
        corrections: Corrections, each with the task and the sample number of its explored trajectory.
        threshold: Difference in total reward that a pair must exceed, in units of reward; finite and >= 0.
        max_extra_turns: Maximum number of turns by which the rejected side may exceed the correction. None: no
            limit.
        one_turn: Whether both sides end with the first wrong turn, and the expert's turn in its place. Their total
            rewards still count the whole episodes.

    Returns:
        The pairs in the order of `explored`; and the number of explored trajectories for each outcome of `CORRECTED`,
        with the number of cut rejected sides under `cut`.
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
    """Return the outcome of an explored trajectory that needs no correction; None if it needs a correction."""
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
