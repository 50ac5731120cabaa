"""Measured advantages against exact ones, on games of `alfworld-like` that are small enough to solve."""

import importlib.util
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from perturn.episodes.play_many import Job, play
from perturn.measure.advantages import measure, returns_of
from perturn.measure.points import plan
from perturn.measure.scores import correlation, estimate
from perturn.types import Sampling

FILE = Path(__file__).parents[2] / "benchmarks" / "small_games.py"
spec = importlib.util.spec_from_file_location("small_games", FILE)
sys.modules["small_games"] = small = importlib.util.module_from_spec(spec)
spec.loader.exec_module(small)


def measured(games, continuations, seed=0, explored=3):
    """Turns of explored episodes as a run measures them, and their exact advantages."""
    playing = partial(
        play, engine=small.Chooser(games), make_environment=small.ALFWorldLike, protocol=small.PROTOCOL
    )
    jobs = [Job(game.task, 1000 * seed + sample, sample) for game in games for sample in range(explored)]
    episodes = sorted(playing(jobs, sampling=Sampling()), key=lambda one: one.key)
    planned = plan(episodes, "deterministic")
    missing = {(each.job.task.id, each.job.sample): each for each in planned.jobs(seed, continuations, [])}
    played = playing([each.job for each in missing.values()], sampling=Sampling())
    found = [missing[one.key].ended(one) for one in played]
    turns = measure(planned, returns_of(found), seed)
    known = {game.task.id: game for game in games}
    exact = []
    for number, turn in zip(turns.episode, turns.position, strict=True):
        one = episodes[number]
        values = small.exact_values(known[one.task.id], one)
        exact.append(one.turns[turn].reward + values[turn + 1] - values[turn])
    return turns, np.array(exact), planned


def coverage(turns, exact):
    return float(((turns.low <= exact) & (exact <= turns.high)).mean())


@pytest.fixture(scope="module")
def found():
    return measured(small.small_games(2), continuations=12)


def test_intervals_hold_the_exact_advantage(found):
    turns, exact, _ = found

    assert len(exact) > 20
    assert coverage(turns, exact) >= 0.93
    assert (turns.high - turns.low).max() < 1.5


def test_the_mean_error_is_chance(found):
    """The sum of a failed episode's advantages is -V_0, and the errors of neighbours cancel but for the first."""
    turns, exact, planned = found

    errors = [
        turns.advantage[turns.episode == e].sum() - exact[turns.episode == e].sum()
        for e in set(turns.episode)
    ]
    assert len(turns.task) == sum(len(one.turns) for one in planned.episodes)
    assert abs(np.mean(errors)) < 0.5


def test_episodes_with_one_beginning_share_their_points(found):
    _, _, planned = found

    firsts = {own[0] for own in planned.before}
    assert len(firsts) == 2 < len(planned.episodes)
    assert len(planned.points) < sum(len(own) for own in planned.before)


@pytest.mark.slow
def test_coverage_over_many_replications():
    """Advantages of six games, ten replications: at least 93 of 100 intervals of 95 % hold the exact one."""
    games, held, correlations = small.small_games(6), [], []
    for seed in range(10):
        turns, exact, _ = measured(games, continuations=8, seed=seed)
        open_ = (np.abs(exact) > 1e-3) | (turns.high - turns.low > 0)
        held += ((turns.low <= exact) & (exact <= turns.high))[open_].tolist()
        correlations.append(estimate(correlation, turns, exact).mean)

    assert np.mean(held) >= 0.93
    assert np.mean(correlations) == pytest.approx(1, abs=0.1)
