"""Adapters to environments, one file each. Add yours to ENVIRONMENTS."""

from __future__ import annotations

from turnwise.envs.bfcl import Bfcl
from turnwise.envs.gymnasium import Gymnasium
from turnwise.envs.openenv import OpenEnv
from turnwise.envs.scienceworld import ScienceWorld
from turnwise.envs.trl import TrlFactory
from turnwise.types import Environment

ENVIRONMENTS: dict[str, type[Environment]] = {
    "scienceworld": ScienceWorld,
    "bfcl": Bfcl,
    "gymnasium": Gymnasium,
    "openenv": OpenEnv,
    "trl": TrlFactory,
}
"""Environments by the name that recipes use."""

SELF_CONTAINED = frozenset({"scienceworld", "openenv"})
"""Environments whose simulator runs in a process of its own anyway: a second one around it only costs.

ScienceWorld, 16 episodes at once on two cores (`benchmarks/worlds.py --jvm`, one run each): with one JVM for all, 17
turns/s and 0.6 GB; with a process and a JVM for each world, 10 turns/s and 3.7 GB.
"""
