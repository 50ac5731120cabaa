"""Metrics reach TensorBoard, trackio and Weights & Biases as they stand in the run folder, a run for each stage."""

import json
import os
import struct
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import TrainerCallback

from perturn.config.recipe import read_recipe
from perturn.data.run_paths import RunPaths
from perturn.data.store import read_trajectories, write_pairs
from perturn.errors import ConfigError
from perturn.run.execute import TRACKERS, check_trackers, open_run, run_stages
from perturn.run.training_metrics import TrainingProgress, open_trackers
from perturn.types import Action, PreferencePair

RECIPE = """
name: tracked
model: {name: "%s", dtype: float32}
environment: {name: "own_environment:GuessNumber"}
protocol: {name: tiny, format: action, system: Guess., max_turns: 5}
sft:
  loss: {name: sft}
  tasks: {per_kind: 4}
  batch_size: 2
explore:
  tasks: {per_kind: 4, skip: 4}
align:
  loss: {name: tlm-dre}
  batch_size: 2
worlds: {processes: 0}
"""


def read_tensorboard(folder):
    """Stage -> metric -> step -> value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for place in (folder / "tracking/tensorboard").iterdir():
        events = EventAccumulator(str(place)).Reload()
        found[place.name] = {
            tag: {event.step: event.value for event in events.Scalars(tag)}
            for tag in events.Tags()["scalars"]
        }
    return found


def records(data):
    """Records of a LevelDB log with wandb's header of 7 bytes: blocks of 32 KiB; checksum, length, kind, bytes."""
    whole, at = b"", 7
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if left < 7 or kind == 0:
            at += left
            continue
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            yield whole
            whole = b""


def read_wandb(folder):
    """The same from the files that wait to be synchronized."""
    from wandb.proto import wandb_internal_pb2

    found = {}
    for file in (folder / "tracking/wandb").glob("offline-run-*/*.wandb"):
        name, rows = None, {}
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            name = record.run.display_name or name
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            for key, value in row.items():
                rows.setdefault(key, {})[row["train/global_step"]] = value
        found[name] = rows
    return found


def read_trackio(folder):
    """The same from its database."""
    from trackio.sqlite_storage import SQLiteStorage

    found = {}
    for name in SQLiteStorage.get_runs("perturn"):
        rows = {}
        for row in SQLiteStorage.get_logs("perturn", name):
            for key, value in row.items():
                rows.setdefault(key, {})[row["train/global_step"]] = value
        found[name] = rows
    return found


READERS = {"tensorboard": read_tensorboard, "trackio": read_trackio, "wandb": read_wandb}


def trained(folder, tiny_folder, tracker):
    """A run with both stages trained, which reports to one tracker."""
    file = folder / "recipe.yaml"
    file.write_text(RECIPE % tiny_folder)
    run = open_run(file, [f"output={folder}", f"report_to=[{tracker}]"])
    run_stages(run, "collect")
    run_stages(run, "train")
    experts = list(read_trajectories(run.paths.trajectories("expert")))
    turn = replace(experts[0].turns[0], action=Action("12"))
    write_pairs(
        run.paths.pairs(), [PreferencePair(one, replace(one, turns=(turn,), sample=1)) for one in experts[:4]]
    )
    run_stages(run, names=["align"])
    return run


@pytest.mark.parametrize("tracker", TRACKERS)
def test_values_are_those_of_the_run_folder(tiny_folder, own_environment, tmp_path, monkeypatch, tracker):
    """Every number of every step, under train/, in a run for each stage."""
    pytest.importorskip(tracker)
    for name, value in {
        "PERTURN_CACHE": tmp_path / "cache",
        "TRACKIO_DIR": tmp_path / "trackio",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }.items():
        monkeypatch.setenv(name, str(value))
    with warnings.catch_warnings():
        if tracker != "tensorboard":
            warnings.simplefilter("default")  # theirs
        run = trained(tmp_path, tiny_folder, tracker)

        found = READERS[tracker](run.folder)

    assert set(found) == {"tracked-sft", "tracked-tlm-dre"}
    for stage, name in (("sft", "tracked-sft"), ("align", "tracked-tlm-dre")):
        rows = [json.loads(line) for line in run.paths.metrics(stage).read_text().splitlines()]
        assert [row["step"] for row in rows] == [1, 2]
        for row in rows:
            for key, value in row.items():
                if key not in ("step", "epoch"):
                    assert found[name][f"train/{key}"][row["step"]] == pytest.approx(value, rel=1e-6)


