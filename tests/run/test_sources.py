"""Sources of rows in a recipe: read by check and stages, and kept as inputs with digests."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.config.row_maker_settings import RowTraits
from perturn.config.sections import Tasks
from perturn.data.file_seals import read_manifest
from perturn.data.store import read_pairs, write_records
from perturn.display.progress_bars import Work
from perturn.envs.alfworld.generated_games import ALFWorldLike
from perturn.errors import ConfigError, DataError, RunError
from perturn.formats import hub_and_parquet
from perturn.run.execute import check, open_run, run_stages
from perturn.run.recorded_inputs import changes
from perturn.run.stages.row_stage import check_experts
from perturn.run.task_lists import choose_tasks
from perturn.types import Action, Task, Trajectory, Turn

PAIRS = [
    {
        "conversations": [{"from": "human", "value": "a"}],
        "chosen": {"from": "gpt", "value": f"ok {n}"},
        "rejected": {"from": "gpt", "value": "no"},
    }
    for n in range(3)
]


@pytest.fixture
def beside(tmp_path, monkeypatch, tiny_folder):
    """The working directory, with a model and pairs of three kinds."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_folder, "base")
    Path("array.json").write_text(json.dumps(PAIRS, indent=2))
    datasets.Dataset.from_list(PAIRS).to_parquet("rows.parquet")
    datasets.Dataset.from_list(PAIRS).save_to_disk("saved", num_shards=2)
    return tmp_path


def recipe_of(file):
    """An alignment on pairs of the user's."""
    data = {"name": "aligned", "model": {"name": "base"}, "align": {"loss": {"name": "dpo"}}}
    return parse(Recipe, data | {"rows": {"name": "file", "path": file}})


def paired(file):
    """The run, after its pairs are made."""
    with open_run(recipe_of(file), [], "pair") as run:
        run_stages(run, "pair")
    return run.folder


@pytest.mark.parametrize("file", ["array.json", "rows.parquet", "saved"])
def test_pairs_come_from_every_source_and_have_digests(beside, file):
    """A run on a source that has changed since is refused."""
    folder = paired(file)

    assert [pair.chosen.turns[0].action.text for pair in read_pairs(folder / "pairs.jsonl")] == [
        "ok 0",
        "ok 1",
        "ok 2",
    ]
    noted = read_manifest(folder)["inputs"]["rows.path"]
    assert len(noted["files"]) == (4 if file == "saved" else 1)
    assert noted["kind"] == "rows"
    changed = Path(file) / "data-00001-of-00002.arrow" if file == "saved" else Path(file)
    changed.write_bytes(changed.read_bytes() + b" ")
    with pytest.raises(RunError, match=f"rows.path: {changed.name} changed since this run was made"):
        open_run(folder, [], "train")


def test_a_data_set_of_the_hub_has_the_digest_of_its_cached_files(beside, monkeypatch):
    """They are gone where the cache is cleared, which matters to no stage that has read them."""
    held = datasets.load_from_disk("saved")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.DatasetDict({"train": held}))
    hub_and_parquet.hub_rows.cache_clear()
    folder = paired("owner/name:train")
    noted = read_manifest(folder)["inputs"]

    assert sorted(noted["rows.path"]["files"]) == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    assert changes(noted) == []
    shutil.rmtree("saved")
    assert [(each.setting, each.gone) for each in changes(noted)] == [("rows.path", True)]
    hub_and_parquet.hub_rows.cache_clear()


@pytest.mark.parametrize(
    ("file", "error", "says"),
    [
        ("base", ConfigError, "rows.path: base: this is the folder of a model"),
        ("none.jsonl", ConfigError, "rows.path: none.jsonl cannot be read: there is no such file or folder"),
        ("base/model.safetensors", ConfigError, "rows.path: .*this is binary data"),
        ("base/tokenizer.json", DataError, "tokenizer.json:1: expected one of the forms"),
    ],
)
def test_what_holds_no_rows_is_refused_before_work(beside, file, error, says):
    with pytest.raises(error, match=says):
        check(recipe_of(file))


def test_rows_are_counted_while_a_run_opens(beside, monkeypatch):
    """Many rows take long to check."""
    shown, end = [], Work.end
    monkeypatch.setattr(Work, "end", lambda work: shown.append((work.what, work.note)) or end(work))

    check(recipe_of("array.json"))

    assert shown == [("checking rows.path", "3 rows")]


def test_an_expert_file_without_an_explored_task_is_refused_before_work(tmp_path):
    """A failure on an explored task makes no pair, and a success does."""
    data = {
        "name": "paired",
        "model": {"name": "tiny-agent"},
        "environment": {"name": "alfworld-like"},
        "protocol": {"name": "alfworld-lab"},
        "expert": {"file": str(tmp_path / "e.jsonl")},
        "explore": {"tasks": {"n": 1}},
        "align": {"loss": {"name": "dpo"}},
        "evaluate": None,
    }
    (task,) = choose_tasks(ALFWorldLike(), Tasks(split="train", n=1))
    turns = (Turn(({"role": "user", "content": "u"},), Action("a")),)
    rows = [Trajectory(Task("other"), turns, success=True), Trajectory(task, turns)]
    write_records(tmp_path / "e.jsonl", rows)

    with pytest.raises(ConfigError, match=r"expert\.file: no success is on an explored .* 'other'; "):
        check(parse(Recipe, data))
    write_records(tmp_path / "e.jsonl", rows[1:])
    with pytest.raises(
        ConfigError, match=r"expert\.file: no row is a success with a task; set `success: true`"
    ):
        check(parse(Recipe, data))
    write_records(tmp_path / "e.jsonl", [rows[0], replace(rows[1], success=True)])
    assert check(parse(Recipe, data)).tasks["explore"] == [task]


@pytest.mark.parametrize(
    ("own", "refused"), [({"several_samples": True}, False), ({"corrects": 1}, False), ({}, True)]
)
def test_a_row_maker_that_can_pair_the_policys_own_episodes_needs_no_expert(own, refused):
    recipe = SimpleNamespace(rows=SimpleNamespace(traits=RowTraits("pairs", expert=True, **own)))

    with pytest.raises(ConfigError, match="no row is a success with a task") if refused else nullcontext():
        check_experts(recipe, {"expert.file": set()}, [Task("t")])
