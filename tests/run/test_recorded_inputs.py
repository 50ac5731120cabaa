"""Inputs from outside a run folder: a changed one is never taken for the one that the run was made from."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from perturn.cli import main
from perturn.config.evaluation_settings import Evaluate
from perturn.config.outside_files import named_inputs
from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.data import input_digests
from perturn.data.cache_folders import content_digest
from perturn.data.file_seals import file_digest, own_digest, read_manifest
from perturn.data.run_folder import Run, resolve_recipe
from perturn.envs.load_environment import files_beside, module_files
from perturn.errors import ConfigError, RunError
from perturn.estimate.dry_run import make_plan
from perturn.io.atomic_write import write_whole
from perturn.run.execute import open_run, run_stages
from perturn.run.recorded_inputs import changes, note_inputs, refuse_changed
from perturn.run.verify_run import verify

_WORLD = '''
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


@pytest.fixture
def beside(tmp_path, monkeypatch, tiny_folder):
    """The working directory, with a model, pairs, and a world of the user's with its data."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_folder, "base")
    Path("pairs.jsonl").write_text(json.dumps(PAIR) + "\n")
    Path("world.py").write_text(_WORLD)
    Path("helper_of_world.py").write_text("LIMIT = 1\n")
    Path("games.json").write_text("[1]")
    Path("rules.txt").write_text("be kind")
    Path("seen.log").write_text("")
    return tmp_path


def recipe_of(**changes):
    """An alignment on pairs of the user's."""
    data = {
        "name": "aligned",
        "model": {"name": "base"},
        "rows": {"name": "file", "path": "pairs.jsonl"},
        "align": {"loss": {"name": "dpo"}},
    }
    return parse(Recipe, data | changes)


def played(**settings):
    """A score in the world of the user's."""
    return recipe_of(
        rows=None,
        align=None,
        environment={"name": "world.py:World", **settings},
        protocol={"name": "tiny", "format": "action", "system": "Go.", "max_turns": 2},
        evaluate={"tasks": {"split": "test"}},
        worlds={"processes": 0},
    )


def made(recipe, *stages):
    """Make the run of a recipe with some stages done, as far as the test goes."""
    with Run(recipe) as run:
        note_inputs(run)
        for stage in stages:
            with run.stage(stage, run.paths.metrics(stage)):
                write_whole(run.paths.metrics(stage), stage)
    return run.folder


def edited(file):
    """Another content of the same size, now."""
    data = bytearray(Path(file).read_bytes())
    data[-2] ^= 1
    Path(file).write_bytes(data)


def noted(folder):
    """What the manifest holds of the inputs: setting -> names of files."""
    return {key: sorted(one["files"]) for key, one in read_manifest(folder)["inputs"].items()}


def test_the_manifest_has_the_digest_of_each_input(beside):
    """Of each file of a model that a policy depends on; README and hidden files are none."""
    (beside / "base" / "README.md").write_text("hello")

    folder = made(recipe_of(), "pair", "align")

    manifest = read_manifest(folder)
    pairs = manifest["inputs"]["rows.path"]["files"]["pairs.jsonl"]
    assert pairs["sha256"] == file_digest(beside / "pairs.jsonl")
    assert noted(folder)["model.name"] == sorted(set(os.listdir("base")) - {"README.md"})
    assert manifest["sha256"] == own_digest(manifest)


@pytest.mark.parametrize(
    ("file", "setting"),
    [
        ("pairs.jsonl", "rows.path"),
        ("base/model.safetensors", "model.name"),
        ("base/tokenizer.json", "model.name"),
    ],
)
def test_an_edited_input_is_rejected_by_every_command(beside, file, setting):
    """With its setting, both digests and the remedies; also where all is done."""
    folder = made(recipe_of(), "pair", "align")
    before = file_digest(beside / file)
    edited(file)
    says = (
        f"{setting}: {Path(file).name} changed since this run was made \\(sha256 {before[:12]}… → "
        f"{file_digest(beside / file)[:12]}…\\): restore the file, or give the run another name \\(name=...\\), or "
        f"remove runs/aligned to make it anew"
    )

    for command in (None, "pair", "train"):
        with pytest.raises(RunError, match=says):
            open_run(folder, [], command)
        with pytest.raises(RunError, match=says):
            make_plan(folder, [], command)


def test_the_same_content_is_no_change_whatever_its_time(beside, monkeypatch):
    """A touched file is read once; then its new time is noted, and no file is read."""
    folder = made(recipe_of(), "pair", "align")
    os.utime("pairs.jsonl", ns=(1, 1))
    open_run(folder).close()

    assert read_manifest(folder)["inputs"]["rows.path"]["files"]["pairs.jsonl"]["modified_ns"] == 1
    monkeypatch.setattr(input_digests, "content_digest", lambda *_: pytest.fail("a file was read"))
    open_run(folder).close()


@pytest.mark.slow
def test_a_change_that_keeps_size_and_time_is_seen(beside):
    """As `cp -p` and `tar` keep them, in place or behind a link."""
    status = os.stat("pairs.jsonl")
    shutil.copy2("pairs.jsonl", "first.jsonl")
    os.replace("pairs.jsonl", "second.jsonl")
    os.symlink("first.jsonl", "pairs.jsonl")
    folder = made(recipe_of(), "pair", "align")
    edited("second.jsonl")
    os.utime("second.jsonl", ns=(status.st_atime_ns, status.st_mtime_ns))
    os.unlink("pairs.jsonl")
    os.symlink("second.jsonl", "pairs.jsonl")

    with pytest.raises(RunError, match=r"rows\.path: pairs\.jsonl changed since"):
        open_run(folder)


