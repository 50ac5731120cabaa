"""Recipes that read files of the user, and runs of these recipes."""

from pathlib import Path

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.data.file_seals import read_manifest
from perturn.data.run_folder import Run
from perturn.io.atomic_write import write_whole
from perturn.run.recorded_inputs import note_inputs

WORLD = '''
"""A world whose code is in two files."""
from pathlib import Path
from helper_of_world import LIMIT
from perturn.types import Observation, Task

class World:
    name = "world-1"
    def __init__(self, games="games.json", mode="easy"):
        self.games, self.rules = games, Path(__file__).with_name("rules.txt")
    def tasks(self, split):
        return [Task("t/0", "k", split)]
    def reset(self, task, seed=0):
        return Observation("go")
    def step(self, action):
        return Observation("on", reward=1.0, terminated=True)
    def close(self):
        pass
'''
PAIR = {
    "prompt": [{"role": "user", "content": "a"}],
    "chosen": [{"role": "assistant", "content": "ok"}],
    "rejected": [{"role": "assistant", "content": "no"}],
}


def recipe_of(**changes):
    """Return a recipe of an alignment on the user's pairs."""
    data = {
        "name": "aligned",
        "model": {"name": "base"},
        "rows": {"name": "file", "path": "pairs.jsonl"},
        "align": {"loss": {"name": "dpo"}},
    }
    return parse(Recipe, data | changes)


def played(**settings):
    """Return a recipe of a score in the user's environment."""
    return recipe_of(
        rows=None,
        align=None,
        environment={"name": "world.py:World", **settings},
        protocol={"name": "tiny", "format": "action", "system": "Go.", "max_turns": 2},
        evaluate={"tasks": {"split": "test"}},
        worlds={"processes": 0},
    )


def made(recipe, *stages):
    """Create the run of a recipe with some stages marked as done."""
    with Run(recipe) as run:
        note_inputs(run)
        for stage in stages:
            with run.stage(stage, run.paths.metrics(stage)):
                write_whole(run.paths.metrics(stage), stage)
    return run.folder


def edited(file):
    """Change the content of a file without changing its size."""
    data = bytearray(Path(file).read_bytes())
    data[-2] ^= 1
    Path(file).write_bytes(data)


def noted(folder):
    """Return the recorded inputs of the manifest: the setting of each input, with the names of its files."""
    return {key: sorted(one["files"]) for key, one in read_manifest(folder)["inputs"].items()}
