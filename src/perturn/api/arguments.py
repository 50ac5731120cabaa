"""Checks of arguments that several functions of the API take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perturn.errors import check_fit
from perturn.types import Trajectory, unfinished


def check_rows(given: Any, name: str = "rows") -> None:
    """Check that an argument is a collection of rows.

    Args:
        given: Value of the argument.
        name: Name of the argument, for the error message.

    Raises:
        ConfigError: If the value is not iterable, or is a mapping.
    """
    several = isinstance(given, Iterable) and not isinstance(given, Mapping)
    check_fit(several, name, "be pairs or trajectories, as make_rows and weigh return them", given)


def trajectories_in(given: Any, name: str) -> list[Trajectory]:
    """Return an argument that holds trajectories as a list.

    Args:
        given: Value of the argument.
        name: Name of the argument, for the error message.

    Raises:
        ConfigError: If the value is not a collection of trajectories.
    """
    several = isinstance(given, Iterable) and not isinstance(given, Mapping | str)
    found = list(given) if several else [given]
    wrong = [one for one in found if not isinstance(one, Trajectory)]
    got = wrong[0] if wrong else given
    check_fit(several and not wrong, name, "be a list of trajectories, as collect returns them", got)
    return found


def without_branches(
    episodes: Sequence[Trajectory], experts: Sequence[Trajectory] = ()
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Split episodes into two lists: episodes that resume no given episode, and branches of given episodes.

    An episode that continues an UNFINISHED episode is no branch. The UNFINISHED episode may belong to an earlier
    iteration, and a given episode may have its sample number, so the shared actions are compared.
    """
    begun: dict[tuple[str, int | None], list[Trajectory]] = {}
    for one in (*episodes, *experts):
        if not unfinished(one):
            begun.setdefault(one.key, []).append(one)
    found: tuple[list[Trajectory], list[Trajectory]] = [], []
    for one in episodes:
        found[any(_branches(one, origin) for origin in begun.get((one.task.id, one.origin), ()))].append(one)
    return found


def _branches(one: Trajectory, origin: Trajectory) -> bool:
    """Return whether an episode has the first actions of another episode, which has further turns."""
    shared = zip(origin.turns[: one.taken_over], one.turns, strict=False)
    return len(origin.turns) > one.taken_over and all(ours.action == its.action for its, ours in shared)
