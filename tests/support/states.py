"""Short notation for trajectories."""

from perturn.types import Action, Status, Task, Trajectory, Turn


def episode(states, rewards, *, valid=None, task="t", sample=0, success=None, status=Status.COMPLETED):
    """Return a trajectory with a state key (or None) and a reward for each turn."""
    valid = valid or [True] * len(rewards)
    return Trajectory(
        Task(task),
        tuple(
            Turn((), Action("go"), reward, good, state)
            for state, reward, good in zip(states, rewards, valid, strict=True)
        ),
        total_reward=sum(rewards),
        success=sum(rewards) > 0 if success is None else success,
        status=status,
        sample=sample,
    )
