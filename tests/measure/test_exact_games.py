"""Measured advantages against exact ones, on games of `alfworld-like` that are small enough to solve."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from perturn.episodes.play_many import Job, play
from perturn.measure.advantages import measure, returns_of
from perturn.measure.points import plan
from perturn.types import Sampling

FILE = Path(__file__).parents[2] / "benchmarks" / "small_games.py"
spec = importlib.util.spec_from_file_location("small_games", FILE)
sys.modules["small_games"] = small = importlib.util.module_from_spec(spec)
spec.loader.exec_module(small)


def playing(games, jobs):
    engine, worlds = small.Chooser(games), small.ALFWorldLike
    return play(jobs, engine=engine, make_environment=worlds, protocol=small.PROTOCOL, sampling=Sampling())


def explored(games, samples=3):
    """Episodes in a plan, and the exact value before each turn of each and after its last."""
    jobs = [Job(game.task, sample, sample) for game in games for sample in range(samples)]
    episodes = sorted(playing(games, jobs), key=lambda one: one.key)
    known = {game.task.id: game for game in games}
    return plan(episodes, "deterministic"), [small.exact_values(known[one.task.id], one) for one in episodes]


def exact_advantages(turns, planned, values):
    return np.array(
        [
            planned.episodes[e].turns[t].reward + values[e][t + 1] - values[e][t]
            for e, t in zip(turns.episode, turns.position, strict=True)
        ]
    )


def measured(games, continuations):
    """Turns of explored episodes as a run measures them, and their exact advantages."""
    planned, values = explored(games)
    missing = {(each.job.task.id, each.job.sample): each for each in planned.jobs(0, continuations, [])}
    played = playing(games, [each.job for each in missing.values()])
    turns = measure(planned, returns_of([missing[one.key].ended(one) for one in played]))
    return turns, exact_advantages(turns, planned, values), planned


def coverage(turns, exact):
    return float(((turns.low <= exact) & (exact <= turns.high)).mean())


@pytest.fixture(scope="module")
def values_known():
    return explored(small.small_games(2))


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


@pytest.mark.parametrize("continuations", [4, 8, 16])
def test_coverage_over_many_replications(continuations, values_known):
    """Returns drawn with the exact values: at least 93 of 100 intervals of 95 % hold the exact advantage.

    Turns are left out whose values are certain before and after, since no interval misses them. With 100 replications
    of five games it was 0.991, 0.988, 0.983 of these numbers of continuations, and 0.970 of 64.
    """
    planned, values = values_known
    chance = {
        point: value
        for points, own in zip(planned.before, values, strict=True)
        for point, value in zip(points, own[:-1], strict=True)
    }
    random, held = np.random.default_rng(0), list[bool]()
    for seed in range(50):
        returns = {point: random.binomial(1, value, continuations) * 1.0 for point, value in chance.items()}
        turns = measure(planned, returns, seed)
        exact = exact_advantages(turns, planned, values)
        before = np.array([values[e][t] for e, t in zip(turns.episode, turns.position, strict=True)])
        after = exact + before
        uncertain = (np.abs(before - 0.5) < 0.5) | (np.abs(after - 0.5) < 0.5)
        held += ((turns.low <= exact) & (exact <= turns.high))[uncertain].tolist()

    assert len(held) > 1000
    assert np.mean(held) >= 0.93
