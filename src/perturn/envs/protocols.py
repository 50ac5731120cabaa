"""Named protocols: the rules under which published scores were made."""

from perturn.envs.alfworld.protocols import ALFWORLD_ETO, ALFWORLD_GIGPO
from perturn.envs.bfcl.environment import BFCL_PROTOCOL
from perturn.envs.hotpotqa.react import HOTPOTQA_REACT, REACT_PROTOCOL
from perturn.envs.scienceworld.eto import ETO_MAX_TURNS, ETO_PROTOCOL
from perturn.envs.webshop.eto import WEBSHOP_ETO, WEBSHOP_PROTOCOL
from perturn.types import EpisodeProtocol, Sampling

_SCIENCEWORLD = (
    "You are in a small house with a laboratory and do an experiment there by text commands. Some commands: "
    "look around, examine OBJ, go to LOC, open OBJ, close OBJ, pick up OBJ, move OBJ to OBJ, use OBJ on OBJ, "
    "pour OBJ into OBJ, activate OBJ, focus on OBJ, wait1."
)

_BFCL = (
    "Do what the user asks by calling tools. When it is done, or you need to know more, write to the user."
)

PROTOCOLS = {
    ALFWORLD_ETO.name: ALFWORLD_ETO,
    ALFWORLD_GIGPO.name: ALFWORLD_GIGPO,
    ETO_PROTOCOL: EpisodeProtocol(
        name=ETO_PROTOCOL, system=_SCIENCEWORLD, max_turns=100, max_turns_by_kind=ETO_MAX_TURNS
    ),
    REACT_PROTOCOL: HOTPOTQA_REACT,
    WEBSHOP_PROTOCOL: WEBSHOP_ETO,
    BFCL_PROTOCOL: EpisodeProtocol(
        name=BFCL_PROTOCOL,
        format="tools",
        system=_BFCL,
        max_turns=160,
        sampling=Sampling(0.001, max_new_tokens=4096),
    ),
}
"""ScienceWorld: turn limits as in Song et al. 2024, arXiv:2403.02502; kinds it leaves out have ScienceWorld's own 100.

The system text is ours, and there is no worked example in the prompt, so scores are not those of the paper.

BFCL's decoding is that of its own command line; its limit of 20 actions for one request is the environment's, and
`max_turns` only ends an episode of malformed calls.
"""
