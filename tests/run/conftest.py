"""Fixtures of runs."""

import shutil

import pytest

from support.credited import EPISODES, explored_by
from support.loop import CORRIDOR, RECIPE


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
