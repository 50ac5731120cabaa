"""Exploration in the background with an engine, a world and a training that sleep: order, slots and failures."""

import threading
import time

import pytest

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.config.stages import stages
from perturn.data.run_folder import Run
from perturn.data.store import TrajectoryStore, read_trajectories
from perturn.data.token_lag import lags
from perturn.errors import EnvironmentFailure, RunError
from perturn.group import groups_of
from perturn.run.ahead import look_ahead
from perturn.run.stages.collect_stage import explore
from support.benchmarks import benchmark

found = benchmark("staleness")


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Open a run of sleeping parts by its staleness, and the stages of it."""
    monkeypatch.setattr(found, "ANSWER", 0.01)
    monkeypatch.setattr(found, "STEP", 0.002)

    def opened(staleness, name="ahead"):
        recipe = parse(Recipe, found._recipe(name, tmp_path, staleness))
        return Run(recipe), stages(recipe)

    return opened


def done(session, planned, names=None, train=0.0):
    """Do stages in order, of which trainings sleep."""
    for stage in planned:
        if session.run.is_done(stage.name) or (names is not None and stage.name not in names):
            continue
        look_ahead(session, stage, planned)
        if stage.name.startswith("explore"):
            explore(session, stage)
        else:
            with session.run.stage(stage.name):
                time.sleep(train)


def episodes(run, number):
    return list(read_trajectories(run.paths.trajectories(f"explore-{number:03d}")))


@pytest.mark.parametrize("staleness", [1, 2])
def test_as_many_iterations_are_explored_ahead_as_may_be(opened, staleness):
    """While the first one is trained, the next ones are played to their ends, and no further one is begun."""
    run, planned = opened(staleness)
    with run, found.SleepingSession(run, 0.0) as session:
        done(session, planned, {"explore-001"})
        until, ahead = time.monotonic() + 60, range(2, 2 + staleness)
        files = {number: run.paths.trajectories(f"explore-{number:03d}") for number in range(1, 6)}
        while not all(files[number].is_file() and len(episodes(run, number)) == 16 for number in ahead):
            assert time.monotonic() < until
            time.sleep(0.02)

        assert not files[2 + staleness].exists()
        assert {
            lag for number in ahead for one in episodes(run, number) for lag in lags(one, number - 1)
        } == {*range(1, staleness + 1)}


def test_all_iterations_are_whole_and_no_token_is_too_old(opened, monkeypatch):
    """Each episode once, in no more worlds than are played in at a time; the engine ends with the newest but one."""
    (run, planned), worlds, lock = opened(1), [0], threading.Lock()

    class Counted(found.Sleeping):
        def __init__(self):
            with lock:
                worlds.append(worlds[-1] + 1)

        def close(self):
            with lock:
                worlds.append(worlds[-1] - 1)

    monkeypatch.setattr(found, "Sleeping", Counted)
    with run, found.SleepingSession(run, 0.7) as session:
        done(session, planned, train=0.02)
        for number in range(1, 6):
            played = episodes(run, number)
            assert len({one.key for one in played}) == len(played) == 16
            assert max(lag for one in played for lag in lags(one, number - 1)) <= 1
        assert session.engine("").version == 4
        assert max(worlds) == found.SLOTS


def test_a_run_that_is_resumed_plays_what_is_missing(opened):
    """Five episodes of the iteration ahead were stored before the kill; they stay, and their tokens with them."""
    run, planned = opened(1)
    with run, found.SleepingSession(run, 0.0) as session:
        done(session, planned, {"explore-001", "credit-001"})
    file = run.paths.trajectories("explore-002")
    with TrajectoryStore(file) as store:
        stored = list(store)[:5]
        store.drop(lambda one: one.key not in {each.key for each in stored})
    run = Run(run.recipe)
    with run, found.SleepingSession(run, 0.0) as session:
        done(session, planned)
        again = episodes(run, 2)

    assert again[: len(stored)] == stored
    assert len({one.key for one in again}) == len(again) == 16


@pytest.mark.parametrize("killed", [False, True])
def test_episodes_of_a_task_are_one_group_whichever_policy_they_begin_with(opened, monkeypatch, killed):
    """Half of them begin with the next policy, after its weights are taken in place or after a kill."""
    monkeypatch.setattr(found, "ANSWER", 0.01 if killed else 0.05)
    run, planned = opened(1)
    with run, found.SleepingSession(run, 0.0) as session:
        done(session, planned, {"explore-001", "credit-001", "align-001"} if killed else {"explore-001"})
        if not killed:
            done(session, planned, train=0.02)
        ahead, until = run.paths.trajectories("explore-002"), time.monotonic() + 60
        while not (ahead.is_file() and ahead.read_bytes().count(b"\n") >= 5):
            assert time.monotonic() < until, "five episodes are stored in the background"
            time.sleep(0.01)
    if killed:
        with TrajectoryStore(run.paths.trajectories("explore-002")) as store:
            kept = {one.key for one in list(store)[:5]}
            assert len(kept) == 5
            store.drop(lambda one: one.key not in kept)
        run = Run(run.recipe)
        with run, found.SleepingSession(run, 0.0) as session:
            done(session, planned)
    for number in range(1, 6):
        assert [len(each) for each in groups_of(episodes(run, number))] == [found.SAMPLES] * found.TASKS


def test_what_fails_in_the_background_is_raised_where_it_is_waited_for(opened, monkeypatch):
    """Not in the stage that is being done meanwhile; nothing further is begun."""
    run, planned = opened(1)
    with run, found.SleepingSession(run, 0.0) as session:
        monkeypatch.setattr(found, "ANSWER", 0.1)  # else the second one may be over before it can fail
        done(session, planned, {"explore-001"})
        monkeypatch.setattr(found.Sleeping, "step", lambda self, action: 1 / 0)
        done(session, planned, {"credit-001", "align-001"})
        with pytest.raises(EnvironmentFailure, match="of the last"):
            done(session, planned, {"explore-002", "explore-003"})
        assert not run.is_done("explore-002")


def test_the_end_of_a_session_stops_what_is_played(opened, monkeypatch):
    """The threads end, though their answers would take minutes."""
    run, planned = opened(1)
    with run:
        with found.SleepingSession(run, 0.0) as session:  # which a failure leaves too
            done(session, planned, {"explore-001"})
            monkeypatch.setattr(found, "ANSWER", 300.0)
            done(session, planned, {"credit-001", "align-001"})
        assert [each.name for each in threading.enumerate() if each.name.startswith("explore-")] == []
        assert not run.is_done("explore-002")


def test_another_policy_cannot_act_meanwhile(opened):
    """The engine serves one at a time."""
    run, planned = opened(1)
    with run, found.SleepingSession(run, 0.0) as session:
        done(session, planned, {"explore-001"})
        with pytest.raises(RunError, match="policy 'other' is to act while 'base' explores"):
            session.ahead.port("other")


def test_an_engine_that_cannot_swap_is_refused(opened, monkeypatch):
    """Where it says so of itself only once it is open."""
    run, planned = opened(1)
    monkeypatch.delattr(found.SleepingEngine, "swap_weights")
    with run, found.SleepingSession(run, 0.0) as session, pytest.raises(RunError, match="set staleness=0"):
        done(session, planned, {"explore-001"})
