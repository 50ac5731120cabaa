"""Whole studies of a tiny policy: what is shared is made once, kills and failures cost no more than what they hit."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from perturn.run.execute import open_run, run_stages
from perturn.run.verify_run import verify
from perturn.study.run_study import open_study, run_study
from perturn.study.study_files import Files
from perturn.study.tables.episode_table import read_episodes

from .corridor import make_place

OWN = ("recipe.yaml", "tasks.json", "tokens.json")
PER_SEED = ("expert", "evaluate-base", "sft", "evaluate-sft", "explore", "pair")


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder):
    """A folder with a world, a policy, a recipe and a study, and a cache of its own."""
    folder = tmp_path_factory.mktemp("study")
    make_place(folder, tiny_folder)
    return folder


@pytest.fixture(scope="module")
def start(place):
    """Begin `perturn study` as a process of its own."""

    def begin(*words, pause=0.0):
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]),
            "PERTURN_CACHE": str(place / "cache"),
            "CORRIDOR_PAUSE": str(pause),
        }
        return subprocess.Popen(
            [sys.executable, "-m", "perturn", "study", "study.yaml", *words, "--workers", "2"],
            cwd=place,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return begin


@pytest.fixture(scope="module")
def whole(place, start):
    """A study that nothing interrupted, and what it printed."""
    process = start()
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == 0, printed
    return Files(place / "studies" / "whole"), printed


def rows(files):
    """The rows of the cells, and of the episodes."""
    cells = json.loads(files.cells.read_text())
    return cells, read_episodes(files.episodes)


def manifests(files):
    """Run -> its stages."""
    found = {
        file.parent.name: json.loads(file.read_text()) for file in files.folder.glob("runs/*/manifest.json")
    }
    return {name: one["stages"] for name, one in found.items() if one["stages"]}


def digests(run):
    """File -> SHA-256, of all a run has finished but its own recipe and task lists; the expert's episodes as a set.

    Those are stored as they end, which depends on timing, and are read in an order of their own. Texts of tokens may be
    those of more tokens, where the run they came from has gone on.
    """
    files = json.loads((run / "manifest.json").read_text())["files"]
    found = {name: one["sha256"] for name, one in files.items() if name not in OWN}
    expert = run / "trajectories" / "expert.jsonl"
    return found | (
        {"trajectories/expert.jsonl": sorted(expert.read_text().splitlines())} if expert.exists() else {}
    )


@pytest.mark.slow
def test_every_cell_is_done_and_has_its_episodes(whole):
    """One seed is tuned: 6 runs of 2 tasks; both are tested: 4 methods x 2 seeds x 4 tasks."""
    cells, episodes = rows(whole[0])

    assert {row["state"] for row in cells} == {"done"}
    assert Counter((row["method"], row["panel"]) for row in cells) == {
        **{
            (method, "tune"): 2 if method in ("dpo", "tlm-dre") else 1
            for method in ("base", "sft", "dpo", "tlm-dre")
        },
        **{(method, "test"): 2 for method in ("base", "sft", "dpo", "tlm-dre")},
    }
    assert Counter(row["panel"] for row in episodes) == {"tune": 6 * 2, "test": 8 * 4}
    assert {row["task"].partition("-")[0] for row in episodes if row["panel"] == "test"} == {"test"}
    assert {row["kind"] for row in episodes} == {"left", "right"}
    assert all(row["seconds"] > 0 for row in cells)
    assert all(
        verify(whole[0].folder / run).damaged == []
        for row in cells
        for run in row["runs"]
        if row["seed"] == 0
    )


@pytest.mark.slow
def test_what_cells_share_is_made_once_a_seed(whole):
    """Each stage before the alignment is made by one run of a seed; the expert on SFT's tasks alone, by one more."""
    made = Counter(
        (name.partition("seed-")[2][0], stage)
        for name, stages in manifests(whole[0]).items()
        if "test" not in name
        for stage, note in stages.items()
        if "taken_from" not in note
    )

    tuned = {("0", stage): 1 for stage in PER_SEED} | {("0", "expert"): 2}
    other = {("1", stage): 1 for stage in ("sft", "explore", "pair")} | {("1", "expert"): 2}
    aligned = {("0", "align"): 4, ("1", "align"): 2, ("0", "evaluate-dpo"): 2, ("0", "evaluate-tlm-dre"): 2}
    assert made == tuned | other | aligned


