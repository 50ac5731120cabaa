"""Worlds to play in."""

import pytest

from turnwise.envs.scienceworld import ScienceWorld

SHORT_KINDS = (
    "find-living-thing",
    "find-non-living-thing",
    "find-plant",
    "find-animal",
    "lifespan-longest-lived",
    "lifespan-shortest-lived",
    "lifespan-longest-lived-then-shortest-lived",
)


@pytest.fixture(scope="module")
def world():
    world = ScienceWorld(kinds=SHORT_KINDS)
    yield world
    world.close()


@pytest.fixture
def make():
    """Makes worlds on a JVM of their own, which the test may break."""
    made = []

    def make_world(**settings):
        made.append(ScienceWorld(**{"kinds": SHORT_KINDS, "jvm_memory": "200m", **settings}))
        return made[-1]

    yield make_world
    for world in made:
        world.close()
