"""The whole loop on a tiny policy: complete, repeatable stage by stage, and indifferent to kill -9."""

import contextlib
import io
import json
import shutil
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from perturn.cli import main
from perturn.config.stages import Stage
from perturn.data.store import read_pairs
from perturn.display.progress_bars import screen
from perturn.errors import RunError
from perturn.run.checkpoint_retention import last_checkpoint
from perturn.run.execute import open_run, run_stages
from perturn.run.stages import train_stage
from perturn.training.turn_config import TurnConfig
from perturn.training.turn_trainer import TurnTrainer
from support.equal_runs import EPISODES, STEPS, assert_equal_runs, episodes, losses, without_time
from support.loop import finish, kill, start


@pytest.fixture(scope="module")
def whole(place):
    """A run that nothing interrupted, and what it printed."""
    printed, _ = finish(start(place, "whole", "worlds.processes=1"))
    return place / "runs" / "whole", printed


@pytest.fixture
def here(place, monkeypatch):
    """The same place for calls inside this process."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("PERTURN_CACHE", str(place / "cache"))
    return place


def test_a_run_leaves_everything_that_was_made(whole, assert_reference_fits_pairs):
    """Recipe, manifest, episodes, pairs, metrics, two policies, report; and no half-made folder."""
    folder, printed = whole

    manifest = json.loads((folder / "manifest.json").read_text())
    assert all(stage["done"] for stage in manifest["stages"].values())
    assert len(manifest["stages"]) == 8
    assert {file: len(episodes(folder / file)) for file in EPISODES} == EPISODES
    assert {file: len(losses(folder / file)) for file in STEPS} == STEPS
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["sft", "tlm-dre"]
    assert not list(folder.rglob("*partial*"))
    assert_reference_fits_pairs(folder)
    assert "<html" in (folder / "report.html").read_text()
    assert "runs/whole/report.html" in printed
    assert "Task by task, tlm-dre differs from sft by" in printed


def test_alignment_notes_how_far_sampling_was_from_training(whole):
    """Over the tokens that the explorer sampled, which are float32's here: 1e-4 nats at most."""
    folder, _ = whole
    rejected = [pair.rejected for pair in read_pairs(folder / "pairs.jsonl")]
    noted = json.loads((folder / "metrics" / "agreement.json").read_text())

    assert noted["tokens"] == sum(len(turn.action.token_ids) for one in rejected for turn in one.turns)
    assert 0 <= noted["median"] <= noted["p99"] <= noted["max"] < 1e-4
    assert noted["max"] > 0


def test_sampling_from_other_weights_is_noticed(whole, tmp_path, capsys):
    """Stored log-probabilities moved by 0.5 nats are more than rounding explains; nobody else's are compared."""
    folder, _ = whole
    shutil.copytree(folder, tmp_path / "run")
    run, pairs = open_run(tmp_path / "run", []), read_pairs(folder / "pairs.jsonl")
    sft = str(folder / "checkpoints" / "sft")
    args = TurnConfig(
        output_dir=str(tmp_path / "out"), loss={"name": "dpo"}, use_cpu=True, reference_cache=str(tmp_path)
    )
    trainer = TurnTrainer(sft, args, pairs)
    moved = [replace(pair, rejected=_moved(pair.rejected, 0.5)) for pair in pairs]

    train_stage._note_agreement(
        run, Stage("align", "train", "", reference="sft"), pairs, trainer.train_dataset.rows
    )
    assert "more than rounding" not in capsys.readouterr().err
    train_stage._note_agreement(
        run, Stage("align", "train", "", reference="sft"), moved, trainer.train_dataset.rows
    )
    assert "more than rounding" in capsys.readouterr().err
    train_stage._note_agreement(
        run, Stage("align", "train", "", reference="another"), moved, trainer.train_dataset.rows
    )
    assert capsys.readouterr().err == ""


def _moved(episode, nats):
    """The episode with other log-probabilities of its actions."""
    turns = [
        replace(
            turn, action=replace(turn.action, logprobs=tuple(each - nats for each in turn.action.logprobs))
        )
        for turn in episode.turns
    ]
    return replace(episode, turns=tuple(turns))


