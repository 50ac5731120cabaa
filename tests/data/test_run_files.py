"""Notes in a run folder, as they are read back."""

import json
import os
import time

import pytest

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.data import run_folder
from perturn.data.run_files import read_note
from perturn.data.run_folder import Run
from support.watched import RECIPE


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "-1e999", "-" + "9" * 400, "9" * 5000])
def test_what_is_no_number_reads_as_null(tmp_path, number):
    """JSON has no such number, and nothing that is made from a note could be written as JSON."""
    file = tmp_path / "note.json"
    file.write_text(f'{{"name": {number}, "other": 1.5}}')

    assert read_note(file, dict) == {"name": None, "other": 1.5}


def test_a_resumed_stage_counts_the_time_of_a_killed_process(tmp_path):
    """The process worked 90 s by its own clock. A kill before the next note counts them once, also in a copied folder.

    A damaged note, a note of another stage and a note of an earlier version lose the time.
    """
    recipe = parse(Recipe, RECIPE | {"output": str(tmp_path)})
    with Run(recipe) as run, run.stage("expert"):
        files = [run.paths.manifest, run.paths.progress]
        midway = [file.read_text() for file in files]

    def resumed(progress):
        for file, text in zip(files, (midway[0], progress), strict=True):
            file.write_text(text)
        os.utime(files[1], (1e10, 1e10))
        with Run(recipe) as again:
            again._begin_stage("expert", ())
            with again.stage("expert"):
                pass
        return again.manifest["stages"]["expert"]["seconds"]

    noted = json.loads(midway[1])
    assert 90 <= resumed(json.dumps(noted | {"spent": 90})) < 150
    assert resumed(json.dumps(noted | {"spent": 90, "stage": "sft"})) < 60
    assert resumed(json.dumps({key: value for key, value in noted.items() if key != "spent"})) < 60
    assert resumed("{") < 60


def test_each_heartbeat_notes_the_time_of_a_stage(tmp_path, monkeypatch):
    """The time grows, although no time left is known."""
    monkeypatch.setattr(run_folder, "HEARTBEAT_SECONDS", 0.0)
    with Run(parse(Recipe, RECIPE | {"output": str(tmp_path)})) as run, run.stage("expert"):
        spent = [json.loads(run.paths.progress.read_text())["spent"]]
        deadline = time.monotonic() + 60
        while spent[-1] == spent[0] and time.monotonic() < deadline:
            time.sleep(0.1)
            spent.append(json.loads(run.paths.progress.read_text())["spent"])

    assert spent[-1] > spent[0]
