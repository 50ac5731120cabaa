"""Post-train LLM agents on multi-turn tasks, one turn at a time."""

from typing import TYPE_CHECKING, Any

from perturn.table import locate
from perturn.types import Action, Observation, PreferencePair, Task, Trajectory, Turn

if TYPE_CHECKING:
    from perturn.api import Score, assign_credit, collect, evaluate, make_pairs, train, weigh
    from perturn.training.turn_config import TurnConfig
    from perturn.training.turn_trainer import TurnTrainer

__all__ = [
    "Action",
    "Observation",
    "PreferencePair",
    "Score",
    "Task",
    "Trajectory",
    "Turn",
    "TurnConfig",
    "TurnTrainer",
    "assign_credit",
    "collect",
    "evaluate",
    "make_pairs",
    "train",
    "weigh",
]
__version__ = "0.1.0"


_TORCH = {
    **{
        name: f"perturn.api:{name}"
        for name in ("Score", "assign_credit", "collect", "evaluate", "make_pairs", "train", "weigh")
    },
    "TurnConfig": "perturn.training.turn_config:TurnConfig",
    "TurnTrainer": "perturn.training.turn_trainer:TurnTrainer",
}
"""Names that are loaded when they are asked for, since they bring torch and transformers."""


def __getattr__(name: str) -> Any:
    if name in _TORCH:
        return locate(_TORCH[name])
    raise AttributeError(f"module 'perturn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
