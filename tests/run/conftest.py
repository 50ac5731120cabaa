"""Fixtures of runs."""

import json
import shutil
from pathlib import Path

import pytest

from perturn.data.store import read_records, read_trajectories
from perturn.run.log_import.import_logs import LogSettings, import_logs
from perturn.types import PreferencePair, WeightedTrajectory
from support.credited import EPISODES, explored_by
from support.inputs import PAIR, WORLD
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


@pytest.fixture
def bring(tmp_path):
    """Import records, or files; (account, rows)."""

    def bring(*logs, **settings):
        records = [each for each in logs if not isinstance(each, Path)]
        files = [each for each in logs if isinstance(each, Path)]
        if records:
            files.append(tmp_path / "log.jsonl")
            files[-1].write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in records))
        made, out = LogSettings(**settings), tmp_path / "out.jsonl"
        account = import_logs(files, out, made)
        kinds = {"labelled": WeightedTrajectory, "pairs": PreferencePair}
        if made.form in kinds:
            return account, list(read_records(out, kinds[made.form]))
        return account, list(read_trajectories(out))

    return bring


@pytest.fixture
def beside(tmp_path, monkeypatch, tiny_folder):
    """The working directory, with a model, pairs, and a world of the user's with its data."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_folder, "base")
    Path("pairs.jsonl").write_text(json.dumps(PAIR) + "\n")
    Path("world.py").write_text(WORLD)
    Path("helper_of_world.py").write_text("LIMIT = 1\n")
    Path("games.json").write_text("[1]")
    Path("rules.txt").write_text("be kind")
    Path("seen.log").write_text("")
    return tmp_path
