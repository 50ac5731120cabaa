"""Named protocols: the rules of episodes under which scores are comparable, most of them from published work.

An environment names its default protocol in its `traits` or in its attribute `protocol`.
"""

from perturn.table import Table
from perturn.types import EpisodeProtocol

PROTOCOLS: Table[EpisodeProtocol] = Table(
    "perturn.protocols",
    {
        "agent": "perturn.envs.agent.environment:AGENT",
        "alfworld-eto": "perturn.envs.alfworld.alfworld_protocols:ALFWORLD_ETO",
        "alfworld-eto-0.3": "perturn.envs.alfworld.alfworld_protocols:ALFWORLD_ETO_0_3",
        "alfworld-gigpo": "perturn.envs.alfworld.alfworld_protocols:ALFWORLD_GIGPO",
        "alfworld-lab": "perturn.envs.alfworld.alfworld_protocols:ALFWORLD_LAB",
        "scienceworld-eto": "perturn.envs.scienceworld.environment:SCIENCEWORLD_ETO",
        "hotpotqa-react": "perturn.envs.hotpotqa.react:HOTPOTQA_REACT",
        "webshop-eto": "perturn.envs.webshop.webshop_rules:WEBSHOP_ETO",
        "bfcl-multi-turn": "perturn.envs.bfcl.protocol:BFCL_MULTI_TURN",
        "mt-bench": "perturn.envs.mt_bench.environment:MT_BENCH",
    },
)
"""Name of a protocol in a recipe -> the protocol."""
