"""Fixtures of runs."""

import shutil

import pytest

from support.credited import EPISODES, explored_by
from support.loop import CORRIDOR, RECIPE
from support.models import write_tiny_policy


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory, tokenizer):
    """A tiny policy on disk with a small vocabulary, in which whole runs take half the time."""
    return write_tiny_policy(tmp_path_factory.mktemp("models") / "tiny", tokenizer)


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder):
    """A folder with a world, a policy and a recipe, and a cache of its own."""
    folder = tmp_path_factory.mktemp("loop")
    (folder / "perturn_corridor.py").write_text(CORRIDOR)
    (folder / "tiny.yaml").write_text(RECIPE)
    shutil.copytree(tiny_folder, folder / "tiny")
    return folder


@pytest.fixture
def explored(recipe):
    """A run of two iterations that has explored once and credited nothing."""
    return explored_by(recipe, EPISODES)
