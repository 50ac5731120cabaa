"""Environments: a package for each benchmark, an adapter for each interface of others.

An entry of `ENVIRONMENTS` keeps the `Environment` Protocol of `types.py`. It may say more of itself:

- `in_process = True`: a process around a world only costs, since its simulator runs in one of its own anyway, or it is
  Python of ours, which waits for nothing and whose worlds share what they hold.
- `protocol = "name"`: the named protocol that published scores on it were made under.
- `distributions = ("package", ...)`: what else its results depend on; their versions stand in the run's manifest.
- `reads`: the files and folders that the environment reads beyond those that its settings name. It is a list of paths,
  or a static method from the section's settings to one. A run keeps their digests, and rejects them when they change.
- `answer_action = "finish[{answer}]"`: the action that gives an answer. Each task then has its gold answer as a text in
  `data["answer"]`, and credits may ask how likely the policy finds it.
"""

from __future__ import annotations

from perturn.table import Table
from perturn.types import Environment

ENVIRONMENTS: Table[type[Environment]] = Table(
    "perturn.environments",
    {
        "alfworld": "perturn.envs.alfworld.environment:ALFWorld",
        "alfworld-like": "perturn.envs.alfworld.like:ALFWorldLike",
        "alfworld-official": "perturn.envs.alfworld.official:ALFWorldOfficial",
        "bfcl": "perturn.envs.bfcl.environment:Bfcl",
        "gymnasium": "perturn.envs.gymnasium:Gymnasium",
        "hotpotqa": "perturn.envs.hotpotqa.environment:HotpotQA",
        "mt-bench": "perturn.envs.mt_bench.environment:MTBench",
        "openenv": "perturn.envs.openenv:OpenEnv",
        "scienceworld": "perturn.envs.scienceworld.environment:ScienceWorld",
        "trl": "perturn.envs.trl:TrlFactory",
        "webshop": "perturn.envs.webshop.environment:WebShop",
    },
)
"""Environments by the name that recipes use."""
