"""Plain rollouts: each task is played some times, from its beginning to its end."""

from __future__ import annotations

from dataclasses import dataclass

from perturn.settings.exploring import ExploreSettings


@dataclass(frozen=True)
class Rollouts(ExploreSettings):
    """Play each task of an iteration some times, from its beginning to its end."""
