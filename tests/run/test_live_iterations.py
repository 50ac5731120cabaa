"""The iterations of an online run while it works: a line for each, and the time left of the whole run."""

import io
import json
import time

import pytest
from rich.console import Console

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.config.stages import stages
from perturn.data.run_folder import Run
from perturn.display import live_iterations, progress_bars
from perturn.display.live_iterations import Iterations, doing, shows_iterations
from perturn.display.progress_bars import Pace, Screen, Work

RECIPE = {
    "name": "online",
    "model": {"name": "none"},
    "environment": {"name": "none"},
    "protocol": {"name": "none"},
    "iterations": 3,
    "explore": {"samples": 2, "sampling": {"temperature": 1.0}},
    "rows": {"name": "groups"},
    "credit": {"name": "rloo"},
    "align": {"loss": {"name": "ppo-clip"}},
    "evaluate": {"every": 3},
}
SECONDS = {"explore": 20.0, "credit": 1.0, "align": 9.0, "evaluate": 30.0}
"""Time of a stage of each kind."""


def episode(number, solved):
    """A stored trajectory of a task that has two."""
    row = {"version": 1, "task": {"id": f"t/{number // 2}"}, "sample": number % 2, "success": solved}
    turn = {"observation": [], "action": {"text": "a"}}
    return json.dumps({**row, "turns": [turn], "total_reward": float(solved)}) + "\n"


@pytest.fixture(params=[False, True], ids=["log", "terminal"])
def printed(request, monkeypatch):
    """What is printed to a log, or to a terminal."""
    file = io.StringIO()
    console = Console(file=file, width=60, force_terminal=request.param)
    monkeypatch.setattr(live_iterations, "console", console)
    screen = Screen(console)
    for module in (live_iterations, progress_bars):
        monkeypatch.setattr(module, "screen", screen)
    return file


def play(run, stage):
    """Do a stage by hand: in iteration k, k + 1 of 8 episodes are solved."""
    kind = "evaluate" if stage.command == "evaluate" else stage.name.partition("-")[0]
    solved = stage.iteration + 1
    with run.stage(stage.name) as counts:
        if kind == "explore":
            rows = (episode(number, number < solved) for number in range(8))
            run.paths.trajectories(stage.name).write_text("".join(rows))
        if kind in ("explore", "evaluate"):
            counts |= {"episodes": 8, "success": solved, "failed": 0}
        if kind == "credit":
            counts |= {"asked": 8, "trained": 6, "no_spread": 2, "failed": 0, "filtered": 0, "groups": 4}
        if kind == "align":
            metrics = {"step": 1, "kl/turns": 0.0125, "entropy/chosen": 0.75}
            run.paths.metrics(stage.name).write_text(json.dumps(metrics) + "\n")
    run.manifest["stages"][stage.name]["seconds"] = SECONDS[kind]


def test_an_iteration_leaves_one_line(tmp_path, printed):
    """Success with its interval over tasks, a bar for each iteration, the KL, where its episodes ended, and the time.

    What is left: iterations of 30 s each, and the last policy's score, which takes as long as the base's.
    """
    run = Run(parse(Recipe, RECIPE | {"output": str(tmp_path)}))
    planned = stages(run.recipe)
    iterations = Iterations(run, planned)
    for stage in planned:
        with doing(stage, iterations):
            play(run, stage)
    lines = [line for line in printed.getvalue().splitlines() if "success" in line and "of the run" in line]
    lines = [line for line in lines if ": success" in line]

    assert shows_iterations(run, planned)
    assert len(lines) == 3
    first, second, third = lines
    assert "iteration 1 of 3: success 25.0% [" in first
    assert (
        "▃, KL 0.0125, entropy 0.75, 6 trained, 2 no spread, 0:00:30, about 0:01:30 left of the run" in first
    )
    assert "iteration 2 of 3: success 37.5% [" in second
    assert ", ▃▄, KL" in second
    assert "about 0:01:00 left of the run" in second
    assert ", ▃▄▅, KL" in third
    assert "held-out success 50.0%" in third
    assert "about 0:00:00 left of the run" in third


def test_a_log_has_no_control_characters_and_a_terminal_shows_the_iteration_at_work(tmp_path, printed):
    """Beside the bar: where the run is, success so far with its interval, the bars, the time left."""
    run = Run(parse(Recipe, RECIPE | {"output": str(tmp_path)}))
    planned = stages(run.recipe)
    iterations = Iterations(run, planned)
    for stage in planned[:4]:
        with doing(stage, iterations):
            play(run, stage)
    with iterations.doing(planned[4]):
        picture = iterations.picture().plain
        said = iterations.line()

    assert planned[4].name == "explore-002"
    assert picture.startswith("iteration 2 of 3  success 25.0% [")
    assert picture.endswith("] (iteration 1)  ▃  about 0:01:30 left of the run")
    assert said == "iteration 2 of 3, about 0:01:30 left of the run"
    assert ("\x1b" in printed.getvalue()) == live_iterations.console.is_terminal


def test_the_time_left_is_known_after_the_first_iteration(tmp_path, printed):
    """Before, nobody knows what an alignment takes; the bar of the stage at work counts for the rest of it."""
    run = Run(parse(Recipe, RECIPE | {"output": str(tmp_path)}))
    planned = stages(run.recipe)
    iterations = Iterations(run, planned)
    with iterations.doing(planned[1]):
        before = iterations.line()
    for stage in planned[:4]:
        play(run, stage)
    with iterations.doing(planned[4]), progress_bars.screen.showing(Work("exploring", 10)) as work:
        work._pace = Pace(time.monotonic() - 1.0)
        work.advance()
        after = iterations._left_of_now(None)

    assert before == "iteration 1 of 3, time left of the run known after iteration 1"
    assert 8 <= after <= 10


def test_a_run_without_iterations_names_its_stages(tmp_path, printed):
    """As before: there is nothing to compare."""
    run = Run(parse(Recipe, RECIPE | {"iterations": 1, "output": str(tmp_path)}))
    planned = stages(run.recipe)
    with doing(planned[1], None):
        pass

    assert not shows_iterations(run, planned)
    assert "explore" in printed.getvalue()
