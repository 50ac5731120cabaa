"""Post-train LLM agents on multi-turn tasks, one turn at a time."""

from typing import TYPE_CHECKING, Any

from perturn.group import Group, groups_of
from perturn.table import locate
from perturn.types import Action, Observation, PreferencePair, Task, Trajectory, Turn

if TYPE_CHECKING:
    from perturn.api import Score, Trainer, collect, evaluate, make_rows, train, weigh
    from perturn.policy.models import load_model
    from perturn.run.served_policy import open_policy
    from perturn.training.turn_config import TurnConfig
    from perturn.training.turn_trainer import TurnTrainer

__all__ = [
    "Action",
    "Group",
    "Observation",
    "PreferencePair",
    "Score",
    "Task",
    "Trainer",
    "Trajectory",
    "Turn",
    "TurnConfig",
    "TurnTrainer",
    "collect",
    "evaluate",
    "groups_of",
    "load_model",
    "make_rows",
    "open_policy",
    "train",
    "weigh",
]
__version__ = "0.2.0"


_TORCH = {
    **{
        name: f"perturn.api:{name}"
        for name in ("Score", "Trainer", "collect", "evaluate", "make_rows", "train", "weigh")
    },
    "TurnConfig": "perturn.training.turn_config:TurnConfig",
    "TurnTrainer": "perturn.training.turn_trainer:TurnTrainer",
    "load_model": "perturn.policy.models:load_model",
    "open_policy": "perturn.run.served_policy:open_policy",
}
"""Public names that are imported on first use, since their modules import torch and transformers."""


def __getattr__(name: str) -> Any:
    if name in _TORCH:
        return locate(_TORCH[name])
    raise AttributeError(f"module 'perturn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
