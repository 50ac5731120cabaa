"""A training in processes that the driver starts with torchrun: what they learn, and what is left when one dies."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from perturn.config.recipe import read_recipe
from perturn.config.stages import stages
from perturn.errors import ConfigError, ModelError, RunError
from perturn.policy.packing import Filled
from perturn.run.execute import open_run, run_stages
from perturn.run.launch import driver
from perturn.run.launch.launch_files import LaunchFiles
from perturn.run.launch.training_process import is_driven
from perturn.run.stages.training_checks import check_training
from support.processes import Started
from support.trainings import write_training

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
KILLED = """
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 10452)  (SIGKILL)
"""
TWO = "launch.processes=2"
DIVIDED = "launch={processes: 2, sharding: fsdp2}"
STEPS = 16


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder):
    """A folder with a model, a recipe that aligns it, and 16 pairs."""
    folder = tmp_path_factory.mktemp("launch")
    return write_training(folder, tiny_folder, RECIPE)


def settle(patch, place):
    """Enter the folder, and fix the arithmetic: MKL's fastest code differs between CPUs, by more than a rounding."""
    patch.chdir(place)
    patch.setenv("PERTURN_CACHE", str(place / "cache"))
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.setenv("MKL_CBWR", "COMPATIBLE")


@pytest.fixture(autouse=True)
def _here(place, monkeypatch):
    settle(monkeypatch, place)


def trained(name, *words):
    """Weights of a run that a command does to its end."""
    started = Started(["run", "recipe.yaml", f"name={name}", *words], Path.cwd(), dict(os.environ))
    printed = "".join(started.communicate())
    assert started.returncode == 0, printed
    return weights(name)


def train_here(name, *words):
    """Do a run to its end in this process, and the processes that it starts."""
    with open_run("recipe.yaml", [f"name={name}", *words]) as run:
        run_stages(run)


def weights(name):
    return load_file(f"runs/{name}/checkpoints/tlm-dre/model.safetensors")


@pytest.fixture(scope="module")
def whole(place):
    """Weights of the run that one process trains."""
    with pytest.MonkeyPatch.context() as patch:
        settle(patch, place)
        return trained("whole")


def steps(name):
    file = Path(f"runs/{name}/metrics/align.jsonl")
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def ranks():
    """Training processes of runs in this folder."""
    here = os.getcwd()
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        command = process.info["cmdline"] or []
        if process.info["cwd"] == here and "perturn.run.launch.training_process" in command:
            found.append(process)
    return [each for each in found if "torch.distributed.run" not in each.info["cmdline"]]


def wait_until(claim, seconds=60):
    """Wait for a condition."""
    limit = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < limit
        time.sleep(0.05)


@pytest.mark.slow
def test_two_processes_train_the_policy_of_one(whole, tmp_path, monkeypatch):
    """Sums in another order differ by rounding alone; the driver seals the files and leaves nothing of the launch."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found = trained("two", TWO)

    assert [*tmp_path.iterdir()] == []

    assert_close(found, whole, rtol=0, atol=1e-6)
    assert steps("two") == STEPS
    assert not Path("runs/two/checkpoints/tlm-dre.partial").exists()
    noted = [Path(f"runs/{name}/metrics/confidence.jsonl").read_bytes() for name in ("two", "whole")]
    assert noted[0] == noted[1]
    with open_run(
        "runs/two", ["launch.processes=1"]
    ) as run:  # all seals are right, and another number is no other run
        assert run.is_done("align")


LEAVING = """
import atexit, threading
from perturn.train_processes import leave
atexit.register(print, "cleaned")
threading.Thread(target=threading.Event().wait).start()  # the interpreter would wait for it
leave({code})
"""


FAILING = """
import atexit, sys
import torch.distributed as group
from perturn.cli import main
if {joined}:
    group.init_process_group("gloo", store=group.HashStore(), rank=0, world_size=1)
atexit.register(print, "cleaned")
sys.argv = ["perturn", "run", "missing.yaml"]
main()
"""


@pytest.mark.parametrize(("joined", "said"), [(False, "cleaned\n"), (True, "")])
def test_a_command_that_fails_in_one_of_several_processes_ends_at_once(joined, said):
    """Its error is printed, and it does not wait for the other processes."""
    command = [sys.executable, "-c", FAILING.format(joined=joined)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert (ended.returncode, ended.stdout) == (2, said)
    assert "error: " in ended.stderr


@pytest.mark.parametrize(("code", "said"), [(0, "cleaned\n"), (1, "")])
def test_a_process_that_is_done_leaves_threads_behind(code, said):
    """Functions for the exit run only without an error: to destroy a process group waits for the other processes."""
    command = [sys.executable, "-c", LEAVING.format(code=code)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert (ended.returncode, ended.stdout) == (code, said), ended.stderr


@pytest.mark.slow
def test_adapters_that_two_processes_train_on_rounded_weights_are_merged_into_the_exact_ones(place):
    """The frozen weights equal the start's to the bit; the others differ by rounding to bfloat16."""
    lora = "align.lora={target_modules: [q_proj]}"
    one, two = trained("lora", lora), trained("lora-two", lora, "launch={processes: 2, sharding: fsdp2}")
    before = load_file("tiny/model.safetensors")

    changed = {name for name in two if not two[name].equal(before[name])}
    assert changed == {name for name in before if ".q_proj." in name}
    for name in changed:
        moved, apart = (one[name] - before[name]).abs().max(), (two[name] - one[name]).abs().max()
        assert moved > 0
        assert apart < moved


