"""Worlds to play in."""

import os
import shutil
from pathlib import Path

import pytest

from perturn.envs.scienceworld.environment import ScienceWorld
from perturn.types import Action

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
    root = os.environ.get("PERTURN_DATA") or Path(__file__).parents[3] / "shared" / "data"
    folder = Path(root) / "alfworld"
    if not folder.is_dir():
        pytest.skip(f"no ALFWorld games at {folder}; set PERTURN_DATA to the folder that holds alfworld/")
    return folder


@pytest.fixture(scope="module")
def index_cache(tmp_path_factory):
    """A cache for the indexes that all tests of a file share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PERTURN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def _copied(name, target):
    """A folder beside this file, copied to where a test may change it."""
    return Path(shutil.copytree(Path(__file__).with_name(name), target / name))


@pytest.fixture
def wiki(tmp_path):
    """Settings of HotpotQA over an encyclopedia of our own invention."""
    folder = _copied("wiki", tmp_path)
    questions = str(folder / "questions.json")
    return {"questions": {"train": questions, "test": questions}, "corpus": str(folder / "corpus.jsonl")}


@pytest.fixture
def shop(tmp_path):
    """Settings of WebShop over a catalogue of our own invention."""
    folder = _copied("shop", tmp_path)
    files = {name: str(folder / f"{name}.json") for name in ("products", "attributes", "goals", "reviews")}
    return {"files": files, "splits": {"train": (0, 4), "test": (4, None)}}


class Reciter:
    """An engine that gives the actions of a worked example."""

    name = "reciter"

    def __init__(self, example):
        self.actions = [message["content"] for message in example if message["role"] == "assistant"]

    def generate(self, prompts, sampling):
        """The action of this turn."""
        return [Action(self.actions[len(prompt.turns)]) for prompt in prompts]

    def forget(self, conversation):
        """Nothing is kept."""

    def close(self):
        """Nothing is held."""


@pytest.fixture
def reciter():
    """Makes an engine that gives the actions of a worked example."""
    return Reciter
