"""Losses: pure functions of log-probabilities, which import torch and the standard library alone.

A loss is a frozen dataclass of settings. Called on the chosen and the rejected trajectories, it returns one value per
pair:

    >>> from perturn.losses import LOSSES, TurnLogprobs
    >>> chosen = TurnLogprobs.from_nested([[[-0.1, -0.2], [-1.0]]], [[[-0.3, -0.4], [-2.0]]])
    >>> rejected = TurnLogprobs.from_nested([[[-0.5], [-0.7]]], [[[-0.4], [-0.3]]])
    >>> loss = LOSSES["dpo"](beta=0.5)
    >>> [round(value, 4) for value in loss(chosen, rejected).tolist()]
    [0.327]
"""

from perturn.losses.dil import DIL
from perturn.losses.dmpo import DMPO
from perturn.losses.dpo import DPO
from perturn.losses.kto import KTO
from perturn.losses.ppo_clip import PPOClip
from perturn.losses.protocol import Loss, LossTraits
from perturn.losses.sft import SFT
from perturn.losses.tlm_dpo import TLMDPO
from perturn.losses.tlm_dre import TLMDRE
from perturn.losses.token_inputs import TOKEN_INPUTS
from perturn.losses.turn_logprobs import TurnLogprobs
from perturn.losses.w_dpo import WDPO
from perturn.table import Table

LOSSES: Table[type[Loss]] = Table(
    "perturn.losses",
    {
        "sft": SFT,
        "dpo": DPO,
        "dmpo": DMPO,
        "dil": DIL,
        "tlm-dpo": TLMDPO,
        "tlm-dre": TLMDRE,
        "w-dpo": WDPO,
        "kto": KTO,
        "ppo-clip": PPOClip,
    },
)
"""Name of a loss -> its class, a frozen dataclass of settings that is called on log-probabilities."""

__all__ = ["LOSSES", "TOKEN_INPUTS", "Loss", "LossTraits", "TurnLogprobs"]
