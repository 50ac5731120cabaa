"""Episodes of ScienceWorld that several tests play."""

from perturn.types import Task

SHORT = (
    *("find-living-thing", "find-non-living-thing", "find-plant", "find-animal"),
    *("lifespan-longest-lived", "lifespan-shortest-lived", "lifespan-longest-lived-then-shortest-lived"),
)
PLANT = Task("find-plant/12", "find-plant", data={"variation": 12})


def playing(world, task, actions):
    """Play actions until the episode ends, one at each `next`; yields what was observed."""
    yield world.reset(task, 0)
    for action in actions:
        seen = world.step(action)
        yield seen
        if seen.terminated:
            return


def play(world, task, actions):
    """Return the observations of an episode."""
    return list(playing(world, task, actions))
