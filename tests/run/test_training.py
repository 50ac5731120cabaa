"""Training of a run: stopped and gone on from there, in several processes, and what it saves and prints meanwhile."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import TrainerControl

from perturn.cli import main
from perturn.errors import ConfigError
from perturn.run.execute import open_run, run_stages
from perturn.run.interrupts import Stopping
from perturn.run.stages import train_stage
from perturn.train_processes import share_of
from perturn.training.turn_trainer import TurnTrainer
from support.ports import free_port
from support.trainings import write_training

STEPS = 16
RECIPE = """
name: one
model: {name: tiny, dtype: float32}
rows: {name: file, path: rows.jsonl}
align:
  loss: {name: tlm-dre}
  epochs: 2
  batch_size: 2
  learning_rate: 1.0e-3
  save_steps: 1000
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder):
    """A folder with a model, a recipe that aligns it, and 16 pairs."""
    folder = tmp_path_factory.mktemp("training")
    return write_training(folder, tiny_folder, RECIPE)


@pytest.fixture(autouse=True)
def _here(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("PERTURN_CACHE", str(place / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def whole(place):
    """Weights of the run that nothing stopped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("PERTURN_CACHE", str(place / "cache"))
        return trained("whole")


def trained(name):
    """Weights of a run, which is done to its end in this process."""
    with open_run("recipe.yaml", [f"name={name}"]) as run:
        run_stages(run)
        return load_file(run.paths.checkpoint("tlm-dre") / "model.safetensors")


def equal(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def steps(name):
    file = Path(f"runs/{name}/metrics/align.jsonl")
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def checkpoints(name):
    return sorted(path.name for path in Path(f"runs/{name}/checkpoints/tlm-dre.partial").glob("*"))


@pytest.mark.slow
def test_ctrl_c_in_training_leaves_a_checkpoint_of_the_step_and_loses_nothing(whole):
    """Before, up to `save_steps` steps were lost, and nothing was said; going on prints no warning of libraries."""
    command = [sys.executable, "-W", "default", "-m", "perturn", "run", "recipe.yaml", "name=stopped"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while process.poll() is None and steps("stopped") < 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    notices = process.communicate()[1]
    made = steps("stopped")

    assert process.returncode == 130
    assert "stopped; the same command goes on from here" in notices
    assert 2 <= made < STEPS
    assert checkpoints("stopped") == [f"checkpoint-{made}"]
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    for notice in (notices, again.stderr):
        assert "arning" not in notice
        assert "[transformers]" not in notice
    assert equal(load_file("runs/stopped/checkpoints/tlm-dre/model.safetensors"), whole)


def raising(*signals, at):
    """A callback that sends this process signals after a step."""

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == at:
            for each in signals:
                signal.raise_signal(each)

    return on_step_begin


@pytest.fixture
def usual_handlers():
    """Those of a process that begins; afterwards as they were."""
    kept = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGTERM: signal.signal(signal.SIGTERM, signal.SIG_DFL),
    }
    yield
    for each, handler in kept.items():
        signal.signal(each, handler)


@pytest.mark.parametrize(
    ("signals", "left"),
    [
        ([signal.SIGTERM], "checkpoint-6"),
        ([signal.SIGINT, signal.SIGTERM], "checkpoint-6"),
        ([signal.SIGINT] * 2, "checkpoint-4"),
    ],
)
def test_one_signal_ends_the_step_and_a_second_one_training(
    whole, usual_handlers, monkeypatch, signals, left
):
    """After step 5: the checkpoint is of step 6, or, where Ctrl-C came twice, of a quarter of 16.

    Launchers send SIGTERM after a Ctrl-C, which is not a second one.
    """
    name = f"signals-{'-'.join(each.name for each in signals)}"
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        patch.setattr(train_stage.TrainingProgress, "on_step_begin", raising(*signals, at=5), raising=False)
        with pytest.raises(KeyboardInterrupt), open_run("recipe.yaml", [f"name={name}"]) as run:
            run_stages(run)

    assert checkpoints(name) == [left]
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert equal(trained(name), whole)


def test_handlers_of_others_and_of_other_threads_stay():
    """A notebook's own handler, and training in a thread, where Python lets nobody set one."""
    kept, found = signal.signal(signal.SIGTERM, lambda *_: None), []

    def look():
        with Stopping(print) as stopping:
            found.extend(signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM))
            stopping.on_step_end(None, None, control := TrainerControl())
            found.append(control.should_training_stop)

    try:
        expected = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        with Stopping(print):
            assert signal.getsignal(signal.SIGTERM) is expected[1]
    finally:
        signal.signal(signal.SIGTERM, kept)

    assert found == [*expected, False]


def test_a_short_training_has_a_checkpoint_every_quarter(whole, monkeypatch):
    """16 steps, `save_steps` 1000: after 4, 8, 12 and 16; the last one alone is kept meanwhile."""
    saved, save = [], TurnTrainer._save_checkpoint

    def noted(self, *arguments):
        saved.append((self.state.global_step, checkpoints("short")))
        save(self, *arguments)

    monkeypatch.setattr(TurnTrainer, "_save_checkpoint", noted)

    assert equal(trained("short"), whole)
    assert saved == [(4, []), (8, ["checkpoint-4"]), (12, ["checkpoint-8"]), (16, ["checkpoint-12"])]


@pytest.mark.slow
def test_two_processes_train_the_policy_of_one_and_the_first_one_writes(monkeypatch):
    """Started by `torchrun`, as by `accelerate launch`, with gloo; sums in another order differ by rounding alone.

    MKL's fastest code differs between CPUs, by more than a rounding. So both runs use its code for all CPUs.
    """
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    weights = {}
    for name, processes in (("single", 1), ("two", 2)):
        with open_run("recipe.yaml", [f"name={name}"]) as run:
            run_stages(run, "pair")
        launch = ["torch.distributed.run", f"--nproc_per_node={processes}", f"--master_port={free_port()}"]
        done = subprocess.run(
            [sys.executable, "-m", *launch, "-m", "perturn", "train", f"runs/{name}", "--json"],
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["stages"]["align"]["done"]  # printed once
        assert done.stderr.count("training tlm-dre") == 1
        weights[name] = load_file(f"runs/{name}/checkpoints/tlm-dre/model.safetensors")

    assert_close(weights["two"], weights["single"], rtol=0, atol=1e-6)
    assert steps("two") == STEPS
    assert checkpoints("two") == []
    with open_run("runs/two") as run:  # all seals are right
        assert run.is_done("align")


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("command", ["run", "collect", "evaluate", "report"])
def test_other_commands_are_refused_in_several_processes(command, rank, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "argv", ["perturn", command, "recipe.yaml", "name=refused"])

    with pytest.raises(SystemExit, match="2"):
        main()

    words = " ".join(capsys.readouterr().err.split())
    assert f"`perturn {command}` runs in one process, got 2; start it without `accelerate launch`" in words
    assert not Path("runs/refused").exists()


def test_a_batch_that_processes_cannot_divide_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")

    assert share_of(8, 1) == 2
    with pytest.raises(ConfigError, match="batch_size must be a multiple of the 4 processes, got 6"):
        share_of(6, 1)
