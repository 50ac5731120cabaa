"""Rows to damage."""

from perturn.data.records import trajectory_to_dict
from perturn.types import Action, Task, Trajectory, Turn

CALL = {"id": "1", "type": "function", "function": {"name": "find", "arguments": {"room": "hall"}}}


TRAJECTORY = trajectory_to_dict(
    Trajectory(
        Task("t", "kind", "train", {"level": 1}),
        (
            Turn(({"role": "user", "content": "go"},), Action("Action: look", (5, 6), (-0.5, -1.5)), 0.5),
            Turn(({"role": "tool", "content": "seen"},), Action("", tool_calls=(CALL,))),
        ),
        prompt=({"role": "system", "content": "Play."},),
        tools=({"type": "function", "function": {"name": "find", "parameters": {}}},),
        total_reward=0.5,
    )
)


OTHER = TRAJECTORY | {"sample": 1, "total_reward": 0.0}


PAIR = {"chosen": TRAJECTORY, "rejected": OTHER}
