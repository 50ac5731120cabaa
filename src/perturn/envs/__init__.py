"""Environments: a package for each benchmark, an adapter for each interface of others.

An entry of `ENVIRONMENTS` keeps the `Environment` Protocol of `types.py`. Its class attribute `traits`, a
`perturn.traits.EnvironmentTraits`, says more of it. Its optional methods are in `ABILITIES` of `abilities.py`.
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
"""Environments by the name that recipes use."""