def torchrun_of(process):
    """The launcher that a driver has started."""
    return next(each for each in process.children() if "torch.distributed.run" in each.cmdline())


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["driver", "torchrun", "process", "ctrl-c"])
def test_whatever_is_killed_no_process_stays_and_the_command_goes_on(whole, killed):
    """After a checkpoint; the second command trains what was left, and the policy is the one of one process."""
    name = f"killed-{killed}"
    command = ["run", "recipe.yaml", f"name={name}", TWO]
    started = Started(command, Path.cwd(), dict(os.environ))
    wait_until(lambda: steps(name) >= 5, seconds=300)
    driver_process = psutil.Process(started.pid)
    if killed == "process":
        ranks()[-1].kill()
    elif killed == "torchrun":
        stopped = ranks()  # or they would finish before they next look for torchrun
        for each in stopped:
            each.suspend()
        torchrun_of(driver_process).kill()
        time.sleep(1)
        for each in stopped:
            each.resume()
    else:
        driver_process.send_signal(signal.SIGKILL if killed == "driver" else signal.SIGINT)
    printed = "".join(started.communicate())
    wait_until(lambda: not ranks())

    assert started.returncode == {"driver": -signal.SIGKILL, "ctrl-c": 130}.get(killed, 2), printed
    if started.returncode == 2:
        assert "was killed" in printed
        assert "the same command goes on from the last checkpoint" in " ".join(printed.split())
    assert steps(name) < STEPS
    assert list(Path(f"runs/{name}/checkpoints/tlm-dre.partial").glob("checkpoint-*"))
    again = Started(command, Path.cwd(), dict(os.environ))
    printed = "".join(again.communicate())
    assert again.returncode == 0, printed
    assert_close(weights(name), whole, rtol=0, atol=1e-6)
    assert steps(name) == STEPS


def test_a_step_of_the_clock_ends_no_training(monkeypatch):
    """The time at which a process began is computed from the clock; its parent is not."""
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: time.monotonic())
    torchrun = os.getppid()
    driver_process = psutil.Process(torchrun).ppid()

    assert is_driven(torchrun, driver_process)
    assert not is_driven(torchrun, driver_process + 1)
    assert not is_driven(torchrun + 1, driver_process)


@pytest.mark.slow
def test_a_training_is_resumed_with_another_number_of_processes_and_another_sharding(whole):
    """Two processes with parts of the model are killed; one process, and then two with whole copies, go on."""
    killed("moved", DIVIDED)
    shutil.copytree("runs/moved", "runs/moved-two")

    for name, words in (("moved", []), ("moved-two", [TWO])):
        assert_close(trained(name, *words), whole, rtol=0, atol=1e-6)
        assert steps(name) == STEPS


def killed(name, *words):
    """A run of two processes, of which one was killed after a checkpoint."""
    started = Started(["run", "recipe.yaml", f"name={name}", *words], Path.cwd(), dict(os.environ))
    wait_until(lambda: steps(name) >= 5, seconds=300)
    ranks()[-1].kill()
    started.communicate()
    assert steps(name) < STEPS


@pytest.mark.slow
def test_parts_of_a_model_resume_a_training_of_whole_copies(whole):
    """Weights and optimizer are divided as they are read."""
    killed("copies", TWO)

    assert_close(trained("copies", DIVIDED), whole, rtol=0, atol=1e-6)
    assert steps("copies") == STEPS


