"""`perturn measure` plays FAILED continuations again, and can be repeated if they fail each time."""

from dataclasses import replace

import pytest

from perturn.data.run_paths import RunPaths
from perturn.episodes.play_many import play
from perturn.errors import EnvironmentFailure
from perturn.measure.measure_run import Wanted, forecast_run, measure_run
from perturn.types import Status

from .online import GROUPS

WANTED = Wanted(["rloo", "gigpo", "uniform"], episodes=6, continuations=4)


@pytest.fixture(scope="module")
def run(run_once):
    return run_once("measured", *GROUPS, "iterations=1", "evaluate=null")


def test_a_failed_continuation_is_played_again(run, monkeypatch):
    """Also if few failed: with 4 continuations, one failure would leave out the turns at its point."""
    monkeypatch.chdir(run.parents[1])
    file = RunPaths(run).continuations()
    whole = measure_run(run, WANTED)
    lines = file.read_text().splitlines()
    lines[0] = lines[0].replace('"counted"', '"failed"')
    file.write_text("".join(f"{line}\n" for line in lines))

    assert '"failed"' in lines[0]
    assert forecast_run(run, WANTED).to_play == 1
    assert measure_run(run, WANTED) == whole
    assert len(file.read_text().splitlines()) == len(lines) + 1
    file.unlink()


def test_continuations_that_fail_each_time_do_not_stop_a_repeated_measurement(run, monkeypatch):
    """They are the only ones that a repeated call plays."""
    monkeypatch.chdir(run.parents[1])
    file = RunPaths(run).continuations()
    measure_run(run, WANTED)
    lines = file.read_text().splitlines()
    marked = [line.replace('"counted"', '"failed"') for line in lines[:20]]
    file.write_text("".join(f"{line}\n" for line in [*marked, *lines[20:]]))

    def failing(*given, **settings):
        for one in play(*given, **settings):
            yield replace(one, status=Status.FAILED, error="RuntimeError: gone")

    monkeypatch.setattr("perturn.measure.play_points.play", failing)

    again = measure_run(run, WANTED)
    assert again["failed"] == sum('"failed"' in line for line in marked) > 16
    size = file.stat().st_size
    assert measure_run(run, WANTED) == again
    assert file.stat().st_size == size, "a third call plays nothing"
    file.unlink()


def test_failures_of_a_stopped_call_count_in_the_next_one(run, monkeypatch):
    """The share that may fail holds in each call, until all continuations were played."""
    monkeypatch.chdir(run.parents[1])
    file = RunPaths(run).continuations()

    def failing(*given, **settings):
        for one in play(*given, **settings):
            yield replace(one, status=Status.FAILED, error="RuntimeError: gone")

    with monkeypatch.context() as patched:
        patched.setattr("perturn.measure.play_points.play", failing)
        for _ in range(5):
            with pytest.raises(EnvironmentFailure, match=r"continuations: .* episodes failed"):
                measure_run(run, WANTED)
    file.unlink()
