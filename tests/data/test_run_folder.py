"""The run folder: never overwritten by another recipe, and honest about what is done."""

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from perturn.bounds import efforts
from perturn.config.parsing import parse, to_mapping, to_yaml
from perturn.config.recipe import Recipe
from perturn.config.sections import Cluster, Worlds
from perturn.data.file_seals import file_digest
from perturn.data.run_folder import Run, refuse_other, resolve_recipe, run_folder
from perturn.engines import ENGINES
from perturn.errors import ConfigError, RunError
from perturn.io.atomic_write import write_whole


@pytest.fixture
def recipe(tmp_path):
    return parse(
        Recipe,
        {
            "name": "one",
            "output": str(tmp_path / "runs"),
            "model": {"name": "smollm2-135m"},
            "environment": {"name": "scienceworld", "kinds": ["find-plant"]},
            "protocol": {"name": "scienceworld-eto"},
            "sft": {"loss": {"name": "sft"}},
            "align": {"loss": {"name": "tlm-dre", "low": 0.2}},
        },
    )


def contents(folder):
    """Every path below a folder with its bytes and the time it was written."""
    return {
        path: (path.is_file() and path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }


def test_a_new_run_records_its_recipe_and_opens_again(recipe):
    """The second opening finds the same recipe and changes nothing."""
    first = Run(recipe)
    before = contents(first.folder)

    second = Run(recipe)

    assert resolve_recipe(first.folder / "recipe.yaml") == recipe
    assert contents(second.folder) == before


def test_what_changes_nothing_of_what_a_run_makes_is_marked_at_its_field():
    """All others make another run."""
    limits = {"concurrency", "requests_per_minute", "max_retries", "timeout", "max_tokens_total", "max_cost"}

    assert efforts(Recipe) == {"name", "output", "worlds", "cluster", "launch", "report_to", "then"}
    assert {name: efforts(entry) for name, entry in ENGINES.items()} == {
        "local": {"cache_gigabytes", "speculate"},
        "api": limits | {"prompt_price", "completion_price"},
        "vllm": {"cache_gigabytes", "handover", "max_retries", "sleep", "timeout"},
        "tinker": {"base_url", "timeout", "patience"},
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"worlds": Worlds(processes=3, max_failed=0.1)},
        {"cluster": Cluster("local")},
        {"report_to": ["tensorboard"]},
        {"engine": {"name": "local", "cache_gigabytes": 1.0}},
    ],
)
def test_a_run_goes_on_with_other_efforts(recipe, changes):
    """Sections that are marked, a section where there was none, and a setting of an engine."""
    folder = Run(recipe).folder

    refuse_other(replace(recipe, **changes))

    assert run_folder(recipe) == folder


def test_memory_and_speed_of_a_training_may_change_unless_bits_must_not(recipe):
    """The remedies of an out-of-memory error; smaller passes round differently, so `deterministic` rejects them."""
    less = {"token_budget": 512, "gradient_checkpointing": True, "save_steps": 5}
    smaller = {
        "sft": replace(recipe.sft, **less),
        "align": replace(recipe.align, **less),
        "explore": replace(recipe.explore, concurrency=2),
        "evaluate": replace(recipe.evaluate, concurrency=2),
    }
    exact = replace(recipe, name="exact", deterministic=True)
    Run(recipe)
    Run(exact)

    refuse_other(replace(recipe, **smaller))

    with pytest.raises(RunError, match=r"align.gradient_checkpointing is False there and True here"):
        refuse_other(replace(exact, align=smaller["align"]))
    with pytest.raises(RunError, match=r"explore.concurrency is 16 there and 2 here"):
        refuse_other(replace(exact, explore=smaller["explore"]))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"align": {"low": 0.5}}, "align.loss.low is 0.2 there and 0.5 here"),
        ({"align": {"high": 0.5}}, "align.loss.high is None there and 0.5 here"),
        (
            {"environment": {"name": "scienceworld", "kinds": []}},
            "environment.kinds is ['find-plant'] there and []",
        ),
    ],
)
def test_a_folder_of_another_recipe_is_refused_with_key_and_both_values(recipe, changes, says):
    """One setting differs; nothing in the folder is written."""
    before = contents(Run(recipe).folder)
    if "align" in changes:
        changes = {"align": replace(recipe.align, loss=recipe.align.loss | changes["align"])}

    with pytest.raises(RunError) as caught:
        Run(replace(recipe, **changes))

    assert f"{run_folder(recipe)} was made by another recipe: {says}" in str(caught.value)
    assert contents(run_folder(recipe)) == before


def test_a_run_folder_may_be_moved_and_renamed(recipe, tmp_path):
    """Name and output say where the folder is, not what is in it."""
    Run(recipe)
    run_folder(recipe).rename(tmp_path / "moved")

    moved = resolve_recipe(tmp_path / "moved")

    assert run_folder(moved) == tmp_path / "moved"
    refuse_other(moved)


