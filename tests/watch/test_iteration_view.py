"""Watching a run of many iterations."""

import dataclasses
import json
from pathlib import Path

import pytest

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.data.run_folder import Run
from perturn.watch import Stage, State, Watcher, ledger
from perturn.watch.alarms import Alarm
from perturn.watch.iteration_view import Iteration, Tail, parse_metrics
from support.watched import RECIPE, episode, shown

ONLINE = {
    "iterations": 60,
    "explore": {"samples": 2, "sampling": {"temperature": 1.0}},
    "align": {"loss": {"name": "ppo-clip"}},
    "rows": {"name": "groups"},
    "credit": {"name": "rloo"},
}


@pytest.fixture
def online(tmp_path):
    """A run that explores in its ninth of 60 iterations; success is 1 of 4 in the odd ones and 3 of 4 in the even."""
    run = Run(parse(Recipe, RECIPE | ONLINE | {"output": str(tmp_path)}))
    run.planned = [
        "evaluate-base",
        *(f"{name}-{i:03d}" for i in range(1, 61) for name in ("explore", "credit", "align")),
    ]
    for number in range(1, 9):
        solved = 3 if number % 2 == 0 else 1
        mark = f"-{number:03d}"
        run.paths.trajectories(f"explore{mark}").write_text(
            "".join(episode(f"t/{i // 2}", float(i < solved), sample=i % 2) for i in range(4))
        )
        with run.stage(f"explore{mark}") as counts:
            counts |= {"episodes": 4, "success": solved, "failed": 0}
        with run.stage(f"credit{mark}") as counts:
            counts |= {"asked": 4, "trained": 2, "no_spread": 2, "failed": 0, "filtered": 0}
            counts |= {"groups": 2, "alone": 0, "equal_outcomes": 1, "zero_credit": 1}
        with run.stage(f"align{mark}"):
            row = {
                "step": 1,
                "clip_share": 0.25,
                "kl/turns": 0.125,
                "entropy/chosen": 0.75,
            }
            run.paths.metrics(f"align{mark}").write_text(json.dumps(row) + "\n")
    run.paths.trajectories("explore-009").write_text(episode("t/0", 1.0))
    return run


def test_a_run_of_many_iterations_shows_where_it_is(online):
    """The iteration at work and its stages alone; bars of success; numbers of the last six; the ledger."""
    with online.stage("explore-009"):
        state = Watcher(online.folder).look()
    text = shown(state)

    assert (state.planned, len(state.iterations), len(state.stages)) == (60, 8, 181)
    last = state.iterations[-1]
    assert (last.number, last.success_rate, last.mean_score, last.entropy, last.kl, last.clip_share) == (
        8, 0.75, 0.75, 0.75, 0.125, 0.25,
    )  # fmt: skip
    assert (last.asked, sum(last.bins.values()), last.without_spread) == (4, 4, (1, 2))
    assert "iteration 9 of 60, about" in text
    assert "success ▃▇▃▇▃▇▃▇ 75% now, 25% at first" in text
    assert "2 trained, 2 no spread" in text
    assert [word for word in ("explore-009", "credit-009", "align-009") if word not in text] == []
    assert [word for word in ("explore-008", "explore-010") if word in text] == []
    assert len(text.splitlines()) <= 24


def test_only_the_last_iterations_are_read(online):
    """Of the others the manifest has what is shown: a run of gigabytes is watched too."""
    online.paths.trajectories("explore-002").write_text("no trajectory\n")
    iterations = Watcher(online.folder).look().iterations

    assert [one.mean_score is None for one in iterations] == [True] * 2 + [False] * 6
    assert [one.success_rate for one in iterations[:2]] == [0.25, 0.75]


def test_an_iteration_that_still_explores_is_not_counted(online):
    """The first episodes to end are the short ones, and its samples are not all there."""
    for number in range(10):
        with online.paths.trajectories("explore-009").open("a") as file:
            file.writelines(episode(f"u/{number}", 1.0, sample=i) for i in (0, 1))
    manifest = json.loads(online.paths.manifest.read_text())
    for number in range(1, 9):
        manifest["stages"].pop(f"credit-{number:03d}", None)
    online.paths.manifest.write_text(json.dumps(manifest))
    state = Watcher(online.folder).look()

    assert state.iterations[-1].number == 8
    assert state.alarms == []


def test_entropy_is_compared_with_the_first_iteration(online):
    """20 episodes at 0.5 nats in the first, 20 at 0.05 in the newest."""
    for number, logprob in (("001", -0.5), ("009", -0.05)):
        rows = "".join(episode(f"t/{i}", 1.0, logprob=logprob) for i in range(20))
        online.paths.trajectories(f"explore-{number}").write_text(rows)

    assert [alarm.rule for alarm in Watcher(online.folder).look().alarms] == ["entropy collapsed"]


