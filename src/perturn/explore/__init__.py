"""Explorers: how the episodes of an iteration are gathered, by name."""

from __future__ import annotations

from perturn.explore.protocol import Explorer as Explorer
from perturn.table import Table

EXPLORERS: Table[type[Explorer]] = Table(
    "perturn.explorers",
    {
        "rollouts": "perturn.explore.rollouts:Rollouts",
        "window": "perturn.explore.window:Window",
        "branches": "perturn.explore.branches:Branches",
        "wrong-branches": "perturn.explore.wrong_branches:WrongBranches",
        "entropy-branches": "perturn.explore.entropy_branches:EntropyBranches",
        "mixed-branches": "perturn.explore.mixed_branches:MixedBranches",
        "expert-branches": "perturn.explore.expert_branches:ExpertBranches",
        "mcts": "perturn.explore.mcts:Mcts",
    },
)
"""Explorers by name; other packages add theirs through entry points of `perturn.explorers`."""
