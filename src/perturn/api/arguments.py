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

    An episode that continues an UNFINISHED episode is no branch.
    """
    begun = {one.key for one in (*episodes, *experts) if not unfinished(one)}
    resumes = [one.origin is not None and (one.task.id, one.origin) in begun for one in episodes]
    pairs = list(zip(episodes, resumes, strict=True))
    return [one for one, own in pairs if not own], [one for one, own in pairs if own]
