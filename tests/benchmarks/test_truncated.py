"""Variances of single steps against whole episodes, worked by hand and by what must hold."""

import importlib.util
import sys
from pathlib import Path

import pytest

from perturn.credit_check.processes import PROCESSES, Outcome, Process

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    sys.modules[name] = found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


load("small_games")
of_process = load("truncated").of_process

COINS = Process(
    "coins",
    {
        state: {"heads": (Outcome(reward=1.0, to=state + 1),), "tails": (Outcome(to=state + 1),)}
        for state in range(3)
    },
    dict.fromkeys(range(3), (0.3, 0.0)),
    horizon=3,
)


def test_of_independent_rewards_it_is_the_number_of_turns():
    """Three tosses, each of variance p (1 - p): their sum has three times that, and no step leaves anything out."""
    assert of_process(COINS, valued=False) == pytest.approx((3, 3, 0))


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.name)
def test_of_changes_of_the_value_it_is_the_mean_number_of_turns(process):
    """They are differences of a martingale, so that variances add up; and the gradient is the true one."""
    ratio, turns, bias = of_process(process, valued=True)

    assert ratio == pytest.approx(turns)
    assert bias == pytest.approx(0, abs=1e-9)
