"""Post-train LLM agents on multi-turn tasks, one turn at a time."""

from typing import TYPE_CHECKING, Any

from perturn.types import Action, Observation, PreferencePair, Task, Trajectory, Turn

if TYPE_CHECKING:
    from perturn.policy.config import TurnConfig
    from perturn.policy.trainer import TurnTrainer

__all__ = [
    "Action",
    "Observation",
    "PreferencePair",
    "Task",
    "Trajectory",
    "Turn",
    "TurnConfig",
    "TurnTrainer",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load the trainer only when it is asked for: it brings torch and transformers."""
    if name in ("TurnConfig", "TurnTrainer"):
        from perturn.policy import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module 'perturn' has no attribute {name!r}")
