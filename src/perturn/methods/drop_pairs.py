"""Row maker `drop-pairs`: pairs of a better branch and a step that lowered the chance of success."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Annotated, ClassVar, Literal

from perturn.extend import (
    ANY_BRANCHES,
    NOT_NEGATIVE,
    Made,
    Need,
    Paired,
    PreferencePair,
    RowInputs,
    RowTraits,
    Trajectory,
    actions_of,
    bounded,
    branches_of,
    exceeds,
    failed,
    made,
    pair_ending,
    paired_within_branches,
    score,
)

DROPS = ("failed", "no_drop", "identical", "gap", "kept")
"""Outcomes of a step of an explored episode; only the first outcome that applies is counted. `failed`: every branch
that starts before the step, or every branch that starts after it, FAILED. `no_drop`: the mean score did not drop
clearly. `identical`: all branches took the same step. `gap`: no branch with another step ended clearly better."""


@dataclass(frozen=True)
@bounded
class DropPairs:
    """Pair each step that lowered an episode's chance of success with a better step from the same turn.

    A step consists of an episode's turns from one branching turn to the next. It gives a pair if

        v(t) - v(t') > threshold,    v(t) = mean score of the branches from turn t,

    where t' is the turn after the step, and v after the last step is the score of the episode. The chosen side is the
    best branch from turn t that took another step. Its score must exceed the score of the episode by the threshold too.

    Source: Setlur et al. 2024, "RL on Incorrect Synthetic Data Scales the Efficiency of LLM Math Reasoning by
    Eight-Fold", arXiv:2406.14532, by its abstract: the advantage of each step of a failure decides which step is
    rejected.
    Differs: the choice of the chosen side, the number of branches per turn, and the threshold are Perturn's.
    """

    needs: ClassVar[tuple[Need, ...]] = ()

    threshold: Annotated[float, NOT_NEGATIVE] = 0.4
    """Threshold that two numbers must exceed, in units of reward; >= 0: the drop of the mean score at a step, and the
    score difference of a pair."""
    length: Literal["episode", "turn"] = "episode"
    """Last turn of both sides. episode: the last turn of the episode. turn: the turn in which the two sides differ. In
    a longer step, any turn may have lowered the chance, so `turn` needs branches from each turn."""

    @property
    def traits(self) -> RowTraits:
        """Traits of the rows: they need branches at regular turns, or, with `length` turn, at each turn."""
        branches = frozenset({"turn-branches" if self.length == "turn" else "regular-branches"})
        return RowTraits("pairs", branches=branches, takes=ANY_BRANCHES)

    def __call__(self, inputs: RowInputs) -> Made:
        """Return the pairs, ordered by explored episode and turn."""

        def pair(begun: Sequence[Trajectory], branches: Sequence[Trajectory]) -> Paired:
            return pair_where_worth_drops(begun, branches, self.threshold, one_turn=self.length == "turn")

        found = paired_within_branches(inputs, pair, of_steps=True)
        return made(found, f"rows.threshold={self.threshold:g}")


def pair_where_worth_drops(
    explored: Sequence[Trajectory],
    branches: Iterable[Trajectory],
    threshold: float = 0.4,
    *,
    one_turn: bool = False,
) -> Paired:
    """Pair each step that lowered an episode's chance of success with a better step from the same turn.

    See `DropPairs`.

    Args:
        explored: Trajectories of the policy.
        branches: Branches of these trajectories. FAILED branches are left out: the environment or the engine raised an
            error, so their scores are no estimate of a turn's value.
        threshold: Difference that the drop of the mean score and the score difference of a pair must exceed, in units
            of reward; finite and >= 0.
        one_turn: Whether both sides end with the turn in which they differ, if each step is one turn.

    Returns:
        The pairs, ordered by explored episode and turn; and the number of steps for each outcome of `DROPS`.
    """
    pairs: list[PreferencePair] = []
    counts = Counter(dict.fromkeys(DROPS, 0))
    for one, by_turn in zip(explored, branches_of(explored, branches), strict=True):
        for turn, after in _steps(one, by_turn):
            outcome, better = _compare(one, turn, after, by_turn, threshold, one_turn=one_turn)
            counts[outcome] += 1
            if better is not None:
                pairs.append(pair_ending(better, one, turn if one_turn else None))
    return pairs, counts


def _steps(one: Trajectory, by_turn: Mapping[int, object]) -> Iterator[tuple[int, int]]:
    """Yield the first turn of each step of an episode, and the turn after the step."""
    return pairwise([*sorted(by_turn), len(one.turns)])


def _compare(
    one: Trajectory,
    turn: int,
    after: int,
    by_turn: Mapping[int, Sequence[Trajectory]],
    threshold: float,
    *,
    one_turn: bool,
) -> tuple[str, Trajectory | None]:
    """Return the outcome of the step from `turn` to `after`, and the chosen branch; None: no pair."""
    there, beyond = (
        [each for each in by_turn.get(at, ()) if len(each.turns) > at and not failed(each)]
        for at in (turn, after)
    )
    is_last = after == len(one.turns)
    if not there or not (beyond or is_last):
        return "failed", None
    left = score(one) if is_last else fmean(map(score, beyond))
    if not exceeds(fmean(map(score, there)) - left, threshold):
        return "no_drop", None
    taken = slice(turn, turn + 1 if one_turn else after)
    step = actions_of(one)[taken]
    others = [each for each in there if actions_of(each)[taken] != step]
    if not others:
        return "identical", None
    best = max(others, key=score)
    return ("kept", best) if exceeds(score(best) - score(one), threshold) else ("gap", None)
