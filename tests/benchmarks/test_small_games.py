"""Exact values on games of `alfworld-like` that are small enough to solve."""

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "small_games.py"
spec = importlib.util.spec_from_file_location("small_games", FILE)
sys.modules["small_games"] = found = importlib.util.module_from_spec(spec)
spec.loader.exec_module(found)


@pytest.fixture(scope="module")
def game():
    (one,) = found.small_games(1)
    return one


def test_a_chance_is_the_mean_over_what_can_be_said(game):
    """One turn from the end of the expert's script: 1 over the commands of the list that can be said there."""
    script = found.ALFWorldLike().expert(game.task)
    key = game.start
    for command in script[:-1]:
        assert command in game.options(key)
        key = game.after(key, command)

    assert game.chance(key, 1) == pytest.approx(1 / len(game.options(key)))
    assert game.chance(key, 0) == 0
    assert game.chance(game.after(key, script[-1]), 0) == 1
    shortest = found.ALFWorldLike().remaining(game.task, [], "shortest")[0]
    assert game.chance(game.start, shortest - 1) == 0 < game.chance(game.start, shortest)
    assert game.chance(key, 1) < game.chance(key, 3) < 1