def test_a_run_from_another_runs_policy_opens_by_every_path(recipe, tmp_path, monkeypatch):
    """The recorded path of the policy belongs to the folder of the recipe; an override replaces it."""
    monkeypatch.chdir(tmp_path)
    Run(replace(recipe, name="one", output="runs")).close()
    Path("runs/one/checkpoints/sft").mkdir(parents=True)
    model = replace(recipe.model, name="runs/one/checkpoints/sft")
    Run(replace(recipe, name="two", output="runs", model=model)).close()

    for place, path in (
        (".", tmp_path / "runs/two"),
        (".", Path("runs/../runs/two")),
        ("runs", Path("two")),
        ("two", Path(".")),
    ):
        monkeypatch.chdir(place)
        found = resolve_recipe(path)
        refuse_other(found)
        assert Path(found.model.name).samefile(tmp_path / model.name)
    assert resolve_recipe(Path("."), ["model.name=other"]).model.name == "other"


def test_a_folder_named_as_the_model_is_not_taken_for_it(recipe, tmp_path, monkeypatch):
    """With `output: .`, each name of the Hub looks like a path inside the output."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / recipe.model.name).mkdir()
    Run(replace(recipe, name="two", output=".")).close()

    assert resolve_recipe(tmp_path / "two").model.name == recipe.model.name


def test_a_run_folder_is_found_from_inside(recipe, monkeypatch):
    """`perturn report .`: the folder's name comes from where it lies."""
    Run(recipe)
    monkeypatch.chdir(run_folder(recipe))

    found = resolve_recipe(Path("."))

    assert found.name == "one"
    assert run_folder(found).samefile(run_folder(recipe))


def test_a_name_given_beside_a_run_folder_is_another_run(recipe):
    """name=two takes the recorded recipe to a new folder next to the old one."""
    Run(recipe)

    found = resolve_recipe(run_folder(recipe), ["name=two"])

    assert run_folder(found) == run_folder(recipe).with_name("two")


def test_a_folder_whose_name_no_run_can_have_is_refused(recipe, tmp_path):
    """`my run` has a space; a clean error, not a ValueError."""
    Run(recipe)
    run_folder(recipe).rename(tmp_path / "my run")

    with pytest.raises(ConfigError, match=r"^name must be usable as a folder name, got 'my run'"):
        resolve_recipe(tmp_path / "my run")


def test_a_folder_without_a_recipe_is_refused_and_left_alone(recipe):
    """Somebody's notes lie where the run would go."""
    run_folder(recipe).mkdir(parents=True)
    (run_folder(recipe) / "notes.txt").write_text("mine")
    before = contents(run_folder(recipe))

    with pytest.raises(RunError, match=r"holds files but no recipe\.yaml; choose another name"):
        Run(recipe)
    with pytest.raises(RunError, match=r"is no run folder: it has no recipe\.yaml"):
        resolve_recipe(run_folder(recipe))

    assert contents(run_folder(recipe)) == before


def test_a_place_that_cannot_be_written_is_an_error_for_the_user(recipe, tmp_path):
    """`output` is a file, so no folder can be made in it."""
    (tmp_path / "runs").write_text("a file")

    with pytest.raises(RunError, match=r"cannot be written: .*choose another output"):
        Run(recipe)


def test_a_stage_notes_counts_time_and_that_it_is_done(recipe):
    """Not done while it runs, done after it, also for whoever opens the folder next."""
    run = Run(recipe)

    with run.stage("sft") as counts:
        counts["examples"] = 3
        inside = run.is_done("sft")

    entry = Run(recipe).manifest["stages"]["sft"]
    assert not inside
    assert Run(recipe).is_done("sft")
    assert entry["counts"] == {"examples": 3}
    assert entry["seconds"] >= 0
    assert entry["peak_memory_gb"] > 0


def test_a_stage_that_raised_is_not_done_and_its_time_is_added_to_the_next(recipe):
    """7 s were noted by the call that was interrupted; the next one adds its own."""
    run = Run(recipe)
    with pytest.raises(KeyboardInterrupt), run.stage("sft"):
        raise KeyboardInterrupt
    run.manifest["stages"]["sft"]["seconds"] = 7.0
    after_the_first = Run(recipe).is_done("sft")

    with run.stage("sft"):
        pass

    assert not after_the_first
    assert run.is_done("sft")
    assert 7.0 <= run.manifest["stages"]["sft"]["seconds"] < 9.0


def test_unfinished_work_on_results_that_were_made_again_is_removed(recipe, caplog):
    """A kill leaves a checkpoint and metrics of `sft`. They stay if the expert's episodes are equal, and else go."""
    run = Run(recipe)
    checkpoint, metrics = run.paths.partial("sft") / "checkpoint-4", run.paths.metrics("sft")
    make_expert(run, "episodes")
    with suppress(KeyboardInterrupt), run.stage("sft", run.paths.checkpoint("sft"), metrics):
        checkpoint.mkdir(parents=True)
        metrics.write_text("{}\n")
        killed = run.paths.manifest.read_text()
        raise KeyboardInterrupt
    run.close()
    run.paths.manifest.write_text(killed)
    found = []
    for episodes in ("episodes", "other episodes"):
        run.paths.trajectories("expert").unlink()
        with Run(recipe) as again:
            make_expert(again, episodes)
            with suppress(KeyboardInterrupt), again.stage("sft", again.paths.checkpoint("sft"), metrics):
                found.append((checkpoint.exists(), metrics.exists()))
                raise KeyboardInterrupt

    assert found == [(True, True), (False, False)]
    assert (
        "sft starts anew, since trajectories/expert.jsonl changed; removed: metrics/sft.jsonl, checkpoints/sft.pa"
        in caplog.text
    )