def test_a_digest_that_is_kept_is_not_that_of_another_content(beside):
    """Of a large file: its size and the time of its content are the same."""
    before, status = content_digest(beside / "games.json"), os.stat("games.json")
    edited("games.json")
    os.utime("games.json", ns=(status.st_atime_ns, status.st_mtime_ns))

    assert content_digest(beside / "games.json") == file_digest(beside / "games.json") != before


def test_new_and_missing_files_of_a_model_are_changes(beside):
    folder = made(recipe_of(), "pair", "align")
    (beside / "base" / "extra.json").write_text("{}")

    with pytest.raises(RunError, match=r"extra\.json is new since this run was made"):
        open_run(folder)
    (beside / "base" / "extra.json").unlink()
    (beside / "base" / "tokenizer.json").unlink()
    with pytest.raises(RunError, match=r"tokenizer\.json is gone since this run was made"):
        open_run(folder)


def test_an_input_that_nothing_reads_any_more_may_go(beside):
    """Pairs are in the run once the stage pair is done; the model is read by what is left to do."""
    folder = made(recipe_of(), "pair")
    (beside / "pairs.jsonl").unlink()
    open_run(folder).close()
    shutil.rmtree(beside / "base")

    with pytest.raises(
        RunError, match=r"model\.name: base is gone.*stage align is still to read it: restore it"
    ):
        open_run(folder)
    shutil.rmtree(folder)


def test_a_finished_run_needs_none_of_its_inputs(beside, capsys):
    """Each of its stages is done before."""
    folder = made(recipe_of(), "pair", "align")
    for gone in ("base", "pairs.jsonl"):
        (shutil.rmtree if Path(gone).is_dir() else os.unlink)(gone)

    with open_run(folder) as run:
        run_stages(run)

    assert capsys.readouterr().err.splitlines() == ["pair: done before", "align: done before"]


def test_from_another_directory_relative_paths_are_looked_for_where_they_were(
    beside, tmp_path_factory, monkeypatch
):
    """A finished run is done; an edited file is found there; a stage that would read it says where to go."""
    folder, begun = made(recipe_of(), "pair", "align").absolute(), made(recipe_of(name="begun")).absolute()
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    open_run(folder).close()

    with pytest.raises(RunError, match=f"run the command from where 'base' is a path to {beside / 'base'}"):
        open_run(begun)
    edited(beside / "pairs.jsonl")
    with pytest.raises(RunError, match=r"rows\.path: pairs\.jsonl changed since"):
        open_run(folder)


def test_another_file_of_the_same_name_is_a_change(beside, tmp_path_factory, monkeypatch):
    """An equal copy is none."""
    folder, other = made(recipe_of(), "pair", "align").absolute(), tmp_path_factory.mktemp("elsewhere")
    shutil.copy("pairs.jsonl", other)
    monkeypatch.chdir(other)
    refuse_changed(resolve_recipe(folder))
    edited("pairs.jsonl")

    with pytest.raises(RunError, match=rf"is a path to {beside / 'pairs.jsonl'}, or restore the file"):
        open_run(folder)


@pytest.mark.parametrize("file", ["world.py", "helper_of_world.py", "games.json", "rules.txt"])
def test_code_and_data_of_a_world_are_inputs(beside, file):
    """Its module, a module that this imports, a file that a setting names, and one that its code names."""
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
    return "from perturn.traits import EnvironmentTraits\n" + _WORLD.replace('    name = "world-1"\n', traits)


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


def test_adapters_have_their_model_too(beside):
    """Both folders are inputs."""
    Path("adapters").mkdir()
    Path("adapters/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "base"}))

    folder = made(recipe_of(model={"name": "adapters"}))

    assert noted(folder)["model.name"] == ["adapter_config.json"]
    assert "model.safetensors" in noted(folder)["model.name (base of the adapters)"]


def test_report_and_verify_name_a_changed_input(beside, capsys, monkeypatch):
    """The results of a run folder are still what they were; verify finds a change with the old size and time too."""
    folder = made(recipe_of(), "pair", "align")
    assert verify(folder).changed_inputs == []
    status = os.stat("pairs.jsonl")
    edited("pairs.jsonl")
    os.utime("pairs.jsonl", ns=(status.st_atime_ns, status.st_mtime_ns))

    assert (
        verify(folder).changed_inputs[0].startswith("rows.path: pairs.jsonl changed since this run was made")
    )
    assert verify(folder).damaged == []
    os.utime("pairs.jsonl")
    monkeypatch.setattr("sys.argv", ["perturn", "report", str(folder)])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert "pairs.jsonl changed since this run was made" in capsys.readouterr().err


def test_a_stage_is_not_taken_over_from_a_run_with_other_inputs(beside):
    """Settings are the same, the file is not."""
    theirs = made(recipe_of(name="theirs"), "pair")
    edited("pairs.jsonl")
    with Run(recipe_of(name="ours")) as run:
        note_inputs(run)

        assert not run.take_over("pair", theirs)
        shutil.rmtree(theirs)
        assert run.take_over("pair", made(recipe_of(name="theirs"), "pair"))


def test_several_gpus_are_rejected_before_any_work(beside, monkeypatch):
    """By `run`, `train` and `--dry-run`, and by a run of which only the training is left; not where all is done."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    folder, done = made(recipe_of(name="begun"), "pair"), made(recipe_of(), "pair", "align")

    for source in (recipe_of(name="new"), folder):
        for refused in (
            lambda source=source: open_run(source),
            lambda source=source: make_plan(source, [], "train"),
        ):
            with pytest.raises(ConfigError, match=r"2 GPUs.*launch.processes=2.*CUDA_VISIBLE_DEVICES=0"):
                refused()
    assert not Path("runs/new").exists()
    open_run(folder, [], "pair").close()
    open_run(done).close()