@pytest.mark.slow
def test_adapters_on_rounded_weights_do_not_resume_adapters_on_exact_ones(place):
    """The error says what to set, and what to remove."""
    lora = "align.lora={target_modules: [q_proj]}"
    killed("exact", TWO, lora)

    with pytest.raises(
        ModelError, match=r"checkpoint-4' .*resume with launch.sharding=none, or remove the folder"
    ):
        train_here("exact", DIVIDED, lora)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_one_row_is_trained_on_by_two_processes(place, sharding):
    """One of them has no row in any step."""
    Path("row.jsonl").write_text(Path("rows.jsonl").read_text().splitlines()[3] + "\n")
    words = ["rows.path=row.jsonl", "align.warmup_ratio=0"]

    one = trained(f"row-{sharding}", *words)
    two = trained(f"row-two-{sharding}", *words, f"launch={{processes: 2, sharding: {sharding}}}")

    before = load_file("tiny/model.safetensors")
    assert max(float((one[name] - before[name]).abs().max()) for name in one) > 1e-4
    assert_close(two, one, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_recipe_that_follows_trains_in_as_many_processes(place):
    """It takes `launch` from the first, and its log is of its own training."""
    then = "then={rows: {name: file, path: rows.jsonl}, align: {loss: {name: dpo}, batch_size: 2}}"
    done = Started(["run", "recipe.yaml", "name=first", TWO, then], Path.cwd(), dict(os.environ))
    printed = "".join(done.communicate())

    assert done.returncode == 0, printed
    assert "processes: 2" in Path("runs/first-then/recipe.yaml").read_text()
    assert len(Path("runs/first-then/metrics/align.jsonl").read_text().splitlines()) == 8
    assert Path("runs/first-then/checkpoints/dpo/model.safetensors").is_file()


def ended(tmp_path, code, **files):
    """What the driver makes of processes that ended with a code and have left files."""
    with open_run("recipe.yaml", [f"name={tmp_path.name}", TWO]) as run:
        found = LaunchFiles(tmp_path)
        found.log.write_text(files.pop("log", "first\nlast line\n"))
        for name, facts in files.items():
            getattr(found, name).write_text(json.dumps(facts))
        return driver._result(run, found, code, asked=False)


def test_the_driver_returns_the_counts_and_raises_what_a_process_raised(tmp_path):
    """An error for the user keeps its class; any other one, and a kill, say where the log is."""
    assert ended(tmp_path, 0, counts={"examples": 3}) == {"examples": 3}
    with pytest.raises(RunError, match=r"one of the 2 training processes was killed.*log.txt.*last line"):
        ended(tmp_path, 1)
    with pytest.raises(ModelError, match=r"^no such layer$"):
        ended(tmp_path, 1, error={"kind": "ModelError", "message": "no such layer"})
    with pytest.raises(
        RunError, match=r"training process 1 .*was killed by SIGKILL.*the same command goes on"
    ):
        ended(tmp_path, 1, error={"kind": "RuntimeError", "message": "reset by peer"}, log=KILLED)
    with pytest.raises(RunError, match=r"failed: KeyError: 'x'.*the same command goes on"):
        ended(tmp_path, 1, error={"kind": "KeyError", "message": "'x'"})


def test_lines_of_a_growing_file_are_counted_once(tmp_path):
    """A file that a resumed training has shortened is counted anew."""
    lines, file = driver._Lines(tmp_path / "align.jsonl"), tmp_path / "align.jsonl"
    counts = []
    for text in ("{}\n{}\n{", "{}\n{}\n{}\n", "{}\n"):
        file.write_text(text)
        counts.append(lines.count())

    assert counts == [2, 3, 1]


def test_minibatches_take_any_number_of_processes():
    """They replace the batch size, so its default of 4 rows need not be a multiple of 3 processes."""
    recipe = Path(__file__).parents[2] / "recipes/alfworld_gigpo.yaml"
    check_training(read_recipe(recipe, ["sft=null", "launch.processes=3"]))


def test_torchrun_keeps_its_files_in_the_folder_of_the_launch(tmp_path):
    """Its default is a folder for temporary files, which stays there."""
    with open_run("recipe.yaml", [f"name={tmp_path.name}", TWO]) as run:
        align = next(each for each in stages(run.recipe) if each.name == "align")
        command = driver._command(2, LaunchFiles(tmp_path), align)

    assert f"--log-dir={tmp_path}" in command


def test_a_launch_that_cannot_train_is_rejected_before_work(monkeypatch):
    """A batch that does not divide, sharding by one process, an offload without a GPU, and too few GPUs."""
    for words, said in (
        (["launch.processes=3"], "batch_size must be a multiple of the 3 processes, got 2"),
        (["launch.sharding=fsdp2"], "launch.processes must be >= 2 with sharding fsdp2, got 1"),
        ([TWO, "launch.cpu_offload=true"], "cpu_offload needs sharding fsdp2"),
    ):
        with pytest.raises(ConfigError, match=said):
            open_run("recipe.yaml", ["name=refused", *words])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"launch.cpu_offload needs a GPU, and this machine has none"):
        open_run("recipe.yaml", ["name=refused", TWO, "launch.sharding=fsdp2", "launch.cpu_offload=true"])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"align trains on one in each process; set launch.processes=2 to"):
        open_run("recipe.yaml", ["name=refused"])
    with pytest.raises(ConfigError, match=r"launch.processes must be <= the 2 GPUs of this machine, got 4"):
        open_run("recipe.yaml", ["name=refused", "align.batch_size=4", "launch.processes=4"])
    align = "rows: {name: file, path: rows.jsonl}, align: {loss: {name: dpo}, batch_size: 4}"
    then = f"then={{{align}, launch: {{processes: 4}}}}"
    with pytest.raises(ConfigError, match=r"launch.processes must be <= the 2 GPUs of this machine, got 4"):
        open_run("recipe.yaml", ["name=refused", TWO, then])
    assert not Path("runs/refused").exists()


def test_steps_of_several_processes_hold_the_rows_of_one():
    """Ten rows in four steps: three, three, three and one, though two processes have four places in a step."""
    filled = Filled(range(10), 4, 3)

    assert list(filled) == [0, 1, 2, None, 3, 4, 5, None, 6, 7, 8, None, 9, None, None, None]
    assert len(filled) == 16
    assert list(Filled(range(5), 4)) == [0, 1, 2, 3, 4, None, None, None]
    assert list(Filled(range(6), 3, 3)) == [*range(6)]
