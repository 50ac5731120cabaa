"""Episodes and their branches, and an environment whose answers vary."""

from dataclasses import replace

from perturn.data.store import read_trajectories
from perturn.explore.protocol import ExploreInputs
from perturn.types import Action, Task, Trajectory, Turn

WANDERING = """
import random

from perturn.types import Observation
from perturn_letters import Letters


class Wandering(Letters):
    def step(self, action):
        seen = super().step(action)
        return Observation(str(random.random()), seen.reward, seen.terminated, success=seen.success)
"""


def explored(turns, sample=0, success=False, **changes):
    steps = tuple(Turn(({"role": "user", "content": f"{t}"},), Action("go")) for t in range(turns))
    return Trajectory(Task("t"), steps, sample=sample, seed=5, success=success, **changes)


def branched(origin, turn, rewards, sample, **changes):
    whole = explored(len(rewards), sample, origin=origin, taken_over=turn, **changes)
    turns = tuple(replace(one, reward=reward) for one, reward in zip(whole.turns, rewards, strict=True))
    return replace(whole, turns=turns, total_reward=sum(rewards))


def of(folder, name):
    return list(read_trajectories(folder / f"trajectories/{name}.jsonl"))


def jobs_of(explorer, episodes, seed=0, iteration=1):
    """Return the branches that an explorer requests."""
    begun = sorted(explorer.begun(episodes, ()), key=lambda one: one.key)
    inputs = ExploreInputs(seed, iteration, begun=begun)
    return explorer.jobs(replace(inputs, chosen=explorer.choose(inputs)), 1)
