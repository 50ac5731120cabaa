"""Tables that packages of others add to: a whole run with such a package, and what goes wrong with one."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest

import guest
from perturn.cli import main
from perturn.config.sections import Worlds
from perturn.data.store import read_trajectories
from perturn.envs.abilities import ABILITIES, abilities_of, ability
from perturn.envs.world_process import ProcessWorlds
from perturn.errors import ConfigError
from perturn.table import Table, check_names, locate, name_of, package_of

RECIPE = """
name: guests
output: runs
model: {name: tiny, dtype: float32}
environment: {name: guest-corridor}
protocol: {name: guest-rules}
engine: {name: guest-parrot, word: left}
credit: {name: guest-half, value: 0.25}
sft: {loss: {name: sft}, tasks: {per_kind: 2}, learning_rate: 1.0e-3}
explore: {tasks: {per_kind: 2, skip: 2}, sampling: {temperature: 1.0, max_new_tokens: 4}}
align: {loss: {name: guest-twice}, learning_rate: 1.0e-3}
evaluate: {tasks: {split: test, per_kind: 1}, sampling: {max_new_tokens: 4}}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder):
    """A folder with the package of someone else's installed into it, a policy and a recipe."""
    folder = tmp_path_factory.mktemp("guests")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run(
        [*command, "--target", folder / "site", guest.build_wheel(folder)], check=True, timeout=120
    )
    shutil.copytree(tiny_folder, folder / "tiny")
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def perturn(place):
    """Call the command line in a process that has the package: (exit code, standard output, notices)."""

    def call(*words):
        paths = [str(place / "site"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PERTURN_CACHE": str(place / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        found = subprocess.run(
            [sys.executable, "-c", "from perturn.cli import main; main()", *words],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return found.returncode, found.stdout, " ".join(found.stderr.split())

    return call


@pytest.fixture(scope="module")
def run(place, perturn):
    """The folder of a run with a loss, a credit, an environment, an engine and a protocol of the package."""
    code, _, notices = perturn("run", "recipe.yaml")
    assert code == 0, notices
    return place / "runs" / "guests"


def test_a_recipe_runs_with_entries_of_a_foreign_package(run):
    """The base policy is the package's own; the trained ones are served by what its engine opens for them."""
    manifest = json.loads((run / "manifest.json").read_text())
    policies = [
        next(read_trajectories(run / "evaluation" / f"{name}.jsonl")).policy for name in ("base", "sft")
    ]
    weights = {
        weight
        for line in (run / "metrics" / "confidence.jsonl").read_text().splitlines()
        for weight in json.loads(line)["chosen"]["weight"]
    }

    assert all(stage["done"] for stage in manifest["stages"].values())
    assert policies[0] == "parrot-left"
    assert policies[1].startswith("sft@")
    logged = [json.loads(line) for line in (run / "metrics" / "align.jsonl").read_text().splitlines()]

    assert weights == {0.25}
    assert all(entry["certainty"] < 0 for entry in logged if "loss" in entry)
    assert (run / "checkpoints" / "guest-twice" / "config.json").is_file()


def test_the_manifest_has_the_versions_of_what_was_used(run):
    """The package's own, and what its environment names; nothing of environments that were not used."""
    versions = json.loads((run / "manifest.json").read_text())["versions"]

    assert versions["perturn-guest"] == "1.5"
    assert {"python", "perturn", "torch", "transformers", "pyyaml"} <= versions.keys()
    assert not {"scienceworld", "bm25s", "openai"} & versions.keys()


@pytest.mark.slow
@pytest.mark.usefixtures("run")
def test_what_a_foreign_setting_changes_is_said_at_its_field(perturn):
    """`patience` is marked as an effort, `word` is not."""
    slower = perturn("report", "recipe.yaml", "engine.patience=3")
    other = perturn("report", "recipe.yaml", "engine.word=right")

    assert slower[0] == 0, slower
    assert other[0] == 2
    assert "was made by another recipe: engine.word is 'left' there and 'right' here" in other[2]


@pytest.mark.slow
def test_a_foreign_engine_says_before_work_what_is_wrong(perturn, place):
    code, _, notices = perturn("run", "recipe.yaml", "name=wrong", "engine.word=up")

    assert (code, notices) == (2, "error: engine.word must be left or right, got 'up'.")
    assert not (place / "runs" / "wrong").exists()


@pytest.mark.parametrize(("kind", "name"), [("environments", "guest-corridor"), ("protocols", "guest-rules")])
def test_foreign_entries_are_listed(perturn, kind, name):
    code, listed, _ = perturn("list", kind, "--json")

    assert code == 0
    assert name in json.loads(listed)


def install(folder, monkeypatch, entries, group="perturn.things"):
    """Metadata of an installed package that adds entries to a group."""
    info = folder / "perturn_other-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: perturn-other\nVersion: 1\n")
    (info / "entry_points.txt").write_text(guest.entry_points({group: entries}))
    monkeypatch.syspath_prepend(folder)


def test_an_entry_with_a_name_that_is_taken_is_refused(tmp_path, monkeypatch):
    """Which of two is meant must not depend on the order of folders."""
    install(tmp_path, monkeypatch, {"one": "collections:OrderedDict"})
    table = Table("perturn.things", {"one": int})

    with pytest.raises(
        ConfigError, match=r"package perturn-other adds 'one' to perturn.things, where there is one"
    ):
        table["one"]


@pytest.mark.parametrize(
    ("where", "says"),
    [("no_such_module:x", "ModuleNotFoundError"), ("collections:NoSuchThing", "AttributeError")],
)
def test_an_entry_that_cannot_be_imported_says_whose_it_is(tmp_path, monkeypatch, where, says):
    """The other entries stay usable."""
    install(tmp_path, monkeypatch, {"broken": where})
    table = Table("perturn.things", {"one": "builtins:int"})

    with pytest.raises(
        ConfigError, match=f"'broken' of package perturn-other cannot be loaded from .*{says}"
    ):
        table["broken"]

    assert table["one"] is int
    assert (package_of("perturn.things", "broken"), package_of("perturn.things", "one")) == (
        "perturn-other",
        None,
    )


def test_an_ability_of_a_package_is_called_in_a_process(tmp_path, monkeypatch):
    """The package adds its signature; any environment with the method then has the ability."""
    install(tmp_path, monkeypatch, {"whisper": "whisper:WHISPER"}, "perturn.abilities")
    monkeypatch.setattr(ABILITIES, "_foreign", Table("perturn.abilities", {})._foreign)
    (tmp_path / "whisper.py").write_text(WHISPER)

    world = ProcessWorlds({"name": "whisper:Game"}, Worlds())()

    assert "whisper" in abilities_of(world)
    assert ability(world, "whisper")(["a", "b"]) == {"heard": 2}
    world.close()


WHISPER = """
from perturn.traits import Ability

WHISPER = Ability(("actions",), "plain")


class Game:
    def tasks(self, split): return [1]
    def reset(self, task): return "Go."
    def step(self, action): return "Over.", 1, True
    def whisper(self, actions): return {"heard": len(actions)}
"""


def test_templates_are_listed_with_what_was_changed(monkeypatch, capsys):
    """`perturn list templates` says whose each is."""
    monkeypatch.setattr("sys.argv", ["perturn", "list", "templates", "--json"])

    with pytest.raises(SystemExit) as caught:
        main()

    listed = json.loads(capsys.readouterr().out)
    assert not caught.value.code
    assert listed["qwen3"].startswith("Qwen3. Changed: thoughts stay in every turn")
    assert listed["llama3"] == "Llama 3. Changed: nothing. No tools."


def test_the_recipes_of_the_package_are_listed_with_their_first_comment(monkeypatch, capsys):
    """`perturn list recipes`: each by the name of its file."""
    monkeypatch.setattr("sys.argv", ["perturn", "list", "recipes", "--json"])

    with pytest.raises(SystemExit) as caught:
        main()

    listed = json.loads(capsys.readouterr().out)
    assert not caught.value.code
    assert listed["scienceworld_tlm-dre_demo"] == "tlm-DRE on ScienceWorld with a 135M model."
    assert all(listed.values())


def test_an_object_is_located_by_module_and_name():
    assert locate("perturn.table:Table") is Table


@dataclass(frozen=True)
class _Traits:
    needs_group: bool = False
    unbiased: bool = False


class _Protocol:
    step = steps = None


class _Misspelt(_Protocol):
    need_group = True


class _Beside(_Protocol):
    needs_group = True


class _OfMember:
    def forgett(self) -> None: ...


@dataclass(frozen=True)
class _Settings:
    needs_groups: bool = True
    export: ClassVar[bool] = True


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (
            _Misspelt,
            "credit _Misspelt has 'need_group', which is never read. Did you mean `_Traits(needs_group=...)`?",
        ),
        (
            _Beside,
            "credit _Beside has 'needs_group', which is never read. Did you mean `_Traits(needs_group=...)`?",
        ),
        (_OfMember, "credit _OfMember has 'forgett', which is never read. Did you mean `forget`?"),
    ],
)
def test_an_attribute_that_nobody_reads_is_rejected(entry: type, says: str):
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}$"):
        check_names(entry, kind="credit", known=("step", "forget", "expert"), traits=_Traits)


@pytest.mark.parametrize("entry", [_Protocol, _Settings])
def test_settings_and_names_beside_the_right_one_are_allowed(entry: type):
    """`steps` is beside `step`; `needs_groups` is a setting; `export` is not like enough to `expert`."""
    check_names(entry, kind="credit", known=("step", "forget", "expert"), traits=_Traits)


def test_a_name_is_found_without_loading_other_entries():
    """The entry that lies where the class does is loaded first; a class that lies elsewhere is still found."""
    table = Table(
        "perturn.nowhere",
        {"broken": "perturn.nowhere:Nothing", "mine": f"{Table.__module__}:Table", "other": _Traits},
    )
    moved = Table("perturn.nowhere", {"moved": "perturn.credit:CreditTraits"})

    assert name_of(table, Table) == "mine"
    assert name_of(table, _Traits) == "other"
    assert name_of(moved, moved["moved"]) == "moved"