def test_a_resumed_stage_hides_what_it_makes_again(tmp_path):
    """Killed at step 3 with a checkpoint at step 1: steps 2 and 3 of the first call are gone."""
    for done, values in ((0, {1: 1.0, 2: 2.0, 3: 3.0}), (1, {2: 20.0})):
        with open_trackers(["tensorboard"], tmp_path / "tracking", "run", "sft", done) as (callback,):
            for step, value in values.items():
                callback.tb_writer.add_scalar("loss", value, step)

    assert read_tensorboard(tmp_path) == {"run-sft": {"loss": {1: 1.0, 2: 20.0}}}


@pytest.fixture
def asked(monkeypatch):
    """The arguments of each call of `wandb.init`."""
    asked = []
    wandb = SimpleNamespace(init=lambda **how: asked.append(how) or SimpleNamespace(finish=lambda: None))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr("perturn.run.training_metrics.WandbCallback", TrainerCallback)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return asked


def test_a_resumed_stage_continues_its_run_of_wandb(tmp_path, asked):
    """After a checkpoint at step 4 it has the id of the call before; a stage that begins anew has another."""
    for done in (0, 4, 0):
        with open_trackers(["wandb"], tmp_path / "tracking", "run", "sft", done):
            pass

    first, second, third = (each["id"] for each in asked)
    assert first == second != third
    assert {each["resume"] for each in asked} == {"allow"}


def test_a_stage_resumed_offline_is_a_second_run_of_wandb(tmp_path, asked, monkeypatch):
    """Runs of one id would replace each other on `wandb sync`."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    with open_trackers(["wandb"], tmp_path / "tracking", "run", "sft", 4):
        pass

    assert asked[0].keys().isdisjoint(("id", "resume"))


def test_a_checkpoint_is_on_the_disk_before_older_checkpoints_are_removed(tmp_path, monkeypatch):
    """A power failure in between must leave one of the two."""
    older, newest = tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"
    for folder in (older, newest):
        folder.mkdir()
        (folder / "trainer_state.json").write_text("{}")
    synced = []
    monkeypatch.setattr(os, "fsync", lambda opened: synced.append((os.fstat(opened).st_ino, older.exists())))
    progress = TrainingProgress(SimpleNamespace(paths=RunPaths(tmp_path)), "sft", "training", print)

    progress.on_save(SimpleNamespace(output_dir=str(tmp_path)), SimpleNamespace(global_step=2), None)

    written = (newest, newest / "trainer_state.json", tmp_path)
    assert sorted(synced) == sorted((each.stat().st_ino, True) for each in written)
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint-2"]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["tensorbord"], "unknown report_to 'tensorbord'. Did you mean 'tensorboard'?"),
        (["tensorboard", "trackio"], 'report_to=trackio needs trackio; run: pip install "perturn[trackio]"'),
    ],
)
def test_a_tracker_that_is_unknown_or_missing_is_refused(monkeypatch, names, says):
    """Before any work, with what to install."""
    monkeypatch.setattr("perturn.table.find_spec", lambda name: name != "trackio" or None)

    with pytest.raises(ConfigError) as caught:
        check_trackers(names)

    assert says in str(caught.value)


def test_the_recipe_reports_nowhere_unless_asked(tmp_path, tiny_folder):
    """And a list is what it takes."""
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE % tiny_folder)

    assert read_recipe(file).report_to == []
    with pytest.raises(ConfigError, match="report_to must be a list"):
        read_recipe(file, ["report_to=tensorboard"])
