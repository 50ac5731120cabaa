"""Settings of a filter that chooses explored episodes to train on, by signals that need no model."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Signals:
    """Leave out explored episodes by the signals that they show: failure, loop, stagnation, exhaustion and cut."""

    without: list[str] = field(default_factory=list)
    """Names of signals. Episodes that show any of these signals are left out."""
    only: list[str] = field(default_factory=list)
    """Names of signals. Episodes that show none of these signals are left out. []: no episode is left out."""

    def __post_init__(self) -> None:
        both = [name for name in self.without if name in self.only]
        if both:
            raise ValueError(
                f"only and without both have {both[0]}, so no episode is left; remove it from one of them."
            )

    def __bool__(self) -> bool:
        """Return whether the filter may leave episodes out."""
        return bool(self.without or self.only)
