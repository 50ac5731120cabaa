"""A run that has explored once and has no credit yet."""

from perturn.config.recipe import read_recipe
from perturn.data.run_folder import Run
from perturn.data.store import TrajectoryStore
from perturn.types import Action, Status, Task, Trajectory, Turn, failed


def episode(task, sample, rewards, keys="abcdef", **changes):
    """Return an episode with one reward for each turn, in states a, b, and so on."""
    observation = ({"role": "user", "content": "Guess."},)
    turns = tuple(
        Turn(observation, Action(f"go {key}"), reward, state_key=key)
        for key, reward in zip(keys, rewards, strict=False)
    )
    return Trajectory(
        Task(task), turns, total_reward=sum(rewards), success=sum(rewards) > 0, sample=sample, **changes
    )


EPISODES = [
    episode("two", 1, [0.0, 0.0], "ab"),
    episode("two", 0, [0.0, 1.0], "ac"),
    episode("one", 0, [0.0, 1.0], "ab"),
    episode("one", 1, [0.0, 0.0, 0.0], "aab"),
    episode("one", 2, [1.0], "b", status=Status.FAILED, error="lost"),
    episode("even", 0, [1.0]),
    episode("even", 1, [1.0]),
]


KEPT = [one for one in EPISODES if not failed(one)]
"""Episodes that count in the statistics of their groups."""


def explored_by(recipe, episodes):
    """Return the folder of a run that has explored these episodes."""
    settings = read_recipe(recipe, ["iterations=2"])
    with Run(settings) as run:
        with run.stage("expert", run.paths.trajectories("expert")):
            TrajectoryStore(run.paths.trajectories("expert")).append(
                episode("one", 0, [5.0], policy="expert")
            )
        file = run.paths.trajectories("explore-001")
        with run.stage("explore-001", file), TrajectoryStore(file) as store:
            for one in episodes:
                store.append(one)
        return run.folder
