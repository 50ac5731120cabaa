"""Inputs that a world reads: its code, its data, and what it declares."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from perturn.config.evaluation_settings import Evaluate
from perturn.config.outside_files import named_inputs
from perturn.config.parsing import parse
from perturn.data.code_inputs import files_beside
from perturn.data.file_seals import read_manifest
from perturn.errors import ConfigError, RunError
from perturn.io.user_code import module_files
from perturn.run.execute import open_run
from perturn.run.recorded_inputs import changes, refuse_changed
from support.inputs import WORLD, edited, made, noted, played, recipe_of


@pytest.mark.parametrize("file", ["world.py", "helper_of_world.py", "games.json", "rules.txt"])
def test_code_and_data_of_a_world_are_inputs(beside, file):
    """The module, a module that it imports, a file that a setting names, and a file that its code names."""
    recipe = played(games="games.json", mode="easy")
    folder = made(recipe, "evaluate-base")
    refuse_changed(recipe)
    edited(file)

    with pytest.raises(
        RunError, match=rf"environment.*: {file.replace('.', '[.]')} changed since this run was made"
    ):
        open_run(folder, [], "evaluate")


@pytest.mark.parametrize(
    "code",
    [
        'Path(__file__).parent / "data" / "deep" / "words.txt"',
        'Path(__file__).parent.joinpath("data", "deep", "words.txt")',
        'os.path.join(os.path.dirname(__file__), "data", "deep", "words.txt")',
        'f"{os.path.dirname(__file__)}/data/deep/words.txt"',
        'os.path.dirname(__file__) + "/data/deep/words.txt"',
        '(HERE / "data/deep").glob("*.txt")',
        '(HERE / "data").rglob("*.txt")',
    ],
)
def test_files_that_code_names_in_parts_are_inputs(beside, code):
    """Beside the module, which need not be in the current folder; a folder counts with its files."""
    Path("own/data/deep").mkdir(parents=True)
    Path("own/data/deep/words.txt").write_text("go on")
    Path("own/world.py").write_text(
        f"import os\nfrom pathlib import Path\nclass World:\n    words = lambda: {code}\n"
    )
    _, files = module_files("own/world.py:World")

    assert files_beside(files) == [beside / "own/data/deep/words.txt"]


def test_files_of_the_current_folder_that_code_names_are_inputs(beside):
    """A world's module may be elsewhere; names of the folders above it, and texts that are no paths, are none."""
    Path("own").mkdir()
    Path("own/world.py").write_text(
        'import os\nopen("games.json")\nos.path.join("..", "."), ", ".join("a"), 1 / 2, "\\0.txt"\n'
    )

    assert files_beside([beside / "own/world.py"]) == [beside / "games.json"]


def test_data_of_a_class_behind_an_adapter_is_an_input(beside):
    """The class that `make` names is the user's."""
    recipe = played(name="gymnasium", make="world.py:World")

    assert noted(made(recipe))["environment.make (files that its code names)"] == [
        "games.json",
        "rules.txt",
    ]


def test_what_a_world_more_likely_writes_is_no_input(beside):
    """By the name of the setting."""
    folder = made(played(games="games.json", log="seen.log"))
    Path("seen.log").write_text("played")

    assert changes(read_manifest(folder)["inputs"]) == []


def test_a_world_says_itself_what_it_reads(beside):
    """Then names in its code are not looked at."""
    Path("more").mkdir()
    Path("more/one.json").write_text("[1]")
    Path("own.py").write_text(_world_that_reads('lambda settings: ["more", settings["games"]]'))
    folder = made(played(name="own.py:World", games="games.json"))

    assert noted(folder)["environment"] == ["games.json", "more/one.json"]
    assert "environment.name (files that its code names)" not in noted(folder)


def _world_that_reads(paths):
    """The world's module, whose class declares what it reads."""
    traits = f'    name = "world-1"\n    traits = EnvironmentTraits(reads={paths})\n'
    return "from perturn.traits import EnvironmentTraits\n" + WORLD.replace('    name = "world-1"\n', traits)


@pytest.mark.parametrize(
    ("reads", "found"),
    [
        ('"games.json"', ["games.json"]),
        ('Path("games.json")', ["games.json"]),
        ('("games.json", Path("rules.txt"))', ["games.json", "rules.txt"]),
        (
            "lambda settings, more: []",
            "reads of own.py:World gives no paths: TypeError.*or a function from the settings",
        ),
        ("[3]", "reads of own.py:World gives no paths: TypeError"),
    ],
)
def test_one_path_is_a_declaration_too(beside, reads, found):
    """What is none is said as a mistake of the class."""
    Path("own.py").write_text(_world_that_reads(reads))
    sys.modules.pop("own", None)
    recipe = played(name="own.py:World")

    if isinstance(found, list):
        assert noted(made(recipe))["environment"] == found
    else:
        with pytest.raises(ConfigError, match=found):
            made(recipe)


def test_inputs_of_our_own_environments(beside, monkeypatch):
    """Settings that are marked, within mappings too, and the folder of an environment variable."""
    monkeypatch.setenv("ALFWORLD_DATA", str(beside / "games"))
    (beside / "games").mkdir()
    (beside / "games" / "train.jsonl.xz").write_bytes(b"x")
    Path("questions.jsonl").write_text("{}")
    rules = {"name": "tiny", "format": "action", "system": "Go.", "max_turns": 2}
    hotpotqa = {"name": "hotpotqa", "questions": {"train": "questions.jsonl"}, "corpus": "pairs.jsonl"}

    made_of = {
        name: noted(
            made(recipe_of(name=name, rows=None, align=None, environment=environment, protocol=rules))
        )
        for name, environment in (("one", hotpotqa), ("two", {"name": "alfworld"}))
    }

    assert made_of["one"]["environment.questions.train"] == ["questions.jsonl"]
    assert made_of["one"]["environment.corpus"] == ["pairs.jsonl"]
    assert made_of["two"]["environment"] == ["train.jsonl.xz"]


def test_code_that_other_sections_name_is_an_input(beside):
    """Credits and functions that choose; packages that are installed, and Perturn itself, are none."""
    credit = {"name": "helper_of_world:Credit", "reduction": "sum", "weights": "games.json"}
    choice = {
        "tasks": {"split": "test"},
        "select": {"name": "world.py:choose"},
        "sampling": {"temperature": 1.0},
    }

    named = {
        each.setting: module_files(each.text)[1] if each.kind == "code" else each.kind
        for each in named_inputs(replace(played(), credit=credit, evaluate=parse(Evaluate, choice)))
    }

    assert named["credit.name"] == [beside / "helper_of_world.py"]
    assert named["evaluate.select.name"] == [beside / "world.py", beside / "helper_of_world.py"]
    assert named["credit.weights"] == "path"
    assert module_files("yaml:safe_load")[1] == module_files("perturn.envs.gymnasium:Gymnasium")[1] == []
    assert module_files("nowhere.to_be_found:Class")[1] == module_files("gone.py:Class")[1] == []