@pytest.mark.parametrize("counts", [{"episodes": "x", "success": [1]}, {"episodes": 4, "success": -900}, {}])
def test_odd_counts_of_a_manifest_stop_nothing(online, counts):
    """It may come from anywhere, and so may the recipe."""
    manifest = json.loads(online.paths.manifest.read_text())
    manifest["stages"]["explore-008"]["counts"] = counts
    manifest["stages"]["credit-008"]["counts"] = {"zero_credit": 1, "asked": "x"}
    online.paths.manifest.write_text(json.dumps(manifest))
    recipe = online.paths.recipe.read_text().replace("iterations: 60", "iterations: .inf")
    online.paths.recipe.write_text(recipe)

    state = Watcher(online.folder).look()

    assert state.planned == 1
    assert shown(dataclasses.replace(state, planned=60))


def test_bins_that_do_not_sum_are_told(online):
    manifest = json.loads(online.paths.manifest.read_text())
    manifest["stages"]["credit-008"]["counts"]["trained"] = 1
    online.paths.manifest.write_text(json.dumps(manifest))

    assert "1 trained, 2 no spread of 4" in shown(Watcher(online.folder).look())


def test_a_narrow_terminal_shows_every_number_and_alarms_first(online):
    """Of 80 columns, as most are; alarms come after the line on the run."""
    state = Watcher(online.folder).look()
    alarm = Alarm("episodes fail", "base: 10 of the last 10")

    lines = shown(dataclasses.replace(state, alarms=[alarm]), width=80).splitlines()

    assert "alarms" in " ".join(lines[:4])
    assert [line for line in lines if "…" in line] == []
    row = next(line for line in lines if line.split()[:1] == ["8"])
    assert [word for word in ("75% [", " 0.75 ", " 0.125 ", " 0.25 ", " 2 trained") if word not in row] == []


def test_a_file_that_has_not_grown_is_not_opened(tmp_path, monkeypatch):
    """A run of many iterations has many files, and one grows; a screen looks at all of them every second."""
    file, opened, real = tmp_path / "align.jsonl", [], Path.open
    file.write_text('{"loss": 1.0}\n')
    monkeypatch.setattr(
        Path, "open", lambda path, *how, **more: opened.append(path) or real(path, *how, **more)
    )
    tail = Tail(file, parse_metrics)

    assert [tail.look(), tail.look()] == [[{"loss": 1.0}]] * 2
    assert len(opened) == 1
    file.write_text('{"loss": 1.0}\n{"loss": 0.5}\n')
    assert tail.look() == [{"loss": 1.0}, {"loss": 0.5}]


def test_the_time_left_counts_evaluations_and_whole_iterations(online):
    """Eight iterations of 10 s and 90 s of evaluation are whole, so 52 of 100 s are left."""
    manifest = json.loads(online.paths.manifest.read_text())
    for number in range(1, 9):
        manifest["stages"][f"explore-{number:03d}"]["seconds"] = 10.0
        manifest["stages"][f"evaluate-ppo-clip-{number:03d}"] = {"done": True, "seconds": 90.0}
    online.paths.manifest.write_text(json.dumps(manifest))
    online.manifest["stages"] = manifest["stages"]
    with online.stage("explore-009"):
        state = Watcher(online.folder).look()

    assert [round(one.seconds) for one in state.iterations] == [100] * 8
    assert "iteration 9 of 60, about 1 h 26 min left" in shown(state)


def test_an_iteration_without_bins_has_no_ledger():
    assert ledger(Iteration(4, 0.25)) == ""


def test_the_score_of_an_unfinished_evaluation_is_marked(online):
    """The first episodes to end are short and mostly solved."""
    for policy in ("base", "ppo-clip-008"):
        online.paths.evaluation(policy).write_text(episode("t/0", 1.0) + episode("t/1", 0.0))
    with online.stage("evaluate-base"):
        pass
    with online.stage("evaluate-ppo-clip-008"):
        state = Watcher(online.folder).look()

    assert [(one.policy, one.unfinished) for one in state.scores] == [("base", False), ("ppo-clip-008", True)]
    assert shown(state).count("2 so far") == 1


def test_a_narrow_screen_shows_the_names_of_the_stages():
    """No stage has used memory yet; its column is left out."""
    stages = [
        Stage("explore-004", "running", 50, 128, "episodes", 1.5, 70, 300),
        Stage("align-004", "waiting"),
    ]
    told = shown(State("runs/x", "running", "", stages, [], {}, [], [], 1, None), width=48)

    assert "explore-004  running    50/128  1.5/s" in told
    assert "memory" not in told


@pytest.mark.parametrize("width", [*range(30, 80), 200])
def test_a_narrow_screen_leaves_out_whole_columns(width):
    """At each width, all words of the table are whole; the last columns are there if they fit."""
    stages = [
        Stage("expert", "done", 50, 50, "episodes", None, 100),
        Stage("explore-004", "running", 12345, 20000, "episodes", 1.5, 70, 300, 22.5),
    ]
    told = shown(State("runs/x", "running", "", stages, [], {}, [], [], 1, None), width=width)

    whole = """stage items rate time left memory expert done 50 episodes 1 min 40 s
    explore-004 running 12345/20000 1.5/s 10 5 00 22.5 GB"""
    assert set(told.split("checks)")[1].split()) <= set(whole.split())
    assert ("left" in told, "memory" in told) == (width >= 56, width >= 65)