def test_the_summary_has_the_keys_that_scripts_read(whole):
    """policies, comparison and seconds; the scores are those of the stored episodes."""
    summary = json.loads((whole[0] / "summary.json").read_text())

    assert {"policies", "comparison", "seconds"} <= summary.keys()
    assert [row["name"] for row in summary["policies"]] == ["base", "sft", "tlm-dre"]
    for row in summary["policies"]:
        scores = [episode[1] for episode in episodes(whole[0] / f"evaluation/{row['name']}.jsonl").values()]
        assert {"name", "n", "mean_score", "interval", "success_rate"} <= row.keys()
        assert row["n"] == 6
        assert row["mean_score"] == pytest.approx(sum(scores) / 6)
        assert row["interval"][0] <= row["mean_score"] <= row["interval"][1]
    assert (summary["comparison"]["a"], summary["comparison"]["b"]) == ("tlm-dre", "sft")
    assert summary["seconds"] > 0


def test_a_score_has_its_protocol(whole):
    """All that must be equal before scores are compared; the command prints it in one line."""
    folder, printed = whole
    summary = json.loads((folder / "summary.json").read_text())
    stamp = summary["protocol"]

    assert stamp == json.loads((folder / "evaluation" / "protocol.json").read_text())
    assert [stamp.pop(key)[:8] for key in ("panel_sha256", "prompt_sha256")] == ["dfd87854", "f7e7e7f5"]
    assert stamp == {
        "environment": "corridor-1.0",
        "settings": {"name": "perturn_corridor:Corridor"},
        "split": "test",
        "n": 6,
        "name": "tiny-action",
        "max_turns": {"left": 3, "right": 3},
        "history": "full",
        "list_admissible": False,
        "decoding": {"temperature": 0.0, "top_p": 1.0, "max_new_tokens": 6},
        "departures": {},
        "seed": 0,
    }
    words = " ".join(printed.split())
    for part in ("tiny-action on corridor-1.0; split test, n = 6", "full history; greedy, at most 6 tokens"):
        assert part in words


def test_a_second_call_says_done_and_changes_nothing(whole, here, monkeypatch, capsys):
    """Every file keeps its bytes; the policies are not even loaded, so nothing is computed."""
    before = {path: path.read_bytes() for path in whole[0].rglob("*") if path.is_file()}
    monkeypatch.setattr(sys, "argv", ["perturn", "run", "tiny.yaml"])

    main_exits_with(0)

    printed = capsys.readouterr()
    assert printed.err.count("done before") == 8
    assert "runs/whole/report.html" in printed.out
    assert {path: path.read_bytes() for path in whole[0].rglob("*") if path.is_file()} == before


def main_exits_with(code):
    with pytest.raises(SystemExit) as caught:
        main()
    assert (caught.value.code or 0) == code


