"""Error rates after an earlier error and without, by hand; and the tables of the page."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("compounding", ROOT / "benchmarks" / "compounding.py")
sys.modules["compounding"] = found = importlib.util.module_from_spec(spec)
spec.loader.exec_module(found)


def row(sample, states, distance):
    """An episode of one game."""
    return {
        "policy": "p", "seed": 0, "task": "a", "sample": sample, "state": states, "distance": distance,
    }  # fmt: skip


def place(turn):
    return turn.task, turn.place


def test_turns_of_an_episode_by_hand():
    """Right to state 1, wrong in it, wrong in it again, then right to state 2 and wrong there."""
    turns = found.turns_of([row(0, [0, 1, 1, 1, 2], [4, 3, 3, 3, 2, 2])])

    assert [one.wrong for one in turns] == [False, True, True, False, True]
    assert [one.after_error for one in turns] == [False, False, True, True, True]
    assert [one.first_visit for one in turns] == [True, True, False, False, True]
    assert [one.again for one in turns] == [False, False, True, False, False]


def test_a_repeated_turn_is_compared_with_the_other_episodes():
    """In state 0, one of three first turns is wrong, and its next turn too: 1 - 0/2, of weight 1 * 2 / 3."""
    episodes = [row(0, [0, 0], [2, 2, 2]), row(1, [0], [2, 1]), row(2, [0], [2, 1])]

    (one,) = found.strata(filter(found.KINDS["again"], found.turns_of(episodes)), place)

    assert (one.difference, one.weight) == (1.0, pytest.approx(2 / 3))


def test_a_wrong_turn_without_other_episodes_is_compared_with_nothing():
    """Its own first turn was wrong by selection."""
    assert (
        found.strata(filter(found.KINDS["again"], found.turns_of([row(0, [0, 0], [2, 2, 2])])), place) == []
    )


def test_a_new_state_is_compared_between_episodes():
    """State 1: one episode comes without an error and is right, another after an error and is wrong; 1 * 1 / 2."""
    episodes = [row(0, [0, 1], [2, 1, 0]), row(1, [0, 0, 1], [2, 2, 1, 1])]

    (one,) = found.strata(filter(found.KINDS["new"], found.turns_of(episodes)), place)

    assert (one.difference, one.weight) == (1.0, 0.5)


def test_a_sum_of_shares_is_the_mean_of_its_cells():
    """3 wrong of 8 turns, minus 1 of 4: 0.125, whatever the cells hold."""
    one = {(0, "a"): (2.0, 2.0), (1, "b"): (1.0, 6.0)}
    other = {(0, "a"): (1.0, 4.0)}

    assert found.crossed([(1, one), (-1, other)], ["a", "b"]).mean == pytest.approx(0.125)


def test_the_page_has_the_tables_of_the_rows():
    """The rows give errors.json, and errors.json gives the tables."""
    rates = json.loads((found.ROWS / "errors.json").read_text())
    page = (ROOT / "docs/results/mechanism.md").read_text()

    assert all(each in page for each in found.pages(rates))
