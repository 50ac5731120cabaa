"""Worlds to play in."""

import os
from pathlib import Path

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


@pytest.fixture(scope="session")
def alfworld_data():
    """Folder of real games; the test is skipped where it is absent."""
    root = os.environ.get("TURNWISE_DATA") or Path(__file__).parents[3] / "shared" / "data"
    folder = Path(root) / "alfworld"
    if not folder.is_dir():
        pytest.skip(f"no ALFWorld games at {folder}; set TURNWISE_DATA to the folder that holds alfworld/")
    return folder
