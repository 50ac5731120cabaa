"""Compute errors of a policy by turn: whether an error makes further errors likelier, and how often it recovers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from perturn.analysis.episode_numbers import EpisodeNumbers
from perturn.stats import Estimate, cluster_interval, mean_interval, rate_interval

Kind = Literal["wrong", "invalid"]


@dataclass(frozen=True)
class TurnError:
    """One turn of an episode, as counted for the error rates."""

    episode: int
    turn: int
    """Number of the turn, from 1."""
    is_error: bool
    after_error: bool
    """Whether an earlier turn of the episode was an error."""


def error_row(episodes: Sequence[EpisodeNumbers]) -> dict[str, Any] | None:
    """Return error rates of turns before and after the first error of an episode; None if no turn was played.

    If the remaining distance to success was recorded at all turns, an error is a turn that did not shorten it.
    Otherwise, an error is an invalid turn, which broke the format or which the environment did not understand. If
    errors compound, as analyses of imitation learning assume, the error rate is higher after a first error than before.

    Source: Ross and Bagnell 2010, "Efficient Reductions for Imitation Learning", Theorem 2.1, for compounding errors.
    tlm-DRE and DMPO (arXiv:2406.14868, Section 1) assume that errors compound. Differs: compounding is measured here,
    and is not assumed.

    Args:
        episodes: Episodes of one policy. Unfinished and FAILED episodes are left out.

    Returns:
        `kind` (`wrong` or `invalid`); `before` and `after` (error rates with intervals clustered by episode; None
        without a turn); `difference` (after minus before); `by_turn` (the rates at each turn); and `back` (the share of
        episodes that recover).
    """
    played = [one for one in episodes if one.turns and not (one.unfinished or one.failed)]
    if not played:
        return None
    kind: Kind = "wrong" if all(one.wrong is not None for one in played) else "invalid"
    turns = list(_turns(played, kind))
    at: dict[tuple[int, bool], list[TurnError]] = {}
    for each in turns:
        at.setdefault((each.turn, each.after_error), []).append(each)
    return {
        "kind": kind,
        "before": _rate([each for each in turns if not each.after_error]),
        "after": _rate([each for each in turns if each.after_error]),
        "difference": _difference(turns),
        "by_turn": [
            {
                "turn": number,
                "before": _rate(at.get((number, False), [])),
                "after": _rate(at.get((number, True), [])),
            }
            for number in range(1, max(each.turn for each in turns) + 1)
        ],
        "back": _back(played) if kind == "wrong" else None,
    }


def _turns(played: Sequence[EpisodeNumbers], kind: Kind) -> Iterator[TurnError]:
    for episode, one in enumerate(played):
        errors = one.wrong if kind == "wrong" and one.wrong is not None else one.invalid
        seen = False
        for number, is_error in enumerate(errors, 1):
            yield TurnError(episode, number, is_error, seen)
            seen = seen or is_error


def _rate(turns: Sequence[TurnError]) -> dict[str, Any] | None:
    """Return the share of errors among turns, with an interval clustered by episode; None without a turn."""
    if not turns:
        return None
    found = cluster_interval([float(each.is_error) for each in turns], [each.episode for each in turns])
    return _row(found) | {"turns": len(turns)}


def _difference(turns: Sequence[TurnError]) -> dict[str, Any] | None:
    """Return the error rate after a first error minus the rate before; None if either side has no turn.

    Let p be the rate and n the number of turns of each side. Each episode contributes sum(error - p) / n over its turns
    after a first error, minus the same sum over its turns before. The interval is computed from these contributions,
    which keeps both sides of an episode together. It is cut to the possible range from -1 to 1.
    """
    after = [each for each in turns if each.after_error]
    before = [each for each in turns if not each.after_error]
    if not after or not before:
        return None
    rates = [sum(each.is_error for each in side) / len(side) for side in (after, before)]
    sums: dict[int, float] = {each.episode: 0.0 for each in turns}
    for side, rate, sign in ((after, rates[0], 1), (before, rates[1], -1)):
        for each in side:
            sums[each.episode] += sign * (each.is_error - rate) / len(side)
    mean, count = rates[0] - rates[1], len(sums)
    found = mean_interval([mean + count * each for each in sums.values()], bounds=None)
    low, high = (max(-1.0, min(1.0, end)) if math.isfinite(end) else end for end in (found.low, found.high))
    return _row(replace(found, low=low, high=high))


def _back(played: Sequence[EpisodeNumbers]) -> dict[str, Any] | None:
    """Return the share of episodes that recover, among all episodes with a wrong turn; None if no episode has one.

    An episode recovers if a later turn leaves a shorter distance to success than there was before the first wrong turn.

    Source: Perturn. The definition is a first passage, as in Feller 1968, "An Introduction to Probability Theory", XIV.
    """
    found = [one.recovers for one in played if one.recovers is not None]
    return _row(rate_interval(sum(found), len(found))) if found else None


def _row(found: Estimate) -> dict[str, Any]:
    ends = [end if math.isfinite(end) else None for end in (found.low, found.high)]
    return {"mean": found.mean, "interval": ends, "n": found.n}
