"""Fixtures of runs."""

import shutil
from pathlib import Path

import pytest

from support.credited import EPISODES, explored_by
from support.loop import RECIPE, finish, make_place

from . import online
from .online import begin


@pytest.fixture(scope="module")
def policy_folder(tiny_folder):
    """The policy that runs in `place` begin with."""
    return tiny_folder


@pytest.fixture(scope="module")
def place(tmp_path_factory, policy_folder):
    """A folder with a world, a policy and a recipe, and a cache of its own."""
    return make_place(tmp_path_factory.mktemp("loop"), policy_folder)


@pytest.fixture(scope="module")
def run_once(place, policy_folder, recorded):
    """Do `perturn run` in a folder like `place`, once for all workers; put a copy into `place` and return it."""

    def run_once(name, *words, begin=begin):
        def make(folder):
            finish(begin(make_place(folder, policy_folder), name, *words))

        made = recorded(make, RECIPE, online.RECIPE, begin.__name__, policy_folder.name, name, words)
        for file in (*made.glob("*.py"), *made.glob("*.yaml")):
            shutil.copy(file, place)
        return Path(shutil.copytree(made / "runs" / name, place / "runs" / name))

    return run_once


@pytest.fixture
def explored(recipe):
    """A run of two iterations that has explored once and credited nothing."""
    return explored_by(recipe, EPISODES)
