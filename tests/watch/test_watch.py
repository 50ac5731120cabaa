"""Watching a run from outside: finished, running in another process, dead, and never written to."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from perturn.cli import main
from perturn.config.parsing import parse, to_yaml
from perturn.config.recipe import Recipe
from perturn.config.stages import stages
from perturn.data.run_folder import Run, run_folder
from perturn.errors import RunError
from perturn.watch import Watcher
from support.watched import RECIPE, episode, shown

WORK = """
import sys, time
from pathlib import Path
from perturn.config.recipe import read_recipe
from perturn.data.run_folder import Run

run = Run(read_recipe(Path(sys.argv[1])))
run.planned = ["expert", "explore"]
with run.stage("expert"):
    run.expect(run.paths.trajectories("expert"), total=10, done=1)
    print("working", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def recipe(tmp_path):
    """Settings of a run in an empty folder."""
    return parse(Recipe, RECIPE | {"output": str(tmp_path)})


@pytest.fixture
def run(recipe):
    """A run that has begun."""
    return Run(recipe)


def fill(run):
    """A finished run, with scores of base and sft."""
    run.planned = [stage.name for stage in stages(run.recipe)]
    for stage in run.planned:
        with run.stage(stage) as counts:
            counts["episodes"] = 2
    run.paths.evaluation("base").write_text(episode("t/0", 0.0) + episode("t/1", 1.0, "failed"))
    run.paths.evaluation("sft").write_text(episode("t/0", 1.0) + episode("t/1", 0.5))
    run.paths.metrics("align").write_text(
        json.dumps({"step": 1, "loss": 0.5, "clamped": 0.0, "other": 3}) + "\n"
    )


def test_a_finished_run_shows_stages_scores_and_metrics(run):
    """A failed episode counts 0; the score of sft is (1 + 0.5) / 2."""
    fill(run)

    state = Watcher(run.folder).look()

    assert (state.state, state.is_well) == ("finished", True)
    assert [(stage.name, stage.state, stage.done) for stage in state.stages] == [
        (name, "done", 2) for name in run.planned
    ]
    assert [(row.policy, row.n, row.mean_score, row.failed) for row in state.scores] == [
        ("base", 2, 0.0, 1),
        ("sft", 2, 0.75, 0),
    ]
    assert state.metrics == {"align": {"step": 1, "loss": 0.5, "clamped": 0.0}}
    text = shown(state)
    for word in ("finished", "evaluate-sft", "0.750", "align: step 1", "no alarms"):
        assert word in text


def test_of_best_of_n_the_drawn_episodes_are_told(tmp_path):
    """Two tasks, eight samples each: 15 of 16 are there, of which ten failed, though the chosen two did not."""
    part = {
        "evaluate": {
            "tasks": {"n": 2},
            "select": {"name": "likelihood", "samples": 8},
            "sampling": {"temperature": 1.0},
        }
    }
    run = Run(parse(Recipe, RECIPE | part | {"output": str(tmp_path)}))
    with run.stage("evaluate-base") as counts:
        counts |= {"episodes": 2, "drawn_episodes": 15}
        run.paths.drawn("base").parent.mkdir()
        rows = [(f"t/{i % 2}", "failed" if i < 10 else "completed", i // 2) for i in range(15)]
        drawn = [episode(task, 1.0, status, sample=sample) for task, status, sample in rows]
        run.paths.drawn("base").write_text("".join(drawn))
        early = Watcher(run.folder).look()
        run.paths.evaluation("base").write_text(episode("t/0", 1.0) + episode("t/1", 1.0))
    state = Watcher(run.folder).look()

    (row,) = state.scores
    assert (row.n, row.failed, row.drawn, row.asked, state.stages[0].done) == (2, 0, 15, 16, 15)
    assert "15 of 16 episodes" in shown(state)
    for seen in (early, state):
        assert [(each.rule, each.message[:8]) for each in seen.alarms] == [("episodes fail", "base: 10")]


def snapshot(folder):
    """Every file with its content and times."""
    return {
        path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in folder.rglob("*")
    }


def test_watching_writes_nothing(run):
    """Neither files nor folders nor times change."""
    fill(run)
    before = snapshot(run.folder)

    shown(Watcher(run.folder).look())

    assert snapshot(run.folder) == before


@pytest.fixture
def worker(recipe, tmp_path):
    """Another process at work on the run, in the stage `expert`."""
    file = tmp_path / "recipe.yaml"
    file.write_text(to_yaml(recipe))
    process = subprocess.Popen([sys.executable, "-c", WORK, file], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "working\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_running_run_shows_rate_and_time_left(worker, recipe):
    """One of ten was there before; two more since it began to count make the rate, and seven are left."""
    folder = run_folder(recipe)
    (folder / "trajectories/expert.jsonl").write_text("".join(episode(f"t/{i}", 1.0) for i in range(3)))
    watcher = Watcher(folder)
    time.sleep(0.2)

    state = watcher.look()

    now, then = state.stages
    assert (state.state, now.state, now.done, now.total) == ("running", "running", 3, 10)
    assert now.left == pytest.approx(7 / now.rate)
    assert 2 / now.rate >= 0.2
    assert (then.name, then.state) == ("explore", "waiting")
    assert "3/10 episodes" in shown(state)


def test_lines_are_counted_as_they_come(worker, recipe):
    """A torn line waits for its end; a file written anew is read anew."""
    folder = run_folder(recipe)
    file = folder / "trajectories/expert.jsonl"
    watcher = Watcher(folder)
    counts = []
    for text in (episode("t/0", 1.0), episode("t/1", 1.0)[:20], episode("t/1", 1.0)[20:]):
        with file.open("a") as growing:
            growing.write(text)
        counts.append(watcher.look().stages[0].done)
    file.write_text(episode("t/0", 1.0))
    counts.append(watcher.look().stages[0].done)

    assert counts == [1, 1, 2, 1]


def test_a_killed_run_is_reported_as_dead(worker, recipe):
    """After kill -9: the stage, what to do, and exit code 1."""
    folder = run_folder(recipe)
    worker.send_signal(signal.SIGKILL)
    worker.wait()

    state = Watcher(folder).look()

    assert (state.state, state.is_well, state.stages[0].state) == ("died", False, "died")
    assert (
        f"died in expert: its process {worker.pid} is gone without a word. `perturn run {folder}`"
        in state.says
    )


BETWEEN = """
import signal, sys
from perturn.data.run_folder import Run
from perturn.config.parsing import parse
from perturn.config.recipe import Recipe

run = Run(parse(Recipe, {recipe!r}))
run.planned = ["expert", "sft"]
for name in {stages!r}:
    with run.stage(name):
        pass
print("begun", flush=True)
signal.pause()
"""


@pytest.mark.parametrize("stages", [[], ["expert"]])
def test_a_run_killed_between_stages_is_dead(stages, recipe, tmp_path):
    """Or before its first stage: it works until the kill, and nobody else has told that it ended."""
    code = BETWEEN.format(recipe=RECIPE | {"output": str(tmp_path)}, stages=stages)
    folder = run_folder(recipe)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        alive = Watcher(folder).look()
        process.kill()
        process.wait()
        dead = Watcher(folder).look()

    assert (alive.state, alive.is_well) == ("running", True)
    assert (dead.state, dead.is_well) == ("died", False)
    assert f"its process {process.pid} is gone without a word" in dead.says
    assert f"`perturn run {folder}` goes on from there." in dead.says


def test_a_run_that_was_left_with_stages_to_do_is_not_dead(recipe):
    """As after `perturn collect`, whose later stages wait for a training."""
    with Run(recipe) as run:
        run.planned = ["expert", "explore"]
        with run.stage("expert"):
            pass

    state = Watcher(run.folder).look()

    assert (state.state, state.is_well) == ("idle", True)


def test_a_run_is_not_finished_while_its_recipe_has_further_stages(recipe):
    """As after `perturn collect`, which planned and ran the first stage alone."""
    with Run(recipe) as run:
        run.planned = ["expert"]
        with run.stage("expert"):
            pass

    state = Watcher(run.folder).look()

    assert state.state == "idle"
    assert state.says.startswith("nobody works on it; next is evaluate-base. ")


def test_a_killed_process_that_nobody_waits_for_is_dead(worker, recipe):
    """A zombie has its process id still."""
    worker.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    assert psutil.Process(worker.pid).status() == psutil.STATUS_ZOMBIE

    state = Watcher(run_folder(recipe)).look()

    assert state.state == "died"
    assert f"its process {worker.pid} is gone without a word" in state.says


def test_a_process_id_that_is_used_again_is_not_the_run(run):
    """Ours is alive, but it began at another time."""
    with run.stage("expert"):
        facts = json.loads(run.paths.progress.read_text())
        states = []
        for change in ({}, {"process_started": facts["process_started"] - 100}):
            run.paths.progress.write_text(json.dumps(facts | change))
            states.append(Watcher(run.folder).look().state)

    assert states == ["running", "died"]


def test_on_another_machine_silence_decides(run):
    """Its process cannot be seen; a minute without a sign of life is death."""
    with run.stage("expert"):
        file = run.paths.progress
        facts = json.loads(file.read_text())
        states = []
        for age in (30, 90):
            file.write_text(json.dumps(facts | {"host": "elsewhere"}))
            os.utime(file, (time.time() - age,) * 2)
            states.append(Watcher(run.folder).look().state)

    assert states == ["running", "died"]


@pytest.mark.parametrize(
    ("error", "state"), [(ValueError("no such tree"), "failed"), (KeyboardInterrupt(), "stopped")]
)
def test_how_a_stage_ended_is_told(run, error, state):
    """An error with its text; Ctrl-C as what it is."""
    with pytest.raises(type(error)), run.stage("expert"):
        raise error

    seen = Watcher(run.folder).look()

    assert seen.state == state
    assert str(error) in seen.says


def test_a_working_stage_shows_signs_of_life(run, monkeypatch):
    """Its file is touched again and again."""
    monkeypatch.setattr("perturn.data.run_folder.HEARTBEAT_SECONDS", 0.0)
    file = run.paths.progress
    with run.stage("expert"):
        os.utime(file, (0, 0))
        until = time.monotonic() + 30
        while file.stat().st_mtime == 0 and time.monotonic() < until:
            time.sleep(0.05)

        assert file.stat().st_mtime > 0


def test_alarms_are_fed_from_the_files(run):
    """Groups of one score, log-ratios beyond half of the recipe's clamp, and sampled tokens without surprise."""
    groups = "".join(episode(f"t/{i}", 1.0, sample=k, logprob=-0.001) for i in range(10) for k in (0, 1))
    run.paths.trajectories("explore").write_text(groups)
    run.paths.metrics("align").write_text(json.dumps({"step": 1, "log_ratio/chosen": 2.5}) + "\n")

    state = Watcher(run.folder).look()

    assert [alarm.rule for alarm in state.alarms] == [
        "entropy collapsed",
        "log-ratios ran away",
        "groups are all equal",
    ]
    assert "alarms" in shown(state)
    assert not state.is_well


def test_a_folder_that_is_no_run_and_a_file_that_is_no_jsonl_are_refused(run, tmp_path):
    """One line that says where."""
    run.paths.evaluation("base").write_text("{}\n")

    with pytest.raises(RunError, match=r"base\.jsonl:1: not a trajectory: task: expected a value"):
        Watcher(run.folder).look()
    with pytest.raises(RunError, match="is no run folder"):
        Watcher(tmp_path)


@pytest.mark.parametrize(("ends", "code"), [("well", 0), ("failed", 1)])
def test_the_command_prints_json_and_tells_by_its_exit_code(run, monkeypatch, capsys, ends, code):
    """For scripts; nothing on standard error."""
    fill(run)
    if ends == "failed":
        with pytest.raises(ValueError, match="tree"), run.stage("align"):
            raise ValueError("no such tree")
    monkeypatch.setattr(sys, "argv", ["perturn", "watch", str(run.folder), "--once", "--json"])

    with pytest.raises(SystemExit) as caught:
        main()

    printed = capsys.readouterr()
    state = json.loads(printed.out)
    assert (caught.value.code or 0, printed.err) == (code, "")
    assert state["state"] == {"well": "finished"}.get(ends, ends)
    assert [row["policy"] for row in state["scores"]] == ["base", "sft"]


def test_live_watching_ends_when_the_run_ends(worker, recipe, monkeypatch, capsys):
    """The worker is killed while it is watched."""
    folder = run_folder(recipe)
    looks = []

    def kill(seconds):
        looks.append(seconds)
        worker.kill()
        worker.wait()

    monkeypatch.setattr("perturn.watch.watch_screen.time.sleep", kill)
    monkeypatch.setattr(sys, "argv", ["perturn", "watch", str(folder), "--every", "0.5"])

    with pytest.raises(SystemExit, match="1"):
        main()

    assert looks == [0.5]
    assert "died in expert" in " ".join(capsys.readouterr().out.split())


def test_the_time_left_is_the_one_that_the_run_measures(run, monkeypatch):
    """The run counts turns: 100 s are left. By episodes, of which none of 10 has ended, nothing could be said."""
    monkeypatch.setattr("perturn.data.run_folder.HEARTBEAT_SECONDS", 0.0)
    with run.stage("explore"):
        run.expect(run.paths.trajectories("explore"), total=10)
        run.follow(lambda: 100.0)
        deadline = time.monotonic() + 20
        left = None
        while left is None and time.monotonic() < deadline:
            time.sleep(0.05)
            left = Watcher(run.folder).look().stages[-1].left

    assert left == pytest.approx(100.0, abs=5.0)
