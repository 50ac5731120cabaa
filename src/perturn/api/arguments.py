"""Checks of the arguments that the functions of the loop have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from perturn.errors import check_fit
from perturn.types import Trajectory


def check_rows(given: Any, name: str = "rows") -> None:
    """Reject an argument that holds no rows.

    Args:
        given: The argument.
        name: Its name, for messages.

    Raises:
        ConfigError: If it is a single thing, such as None or a number, or a mapping.
    """
    several = isinstance(given, Iterable) and not isinstance(given, Mapping)
    check_fit(several, name, "be pairs or trajectories, as make_rows and weigh return them", given)


def trajectories_in(given: Any, name: str) -> list[Trajectory]:
    """Return an argument of trajectories as a list.

    Args:
        given: The argument.
        name: Its name, for messages.

    Raises:
        ConfigError: If it holds anything else.
    """
    several = isinstance(given, Iterable) and not isinstance(given, Mapping | str)
    found = list(given) if several else [given]
    wrong = [one for one in found if not isinstance(one, Trajectory)]
    got = wrong[0] if wrong else given
    check_fit(several and not wrong, name, "be a list of trajectories, as collect returns them", got)
    return found
