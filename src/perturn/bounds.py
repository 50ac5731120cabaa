"""Which numbers a setting takes, declared at its field: `rank: Annotated[int, Bound(least=1)] = 16`."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bound:
    """An interval of numbers; NaN lies in none."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def broken_by(self, value: float) -> str | None:
        """The side on which a number lies outside, such as `> 0`; None: it lies inside."""
        holds = {
            f">= {self.least}": self.least is None or value >= self.least,
            f"> {self.above}": self.above is None or value > self.above,
            f"<= {self.most}": self.most is None or value <= self.most,
            f"< {self.below}": self.below is None or value < self.below,
        }
        return next((side for side, true in holds.items() if not true), None)


SEED = Bound(least=0, below=2**32)
"""Seeds that numpy and transformers take."""

SECONDS = Bound(above=0, most=10**9)
"""Time limits; the operating system counts no further than some centuries."""


def check_bounds(settings: Any) -> None:
    """Compare the fields of a dataclass with the bounds that they declare.

    Raises:
        ValueError: For the first number outside.
    """
    for name, hint in typing.get_type_hints(type(settings), include_extras=True).items():
        value = getattr(settings, name)
        for bound in bounds(hint):
            side = bound.broken_by(value) if isinstance(value, int | float) else None
            if side is not None:
                raise ValueError(f"{name} must be {side}, got {value}.")


def bounds(hint: Any) -> Iterator[Bound]:
    """The bounds within a type, of the parts of a union too."""
    yield from (each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Bound))
    for part in typing.get_args(hint):
        yield from bounds(part)
