"""Loss, explorer, row maker and engine in a file of the user's, named as `file.py:Class`, without a package."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from perturn.cli import app
from perturn.config.outside_files import named_inputs
from perturn.config.parsing import parse, to_mapping
from perturn.config.recipe import Recipe, read_recipe
from perturn.config.recipe_difference import counted_settings
from perturn.config.sections import ModelSettings, ProtocolSettings
from perturn.config.stages import policy_of, rows_name
from perturn.data.run_folder import Run, resolve_recipe
from perturn.errors import ConfigError, RunError
from perturn.run.execute import open_run
from perturn.run.protocol_rules import ruled
from perturn.study.settings import read_study

MINE = '''
"""Classes of a user."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from perturn.extend import (
    COUNT, EFFORT, EngineTraits, Explorer, LocalSettings, Made, PreferencePair, RowTraits, bounded, make_jobs
)
from perturn.extend.tensors import LOSSES

pair = len


class SFT(LOSSES["dpo"]):
    """Named like a policy, where a file system ignores case."""


@dataclass(frozen=True)
class HalfDPO(LOSSES["dpo"]):
    """Half of DPO's loss."""

    def __call__(self, *given, **named):
        return super().__call__(*given, **named) / 2


@dataclass(frozen=True)
@bounded
class Twice(Explorer):
    """Play each task more often."""

    times: Annotated[int, COUNT] = 2

    def jobs(self, inputs, number):
        return make_jobs(inputs.tasks, inputs.seed, self.samples * self.times, inputs.iteration)


@dataclass(frozen=True)
class Unpacked:
    """The local engine without packing."""

    traits: ClassVar[EngineTraits] = EngineTraits(serves_checkpoints=True)

    width: Annotated[int, EFFORT] = 1

    def check(self, empty_model, recipe):
        """Any policy."""

    def open(self, serving):
        return LocalSettings(pack=False).open(serving)


@dataclass(frozen=True)
class FirstOverOthers:
    """Pair the first episode of a task with each other one."""

    traits: ClassVar[RowTraits] = RowTraits("pairs", several_samples=True)
    needs: ClassVar = ()

    most: int = 10
    words: str = ""

    def __call__(self, inputs):
        first = {}
        for one in inputs.explored:
            first.setdefault(one.task.id, one)
        pairs = [PreferencePair(first[one.task.id], one) for one in inputs.explored if one.sample > 0]
        return Made(pairs[: self.most], {"kept": len(pairs)})
