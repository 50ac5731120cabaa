"""Turn-level credit: pure mathematics from the trajectories of a task to a number per turn.

A credit is a frozen dataclass of its settings. Called on a group it returns one tensor a trajectory:

    >>> from perturn.credit import CREDITS
    >>> from perturn.types import Action, Task, Trajectory, Turn
    >>> turn = Turn(observation=(), action=Action("look"))
    >>> group = [Trajectory(Task("a"), turns=(turn, turn))]
    >>> [round(weight, 3) for weight in CREDITS["discount"](gamma=0.5)(group)[0].tolist()]
    [1.0, 0.333]
"""

from perturn.credit.protocol import Credit, TurnCredit
from perturn.credit.turns import Confidence, Discount, Uniform
from perturn.table import Table

CREDITS: Table[type[Credit]] = Table(
    "perturn.credits",
    {
        "uniform": Uniform,
        "confidence": Confidence,
        "discount": Discount,
    },
)
"""Credit by name: the frozen dataclass that holds its settings and weighs turns."""

__all__ = ["CREDITS", "Credit", "TurnCredit"]