@pytest.fixture(scope="module")
def staged(place):
    """A run made command by command in this process, and what was noticed on the way."""
    commands = ["collect", "train", "collect", "pair", "train", "evaluate", "report"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as notices:
        patch.chdir(place)
        patch.setenv("PERTURN_CACHE", str(place / "cache"))
        for number, command in enumerate(commands):
            source, words = (
                ("tiny.yaml", ["name=staged", "worlds.processes=0"]) if number == 0 else ("runs/staged", [])
            )
            patch.setattr(sys, "argv", ["perturn", command, source, *words])
            main_exits_with(0)
    return place / "runs" / "staged", notices.getvalue()


def test_stages_one_by_one_make_the_same_run(whole, staged):
    """collect, train, collect, pair, train, evaluate, report: each does what can be done, and says what waits."""
    folder, notices = staged

    assert_equal_runs(folder, whole[0])
    assert without_time(folder / "summary.json") == without_time(whole[0] / "summary.json")
    assert notices.count("left for later: explore needs sft. `perturn run runs/staged` does all stages.") == 1
    assert notices.count("left for later: align needs pair.") == 1
    assert notices.count("expert: done before") == 1


def lines(file):
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def is_done(folder, stage):
    manifest = folder / "manifest.json"
    stages = json.loads(manifest.read_text())["stages"] if manifest.is_file() else {}
    return stages.get(stage, {}).get("done", False)


REACHED = {
    "expert": lambda folder: lines(folder / "trajectories/expert.jsonl") >= 2,
    "sft": lambda folder: (folder / "checkpoints/sft.partial/checkpoint-3/trainer_state.json").is_file(),
    "explore": lambda folder: lines(folder / "trajectories/explore.jsonl") >= 2,
    "align": lambda folder: (
        folder / "checkpoints/tlm-dre.partial/checkpoint-3/trainer_state.json"
    ).is_file(),
    "evaluate-tlm-dre": lambda folder: lines(folder / "evaluation/tlm-dre.jsonl") >= 1,
}


"""Stage -> whether a run has come to the middle of it."""


def kill_in(place, name, stages, *words):
    """Kill a run in the middle of each of these stages and finish it; its folder.

    Where a busy machine has finished the stage before the kill, the stage is done again from what was there before it.
    """
    folder, before = place / "runs" / name, place / "before" / name
    for stage in stages:
        shutil.copytree(folder, before, dirs_exist_ok=True) if folder.exists() else before.mkdir(parents=True)
        for _ in range(5):
            process = start(place, name, *words, pause=0.05)
            while process.poll() is None and not REACHED[stage](folder):
                time.sleep(0.002)
            kill(process)
            if not is_done(folder, stage):
                break
            shutil.rmtree(folder)
            shutil.copytree(before, folder)
        else:
            pytest.fail(f"{stage} ended before the kill five times")
    finish(start(place, name, *words))
    return folder


def assert_as_if_nothing_had_happened(killed, whole):
    """The run that was killed is the run that was not."""
    assert_equal_runs(killed, whole[0])
    assert without_time(killed / "summary.json") == without_time(whole[0] / "summary.json")
    assert sorted(path.name for path in (killed / "checkpoints").iterdir()) == ["sft", "tlm-dre"]


@pytest.fixture(scope="module")
def killed_in_training(place):
    """A run that was killed in the middle of alignment, and finished."""
    return kill_in(place, "killed-once", ["align"], "worlds.processes=0")


def test_a_run_killed_in_training_ends_as_if_nothing_had_happened(killed_in_training, whole):
    """Training resumes from checkpoint 3 of 8 with the state of optimizer, scheduler and sampler."""
    assert_as_if_nothing_had_happened(killed_in_training, whole)


@pytest.mark.slow
def test_a_run_killed_in_every_stage_ends_as_if_nothing_had_happened(place, whole):
    """SIGKILL in expert, SFT, exploration, alignment and evaluation of one run, each time gone on from there.

    Training goes on from checkpoint 3 of 8 with the optimizer's, scheduler's and sampler's state, so its losses
    and weights are those of the run that was not killed.
    """
    assert_as_if_nothing_had_happened(kill_in(place, "killed", REACHED), whole)


@pytest.mark.slow
def test_what_changed_after_a_kill_is_not_gone_on_with(place, whole):
    """SIGKILL in exploration; with another world or another model nothing goes on, and with the old ones all does."""
    folder = place / "runs" / "changed"
    process = start(place, "changed", pause=0.05)
    while process.poll() is None and lines(folder / "trajectories/explore.jsonl") < 2:
        time.sleep(0.002)
    kill(process)
    left = (folder / "trajectories/explore.jsonl").read_bytes()

    for file, setting in (
        ("perturn_corridor.py", "environment.name"),
        ("tiny/model.safetensors", "model.name"),
    ):
        content = (place / file).read_bytes()
        (place / file).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        refused = start(place, "changed")
        _, notices = refused.communicate(timeout=120)
        (place / file).write_bytes(content)
        assert refused.returncode != 0
        assert f"{setting}: {Path(file).name} changed since this run was made" in notices
        assert (folder / "trajectories/explore.jsonl").read_bytes() == left
    finish(start(place, "changed"))

    assert_equal_runs(folder, whole[0])


@pytest.mark.parametrize("left", ["nothing", "checkpoints"])
def test_a_kill_between_the_saved_policy_and_the_manifest_is_survived(whole, here, left):
    """The policy's folder is there, but the stage is not noted as done; with and without the last checkpoint."""
    folder = here / "runs" / f"late-{left}"
    shutil.copytree(whole[0], folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["stages"]["align"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    run = open_run(folder)
    if left == "checkpoints":
        (folder / "checkpoints/tlm-dre.partial/checkpoint-8").mkdir(parents=True)  # half-written

    run_stages(run, "train")

    assert run.is_done("align")
    assert_equal_runs(folder, whole[0])


def test_a_half_written_checkpoint_is_removed(tmp_path, capsys):
    """The trainer writes its state last: without it, or with half of it, a checkpoint is no checkpoint."""
    for step, state in {2: "{}", 10: "{}", 11: '{"global', 12: None}.items():
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)

    newest = last_checkpoint(tmp_path)

    assert newest == str(tmp_path / "checkpoint-10")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-2"]
    assert capsys.readouterr().err.count("removing half-written") == 2


@pytest.mark.slow
def test_adapters_are_trained_resumed_and_merged(whole, here, monkeypatch):
    """Stopped after step 3 and gone on from there, LoRA has the losses of a run that was not, and merges."""
    runs = {}
    for name in ("stopped", "lora"):
        words = [f"name={name}", "align.lora.rank=2", "align.learning_rate=0.01"]
        run = runs[name] = open_run(here / "tiny.yaml", words)
        shutil.copytree(whole[0] / "checkpoints" / "sft", run.paths.checkpoint("sft"))
        shutil.copy(whole[0] / "pairs.jsonl", run.paths.pairs())
        torch.manual_seed(0)
        if name == "stopped":
            monkeypatch.setattr(
                train_stage.TrainingProgress, "on_step_begin", interrupt_after(3), raising=False
            )
            with pytest.raises(KeyboardInterrupt):
                run_stages(run, names=["align"])
            monkeypatch.delattr(train_stage.TrainingProgress, "on_step_begin")
            torch.manual_seed(
                1
            )  # adapters come from the checkpoint, so what is drawn for new ones must not matter
        run_stages(run, names=["align"])

    weights, others, before = (
        load_file(run.paths.checkpoint(name) / "model.safetensors")
        for run, name in [(runs["stopped"], "tlm-dre"), (runs["lora"], "tlm-dre"), (runs["lora"], "sft")]
    )
    changed = {name.split(".")[-2] for name in weights if not weights[name].equal(before[name])}
    assert losses(runs["stopped"].paths.metrics("align")) == pytest.approx(
        losses(runs["lora"].paths.metrics("align")), abs=1e-4
    )
    assert_close(weights, others)
    assert {"q_proj", "down_proj"} <= changed
    assert not changed & {"embed_tokens", "norm", "input_layernorm"}


def interrupt_after(step):
    """A callback that stops training as Ctrl-C does."""

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == step:
            raise KeyboardInterrupt

    return on_step_begin


def test_a_loss_that_is_not_finite_stops_the_run_and_clears_the_screen(whole, here):
    """A learning rate of 1e30 makes the weights infinite; the error names the step, and nothing is shown any more."""
    words = ["name=diverged", "sft.learning_rate=1e30", "sft.max_grad_norm=1e30"]
    run = open_run(here / "tiny.yaml", words)
    shutil.copytree(whole[0] / "trajectories", run.folder / "trajectories", dirs_exist_ok=True)

    with pytest.raises(RunError, match=r"the gradient's norm is nan at step \d; lower the learning rate"):
        run_stages(run, names=["sft"])

    assert screen._works == []
    assert "progress" not in [thread.name for thread in threading.enumerate()]
    assert not run.is_done("sft")