'''
RECIPE = """
name: mine
output: runs
model: {name: tiny, dtype: float32}
environment: {name: alfworld-like}
protocol: {name: alfworld-lab, max_turns: 2}
engine: {name: mine.py:Unpacked}
explore:
  name: mine.py:Twice
  times: 2
  samples: 2
  tasks: {n: 2}
  sampling: {temperature: 1.0, max_new_tokens: 4}
rows: {name: mine.py:FirstOverOthers, most: 3}
align: {loss: {name: mine.py:HalfDPO, beta: 0.3}, learning_rate: 1.0e-3}
evaluate:
  tasks: {split: valid_seen, n: 1}
  sampling: {temperature: 0.0, max_new_tokens: 4}
"""


@pytest.fixture
def perturn(tmp_path, tiny_folder, monkeypatch):
    """Call the command line in a folder that has the classes, a policy and a recipe: (exit code, all output)."""
    shutil.copytree(tiny_folder, tmp_path / "tiny")
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)

    def call(*words):
        found = CliRunner().invoke(app, words, catch_exceptions=False)
        return found.exit_code, " ".join(found.output.split())

    return call


def test_a_run_takes_loss_explorer_row_maker_and_engine_from_a_file(perturn, tmp_path):
    """The policy has the name of the loss's class; the file is recorded, and a run does not continue with another."""
    code, said = perturn("run", "recipe.yaml")
    assert code == 0, said
    run = tmp_path / "runs/mine"
    inputs = json.loads((run / "manifest.json").read_text())["inputs"]

    assert len((run / "trajectories/explore.jsonl").read_text().splitlines()) == 2 * 2 * 2
    assert len((run / "pairs.jsonl").read_text().splitlines()) == 3
    assert (run / "checkpoints/HalfDPO/model.safetensors").is_file()
    assert (run / "evaluation/HalfDPO.jsonl").is_file()
    own = {"align.loss": "HalfDPO", "explore": "Twice", "rows": "FirstOverOthers", "engine": "Unpacked"}
    for key, name in own.items():
        assert inputs[f"{key}.name"]["given"] == f"mine.py:{name}"
        assert list(inputs[f"{key}.name"]["files"]) == ["mine.py"]

    assert perturn("run", "recipe.yaml")[0] == 0
    (tmp_path / "mine.py").write_text(MINE.replace("/ 2", "/ 4"))
    with pytest.raises(RunError, match=r"mine\.py changed since this run was made"):
        perturn("run", "recipe.yaml")


def test_a_dry_run_counts_the_jobs_of_the_explorer(perturn):
    """Two tasks, two samples, and each twice."""
    code, printed = perturn("run", "recipe.yaml", "--dry-run")

    assert code == 0
    assert "explore to do 8 episodes" in printed


def test_a_resolved_recipe_names_the_classes_again(perturn, tmp_path):
    """Also if the file is found next to the recipe, and not in the current folder."""
    (tmp_path / "there").mkdir()
    for name in ("mine.py", "recipe.yaml"):
        (tmp_path / name).rename(tmp_path / "there" / name)

    recipe = read_recipe("there/recipe.yaml")

    assert (rows_name(recipe), policy_of(recipe, 1)) == ("there/mine.py:FirstOverOthers", "HalfDPO")
    assert parse(Recipe, to_mapping(recipe)) == recipe
    assert to_mapping(recipe)["explore"]["name"] == "there/mine.py:Twice"


def test_a_finished_run_is_read_from_another_folder(perturn, tmp_path, monkeypatch):
    """Its recorded files say where the classes are."""
    code, said = perturn("run", "recipe.yaml", "evaluate=null")
    assert code == 0, said
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    code, said = perturn("report", "../runs/mine")

    assert code == 0, said
    assert resolve_recipe(tmp_path / "runs/mine").rows.most == 3
    (tmp_path / "mine.py").unlink()
    assert perturn("report", "../runs/mine")[0] == 0  # code that is gone does not keep a run from being read


def test_recorded_rules_are_read_from_another_folder(perturn, tmp_path, monkeypatch):
    """A recipe without `protocol` takes the rules of its run, whose classes are in the recipe's folder."""
    with open_run(Path("recipe.yaml")) as run:
        recorded = run.recipe.protocol
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    found = ruled(read_recipe(Path("../recipe.yaml"), ["protocol=null", "output=../runs"]))

    assert found.protocol == recorded


def test_rules_of_ones_own_name_their_format(tmp_path):
    """A class with format plain would get another format. A run that began without a format keeps its rules."""
    section = ProtocolSettings("mine", system="Go.", max_turns=3)
    recipe = Recipe("r", ModelSettings("m"), {"name": "own"}, section, output=str(tmp_path))

    with pytest.raises(
        ConfigError, match=r"'mine' is not a named one, so set protocol\.format, protocol\.system"
    ):
        ruled(recipe)

    Run(recipe).close()
    assert ruled(recipe) is recipe


def test_settings_of_a_class_may_name_files_and_what_changes_no_result(perturn, tmp_path):
    """A file that a setting names is recorded with the run; a setting that is marked EFFORT may differ on resuming."""
    (tmp_path / "words.txt").write_text("a")
    recipe = read_recipe(tmp_path / "recipe.yaml", ["rows.words=words.txt"])

    found = [(each.text, each.kind) for each in named_inputs(recipe) if each.setting == "rows.words"]
    assert found == [("words.txt", "path")]
    assert "engine.width" not in counted_settings(recipe)
    assert "engine.name" in counted_settings(recipe)


def test_an_override_replaces_a_class_whose_file_is_gone(perturn, tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("mine.py:FirstOverOthers, most: 3", "gone.py:Rows"))

    recipe = read_recipe(tmp_path / "recipe.yaml", ["rows.name=group-pairs"])

    assert rows_name(recipe) == "group-pairs"


def test_a_study_finds_classes_next_to_itself_and_to_its_recipe(perturn, tmp_path, monkeypatch):
    study = {"name": "s", "recipe": "recipe.yaml", "methods": {"a": {"rows.name": "mine.py:FirstOverOthers"}}}
    study |= {"test": {"tasks": {"split": "valid_seen", "n": 1}}}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    read, recipe = read_study(Path("../study.yaml"))

    assert read.methods["a"]["rows.name"] == "../mine.py:FirstOverOthers"
    assert recipe["explore"]["name"] == "../mine.py:Twice"


@pytest.mark.parametrize(
    ("word", "says"),
    [
        (
            "rows.name=mine.py:FirstOverOther",
            "the module has no 'FirstOverOther'.* Did you mean 'FirstOverOthers'",
        ),
        ("rows.name=mine.py:pair", "rows.name 'mine.py:pair' must be a class"),
        ("rows.name=mine.py:Twice", "row maker Twice must "),
        ("explore.name=mine.py:FirstOverOthers", "explorer FirstOverOthers must "),
        ("align.loss.name=mine.py:Twice", "loss Twice must have 'credit'"),
        ("align.loss.name=other.py:Loss", "there is no file other.py"),
        ("rows.least=3", "unknown key 'rows.least'. Known: rows.most"),
        ("explore.times=0", "explore.times must be "),
        ("rows.name=builtins:type", "<class 'type'> takes no settings"),
        ("align.loss.name=mine.py:SFT", "align.loss.name must name a class that is not called like a policy"),
    ],
)
def test_a_class_that_does_not_fit_is_rejected_before_work(perturn, tmp_path, word, says):
    with pytest.raises(ConfigError, match=says):
        perturn("run", "recipe.yaml", word, "--dry-run")

    assert not (tmp_path / "runs").exists()
