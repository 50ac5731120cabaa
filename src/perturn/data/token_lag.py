"""Lag of sampled tokens: number of versions between the policy that sampled them and the policy that trains on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perturn.types import Trajectory


def lags(trajectory: Trajectory, version: int) -> list[int]:
    """Return the lag of each token that an episode's policy sampled and for which it recorded a version.

    Turns taken over from another episode are left out, since they carry loss in another iteration.

    Args:
        trajectory: An episode.
        version: Version of the policy that trains on the episode.
    """
    own = trajectory.turns[trajectory.taken_over :]
    return [version - each for turn in own for each in turn.action.versions]


def stale_keys(groups: Iterable[Sequence[Trajectory]], version: int, most: int) -> set[tuple[str, int]]:
    """Return the keys of all trajectories in groups where any token has a larger lag than `most`."""
    return {
        one.key
        for group in groups
        if any(max(lags(one, version), default=0) > most for one in group)
        for one in group
    }


def lag_figures(trajectories: Iterable[Trajectory], version: int) -> dict[str, float]:
    """Return the largest and the mean lag of the episodes' tokens as `lag_most` and `lag_mean`; empty without lags."""
    found = [lag for one in trajectories for lag in lags(one, version)]
    return {"lag_most": max(found), "lag_mean": round(sum(found) / len(found), 4)} if found else {}
