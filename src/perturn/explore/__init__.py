"""Explorers: strategies that choose which episodes to play in an iteration."""

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
"""Name of an explorer -> its class. Other packages add explorers as entry points of `perturn.explorers`."""
