"""Choose the explored episodes to learn from, by signals that need no model."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Signals:
    """Leave explored episodes out by the signals that they show: failure, loop, stagnation, exhaustion and cut."""

    without: list[str] = field(default_factory=list)
    """Names of signals; episodes that show any of them are left out."""
    only: list[str] = field(default_factory=list)
    """Names of signals; episodes that show none of them are left out. [] leaves none out."""

    def __post_init__(self) -> None:
        both = [name for name in self.without if name in self.only]
        if both:
            raise ValueError(
                f"only and without both have {both[0]}, so no episode is left; remove it from one of them."
            )

    def __bool__(self) -> bool:
        """Return whether it may leave any out."""
        return bool(self.without or self.only)