@pytest.mark.slow
def test_the_chosen_point_is_the_best_on_the_tuning_task_list(whole):
    """By mean success; of equal ones the first. It is the same on both seeds."""
    cells, episodes = rows(whole[0])
    for method in ("dpo", "tlm-dre"):
        solved = Counter()
        for row in episodes:
            if row["method"] == method and row["panel"] == "tune":
                solved[row["point"]] += row["success"]
        best = next(point for point, count in solved.items() if count == max(solved.values()))
        tested = {str(row["point"]) for row in cells if row["method"] == method and row["panel"] == "test"}

        assert len(solved) == 2
        assert tested == {str({"align.learning_rate": float(best.partition("=")[2])})}


@pytest.mark.slow
def test_a_run_that_took_stages_over_is_one_made_alone(whole, place, monkeypatch):
    """To the byte: episodes, pairs, metrics, policies; the same recipe under another name."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("PERTURN_CACHE", str(place / "cache"))
    monkeypatch.syspath_prepend(str(place))
    names = [name for name, stages in manifests(whole[0]).items() if "taken_from" in stages.get("pair", {})]
    shared = (
        whole[0].folder / "runs" / next(name for name in names if "seed-0" in name and "test" not in name)
    )

    with open_run(shared / "recipe.yaml", ["name=alone", "output=runs"]) as alone:
        run_stages(alone)

    assert digests(alone.folder) == digests(shared)
    texts = [json.loads((each / "tokens.json").read_text()).items() for each in (alone.folder, shared)]
    assert texts[0] <= texts[1]


@pytest.mark.slow
def test_a_second_call_does_nothing(whole, start):
    before = {file: file.stat().st_mtime_ns for file in whole[0].folder.rglob("*/manifest.json")}
    results = rows(whole[0])

    process = start()
    printed, _ = process.communicate(timeout=60)

    assert process.returncode == 0, printed
    assert {file: file.stat().st_mtime_ns for file in whole[0].folder.rglob("*/manifest.json")} == before
    assert rows(whole[0]) == results


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_study_that_is_stopped_ends_all_its_processes_and_goes_on(whole, place, start, number):
    """Killed, or by Ctrl-C, while cells are at work; the same command then comes to the same results."""
    name = f"stopped-{number.name}"
    files = Files(place / "studies" / name)
    process = start(f"name={name}", pause=0.1)
    while not any("sft" in stages for stages in manifests(files).values()):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=20)

    assert children
    assert alive == []
    assert process.returncode in (-9, 130)
    again = start(f"name={name}")
    printed, _ = again.communicate(timeout=240)
    assert again.returncode == 0, printed
    assert rows(files)[1] == rows(whole[0])[1]
    runs = [run for run in manifests(files) if "test" not in run]
    assert {run: digests(files.folder / "runs" / run) for run in runs} == {
        run: digests(whole[0].folder / "runs" / run) for run in runs
    }


@pytest.mark.slow
def test_a_cell_that_fails_is_shown_and_stops_no_other(place, monkeypatch, capfd):
    """No pair has so wide a gap, so `wide` cannot be aligned; sft is scored all the same."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    words = ["name=failing", "methods={wide: {rows.threshold: 9}}", "sweep={}", "seeds=[0]", "tune=null"]
    board = open_study(Path("study.yaml"), words)

    run_study(board, workers=2)

    cells, episodes = rows(Files(place / "studies" / "failing"))
    assert {row["method"]: row["state"] for row in cells} == {"base": "done", "sft": "done", "wide": "failed"}
    assert next(row["error"] for row in cells if row["method"] == "wide").startswith(
        "rows.name=expert-pairs: of 8 explored trajectories and the expert's, no pair is left"
    )
    assert {row["method"] for row in episodes} == {"base", "sft"}
    assert "wide seed 0, test: failed: rows.name=expert-pairs: of 8 explored" in capfd.readouterr().err
