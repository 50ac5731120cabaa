"""Explorers: how the episodes of an iteration are gathered, by name."""

from __future__ import annotations

from perturn.explore.protocol import Explorer as Explorer
from perturn.table import Table

EXPLORERS: Table[type[Explorer]] = Table(
    "perturn.explorers",
    {
        "rollouts": "perturn.explore.rollouts:Rollouts",
        "branches": "perturn.explore.branches:Branches",
        "file": "perturn.explore.file_episodes:FileEpisodes",
    },
)
"""Explorers by name; other packages add theirs through entry points of `perturn.explorers`."""
