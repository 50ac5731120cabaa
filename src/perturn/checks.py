"""Checks on values; those on settings raise ValueError saying what was expected and what was got."""

import math
from collections.abc import Collection, Sequence


def check_positive(name: str, value: float) -> None:
    """Raise unless the value is a finite number above zero."""
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be > 0, got {value}.")


def check_not_negative(name: str, value: float) -> None:
    """Raise unless the value is a finite number of zero or more."""
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be >= 0, got {value}.")


def check_unit_interval(name: str, value: float) -> None:
    """Raise unless the value lies in [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be between 0 and 1, got {value}.")


def are_factors(values: Sequence[float], count: int) -> bool:
    """Return whether a value is a list of this length with finite numbers above zero."""
    return len(values) == count and all(math.isfinite(each) and each > 0 for each in values)


def check_choice(name: str, value: str, known: Collection[str]) -> None:
    """Raise unless the value is one of the known names, and list them."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}.")
