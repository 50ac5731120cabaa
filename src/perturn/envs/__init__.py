"""Environments: one package for each benchmark, and one adapter for each environment interface of another library.

An entry of `ENVIRONMENTS` implements the `Environment` Protocol of `types.py`. Its class attribute `traits`, a
`perturn.traits.EnvironmentTraits`, declares its properties. `ABILITIES` of `abilities.py` lists its optional methods.
"""

from __future__ import annotations

from perturn.table import Table
from perturn.types import Environment

ENVIRONMENTS: Table[type[Environment]] = Table(
    "perturn.environments",
    {
        "agent": "perturn.envs.agent.environment:Agent",
        "alfworld": "perturn.envs.alfworld.environment:ALFWorld",
        "alfworld-like": "perturn.envs.alfworld.generated_games:ALFWorldLike",
        "alfworld-official": "perturn.envs.alfworld.official:ALFWorldOfficial",
        "bfcl": "perturn.envs.bfcl.environment:Bfcl",
        "gymnasium": "perturn.envs.gymnasium:Gymnasium",
        "hotpotqa": "perturn.envs.hotpotqa.environment:HotpotQA",
        "mcp": "perturn.envs.mcp.environment:Mcp",
        "mt-bench": "perturn.envs.mt_bench.environment:MTBench",
        "openenv": "perturn.envs.openenv:OpenEnv",
        "scienceworld": "perturn.envs.scienceworld.environment:ScienceWorld",
        "tau3": "perturn.envs.tau3.environment:Tau3",
        "trl": "perturn.envs.trl_factory:TrlFactory",
        "webshop": "perturn.envs.webshop.environment:WebShop",
    },
)
"""Name of an environment in a recipe -> its class."""
