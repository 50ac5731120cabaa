"""Age of the tokens of episodes, in versions of the policy that learns from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perturn.types import Trajectory


def lags(trajectory: Trajectory, version: int) -> list[int]:
    """Return the lag of each token that an episode's policy has sampled and that says its version.

    Turns that were taken over carry loss in another iteration, and are left out.

    Args:
        trajectory: An episode.
        version: Version of the policy that learns from it.
    """
    own = trajectory.turns[trajectory.taken_over :]
    return [version - each for turn in own for each in turn.action.versions]


def stale_keys(groups: Iterable[Sequence[Trajectory]], version: int, most: int) -> set[tuple[str, int]]:
    """Return the keys of all trajectories of the groups that have a token with a larger lag than `most`."""
    return {
        one.key
        for group in groups
        if any(max(lags(one, version), default=0) > most for one in group)
        for one in group
    }


def lag_figures(trajectories: Iterable[Trajectory], version: int) -> dict[str, float]:
    """Return the largest and the mean lag of the tokens of some episodes, by name; empty if no token has a lag."""
    found = [lag for one in trajectories for lag in lags(one, version)]
    return {"lag_most": max(found), "lag_mean": round(sum(found) / len(found), 4)} if found else {}
