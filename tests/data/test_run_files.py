"""Notes in a run folder, as they are read back."""

import json
import os

import pytest

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
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
    """The killed process showed its last sign of life after 90 s. A damaged note costs only its time."""
    recipe = parse(Recipe, RECIPE | {"output": str(tmp_path)})
    with Run(recipe) as run, run.stage("expert"):
        files = [run.paths.manifest, run.paths.progress]
        midway = [file.read_text() for file in files]

    def resumed(began, progress):
        for file, text in zip(files, (midway[0], progress), strict=True):
            file.write_text(text)
        os.utime(files[1], (began + 90, began + 90))
        with Run(recipe) as again, again.stage("expert"):
            pass
        return again.manifest["stages"]["expert"]["seconds"]

    began = json.loads(midway[1])["began"]
    assert 90 <= resumed(began, midway[1]) < 150
    assert resumed(began, midway[1].replace('"stage": "expert"', '"stage": "sft"')) < 60
    assert resumed(began, "{") < 60
