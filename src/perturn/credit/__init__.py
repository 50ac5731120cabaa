"""Turn-level credits: pure functions from the trajectories of a task to a weight for each turn.

A credit is a frozen dataclass of settings. Called on a group of trajectories, it returns one tensor per trajectory:

    >>> from perturn.credit import CREDITS
    >>> from perturn.types import Action, Task, Trajectory, Turn
    >>> turn = Turn(observation=(), action=Action("look"))
    >>> group = [Trajectory(Task("a"), turns=(turn, turn))]
    >>> [round(weight, 3) for weight in CREDITS["discount"](gamma=0.5)(group)[0].tolist()]
    [1.0, 0.333]
    >>> group = [Trajectory(Task("a"), turns=(turn,), total_reward=reward) for reward in (1.0, 0.0, 0.0)]
    >>> [weight.tolist() for weight in CREDITS["rloo"]()(group)]
    [[1.0], [-0.5], [-0.5]]
"""

from perturn.credit.anchor_rloo import AnchorRLOO
from perturn.credit.bi_level_gae import BiLevelGAE
from perturn.credit.dr_grpo import DrGRPO
from perturn.credit.gigpo import GiGPO
from perturn.credit.grpo import GRPO
from perturn.credit.hgpo import HGPO
from perturn.credit.process_score import ProcessScore
from perturn.credit.protocol import ClipCredit, Credit, CreditTraits, TurnCredit
from perturn.credit.reinforce import ReinforcePlusPlus
from perturn.credit.rloo import RLOO
from perturn.credit.single_turn import Confidence, Discount, Uniform
from perturn.credit.trloo import TRLOO
from perturn.credit.turn_gae import TurnGAE
from perturn.table import Table

CREDITS: Table[type[Credit]] = Table(
    "perturn.credits",
    {
        "uniform": Uniform,
        "confidence": Confidence,
        "discount": Discount,
        "process-score": ProcessScore,
        "grpo": GRPO,
        "dr-grpo": DrGRPO,
        "rloo": RLOO,
        "reinforce++": ReinforcePlusPlus,
        "trloo": TRLOO,
        "anchor-rloo": AnchorRLOO,
        "gigpo": GiGPO,
        "hgpo": HGPO,
        "turn-gae": TurnGAE,
        "bi-level-gae": BiLevelGAE,
    },
)
"""Name of a credit -> its class, a frozen dataclass of settings that is called on a group."""

__all__ = ["CREDITS", "ClipCredit", "Credit", "CreditTraits", "TurnCredit"]
