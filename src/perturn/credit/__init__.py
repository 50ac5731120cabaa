"""Turn-level credit: pure mathematics from the trajectories of a task to a number per turn.

A credit is a frozen dataclass of its settings. Called on a group it returns one tensor a trajectory:

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

from perturn.credit.a2tgpo import A2TGPO
from perturn.credit.anchor_rloo import AnchorRLOO
from perturn.credit.archer import ArCHer
from perturn.credit.arpo import ARPO
from perturn.credit.bi_level_gae import BiLevelGAE
from perturn.credit.dr_grpo import DrGRPO
from perturn.credit.first_error import FirstError
from perturn.credit.g2po import G2PO
from perturn.credit.gigpo import GiGPO
from perturn.credit.graphgpo import GraphGPO
from perturn.credit.grpo import GRPO
from perturn.credit.hgpo import HGPO
from perturn.credit.hiper import HiPER
from perturn.credit.igpo import IGPO
from perturn.credit.infopo import InfoPO
from perturn.credit.matchtir import MatchTIR
from perturn.credit.maxrl import MaxRL
from perturn.credit.oprl import OPRL
from perturn.credit.pav import PAV
from perturn.credit.pgpo import PGPO
from perturn.credit.portool import PORTool
from perturn.credit.process_score import ProcessScore
from perturn.credit.progress_advantage import ProgressAdvantage
from perturn.credit.protocol import ClipCredit, Credit, CreditTraits, TurnCredit
from perturn.credit.reinforce import ReinforcePlusPlus
from perturn.credit.rloo import RLOO
from perturn.credit.single_turn import Confidence, Discount, Uniform
from perturn.credit.siop import SIOP
from perturn.credit.slate import SLATE
from perturn.credit.spa import SPA
from perturn.credit.spo import SPO
from perturn.credit.trloo import TRLOO
from perturn.credit.turn_gae import TurnGAE
from perturn.credit.v0 import V0
from perturn.table import Table

CREDITS: Table[type[Credit]] = Table(
    "perturn.credits",
    {
        "uniform": Uniform,
        "confidence": Confidence,
        "discount": Discount,
        "first-error": FirstError,
        "process-score": ProcessScore,
        "grpo": GRPO,
        "dr-grpo": DrGRPO,
        "maxrl": MaxRL,
        "rloo": RLOO,
        "reinforce++": ReinforcePlusPlus,
        "trloo": TRLOO,
        "anchor-rloo": AnchorRLOO,
        "gigpo": GiGPO,
        "hgpo": HGPO,
        "graphgpo": GraphGPO,
        "g2po": G2PO,
        "pgpo": PGPO,
        "matchtir": MatchTIR,
        "igpo": IGPO,
        "a2tgpo": A2TGPO,
        "siop": SIOP,
        "infopo": InfoPO,
        "progress-advantage": ProgressAdvantage,
        "oprl": OPRL,
        "spa": SPA,
        "spo": SPO,
        "pav": PAV,
        "portool": PORTool,
        "arpo": ARPO,
        "slate": SLATE,
        "v0": V0,
        "turn-gae": TurnGAE,
        "bi-level-gae": BiLevelGAE,
        "hiper": HiPER,
        "archer": ArCHer,
    },
)
"""Credit by name: the frozen dataclass that holds its settings and weighs turns."""

__all__ = ["CREDITS", "ClipCredit", "Credit", "CreditTraits", "TurnCredit"]