def test_unfinished_work_stays_if_the_run_deleted_one_of_its_sources(recipe):
    """As the average of an earlier iteration."""
    run = Run(recipe)
    partial, aside = run.paths.partial("sft"), run.paths.metrics("expert")
    aside.write_text("{}")
    make_expert(run, "episodes", aside)
    with suppress(KeyboardInterrupt), run.stage("sft"):
        partial.mkdir(parents=True)
        raise KeyboardInterrupt
    run.delete([aside])

    with run.stage("sft"):
        assert partial.exists()


def make_expert(run, episodes, *others):
    """Do the stage `expert`."""
    with run.stage("expert", run.paths.trajectories("expert"), *others):
        write_whole(run.paths.trajectories("expert"), episodes)


def test_the_manifest_says_what_the_run_was_made_with(recipe):
    """Commit (none outside a checkout), versions, hardware, seed, and a hash of the data."""
    run = Run(recipe)
    run.paths.trajectories("expert").write_text("{}\n")

    with run.stage("expert", run.paths.trajectories("expert")):
        pass

    manifest = json.loads((run.folder / "manifest.json").read_text())
    assert manifest["commit"] is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", manifest["commit"])
    assert {"python", "perturn", "torch", "transformers"} <= manifest["versions"].keys()
    assert manifest["hardware"]["cores"] >= 1
    assert manifest["seed"] == recipe.seed
    assert manifest["data"] == {"expert.jsonl": file_digest(run.paths.trajectories("expert"))}


@pytest.mark.parametrize("content", ['{"stages": {"sft"', "[]", "{}", '{"stages": []}', "\x00"])
def test_a_damaged_manifest_is_an_error_for_the_user(recipe, content):
    """Cut short, another type, without stages, binary: each names the file and is not repaired."""
    Run(recipe)
    manifest = run_folder(recipe) / "manifest.json"
    manifest.write_text(content)

    with pytest.raises(RunError, match=r"(?i)manifest\.json(:| is no) .*restore it"):
        Run(recipe)

    assert manifest.read_text() == content


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    """A text that cannot be encoded fails halfway; the old content stays."""
    file = tmp_path / "a.json"
    write_whole(file, "old")

    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "new \ud800")

    assert file.read_text() == "old"
    write_whole(file, "new")
    assert file.read_text() == "new"


def test_the_recorded_recipe_is_resolved(recipe):
    """Defaults are written out, so a later change of a default cannot change what the run was."""
    Run(recipe)

    recorded = (run_folder(recipe) / "recipe.yaml").read_text(encoding="utf-8")

    assert recorded == to_yaml(recipe)
    assert "max_new_tokens: 64" in recorded


def test_what_is_deleted_is_gone_and_its_stage_stays_done(recipe):
    """A folder and a file of another, removed after the manifest forgot them; a kill between is no damage."""
    run = Run(recipe)
    policy, other = run.paths.checkpoint("dpo-001"), run.paths.checkpoint("dpo-002")
    with run.stage("align-001", policy, other):
        for folder in (policy, other):
            folder.mkdir()
            (folder / "weights").write_text("1")
            (folder / "optimizer").write_text("2")
    run.delete([policy, other / "optimizer"])
    run.close()

    with Run(recipe) as again:
        assert again.is_done("align-001")
        assert [name for name in again.manifest["files"] if "dpo" in name] == ["checkpoints/dpo-002/weights"]
    assert not policy.exists()
    assert [file.name for file in other.iterdir()] == ["weights"]


def test_a_folder_that_is_no_run_does_not_hide_a_recipe_of_its_name(tmp_path, monkeypatch):
    """As in `perturn run demo` beside a folder `demo`; a run of that name is still taken."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()

    assert resolve_recipe(Path("demo"), ["seed=3"]).seed == 3
    Run(resolve_recipe(Path("demo"), ["output=.", "seed=3"])).close()
    assert resolve_recipe(Path("demo")).seed == 3


def test_a_run_below_the_home_folder_or_a_folder_of_any_name_opens(recipe, tmp_path, monkeypatch):
    """`~` is the home folder, here one with an emoji in its name."""
    home = tmp_path / "mug \U0001f375"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    there = parse(Recipe, {**to_mapping(recipe), "output": "~/runs"})

    Run(there).close()

    assert run_folder(there) == home / "runs/one"
    assert run_folder(resolve_recipe(home / "runs/one")) == home / "runs/one"
