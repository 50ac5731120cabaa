"""The time that a study still needs, from the cells that are done."""

import time
from collections import defaultdict
from types import SimpleNamespace

import pytest

from perturn.study.time_left import seconds_left

SFT, RLOO, PPO = (("alfworld", name) for name in ("sft", "rloo", "ppo"))


def conductor(to_do, spent=(), before=(), running=(), workers=2, unknown=(), scored=(), tuned=(0, 1)):
    """A stand-in for a study with cells to do, by folder, and times of finished cells."""
    cells = {folder: (SimpleNamespace(of=method, folder=folder), True) for folder, method in to_do.items()}
    board = SimpleNamespace(
        to_do=lambda: cells,
        scores_alone=lambda cell: cell.folder in scored,
        plan=SimpleNamespace(
            points=dict.fromkeys([*to_do.values(), *unknown]),
            study=SimpleNamespace(seeds=[0, 1], tuned_seeds=tuned),
        ),
        chosen=dict.fromkeys(to_do.values()),
    )
    now = time.monotonic()
    return SimpleNamespace(
        board=board,
        spent=defaultdict(list, spent),
        before=defaultdict(list, before),
        running={folder: SimpleNamespace(began=now - elapsed) for folder, elapsed in dict(running).items()},
        crew=SimpleNamespace(most=lambda peak: workers),
        peak_gb=0.0,
    )


def test_nothing_is_known_before_a_cell_is_done_and_nothing_is_left_in_the_end():
    assert seconds_left(conductor({"a": RLOO})) is None
    assert seconds_left(conductor({}, {(RLOO, False): [10.0]})) == 0


def test_a_cell_takes_as_long_as_the_cells_of_its_method():
    """SFT is short, and says nothing about RLOO if an earlier call has finished a cell of RLOO."""
    spent, before = {(SFT, False): [10.0]}, {(RLOO, False): [100.0, 200.0], (SFT, False): [30.0]}

    assert seconds_left(conductor({"a": RLOO, "b": RLOO, "c": SFT}, spent, before)) == (150 + 150 + 10) / 2
    assert seconds_left(conductor({"a": PPO, "b": PPO, "c": PPO}, spent, before)) == 3 * 10 / 2


def test_a_running_cell_has_used_some_of_its_time():
    """No cell has less than no time left, and a study takes at least as long as its longest cell."""
    before = {(RLOO, False): [100.0], (SFT, False): [50.0]}

    left = seconds_left(conductor({"a": RLOO, "b": SFT}, before=before, running={"a": 40, "b": 60}))

    assert left == pytest.approx(60, abs=1)


def test_a_cell_that_is_only_scored_takes_as_long_as_others_that_were():
    spent = {(RLOO, True): [4.0], (RLOO, False): [100.0]}

    assert seconds_left(conductor({"a": RLOO}, spent, scored=["a"])) == 4
    assert seconds_left(conductor({"a": SFT}, spent, scored=["a"])) == 4
    assert seconds_left(conductor({}, spent, unknown=[PPO])) == 2 * 4 / 2
    assert seconds_left(conductor({}, spent, unknown=[PPO], tuned=[0])) == 100  # seed 1 is not trained yet
