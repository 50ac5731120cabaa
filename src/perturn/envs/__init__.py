"""Adapters to environments, one file each. Add yours to ENVIRONMENTS."""

from __future__ import annotations

from perturn.envs.alfworld.environment import ALFWorld
from perturn.envs.alfworld.like import ALFWorldLike
from perturn.envs.alfworld.official import ALFWorldOfficial
from perturn.envs.bfcl.environment import Bfcl
from perturn.envs.gymnasium import Gymnasium
from perturn.envs.hotpotqa.environment import HotpotQA
from perturn.envs.openenv import OpenEnv
from perturn.envs.scienceworld.environment import ScienceWorld
from perturn.envs.trl import TrlFactory
from perturn.envs.webshop.environment import WebShop
from perturn.types import Environment

ENVIRONMENTS: dict[str, type[Environment]] = {
    "alfworld": ALFWorld,
    "alfworld-like": ALFWorldLike,
    "alfworld-official": ALFWorldOfficial,
    "bfcl": Bfcl,
    "gymnasium": Gymnasium,
    "hotpotqa": HotpotQA,
    "openenv": OpenEnv,
    "scienceworld": ScienceWorld,
    "trl": TrlFactory,
    "webshop": WebShop,
}
"""Environments by the name that recipes use."""

SELF_CONTAINED = frozenset({"alfworld", "alfworld-like", "hotpotqa", "openenv", "scienceworld", "webshop"})
"""Environments around which a process only costs: their simulator runs in one of its own anyway, or they are our own
Python, which waits for nothing and whose worlds share what they hold.

ScienceWorld, 16 episodes at once on two cores (`benchmarks/worlds.py --jvm`, one run each): with one JVM for all, 17
turns/s and 0.6 GB; with a process and a JVM for each world, 10 turns/s and 3.7 GB.
"""
