"""Explorers: how the episodes of an iteration are gathered, by name."""

from __future__ import annotations

from perturn.settings.exploring import ExploreSettings
from perturn.table import Table

EXPLORERS: Table[type[ExploreSettings]] = Table(
    "perturn.explorers",
    {"rollouts": "perturn.explore.rollouts:Rollouts"},
)
"""Explorers by name; other packages add theirs through entry points of `perturn.explorers`."""
