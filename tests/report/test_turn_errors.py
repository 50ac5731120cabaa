"""Errors by turn: rates before and after an error, and whether a policy finds back to a shortest path."""

from dataclasses import replace
from itertools import pairwise

import pytest

from perturn.analysis import turn_errors
from perturn.analysis.episode_numbers import numbers_of
from perturn.analysis.number_text import error_lines
from perturn.remaining import Remaining
from perturn.types import Status
from support.states import episode


def error_row(episodes):
    """Error rates of these episodes."""
    return turn_errors.error_row([numbers_of(one) for one in episodes])


def with_path(left, *, task="t"):
    """An episode whose turns leave these ways, from the start on."""
    one = episode([None] * (len(left) - 1), [0.0] * (len(left) - 1), task=task)
    turns = [
        replace(turn, remaining=Remaining(before, after))
        for turn, (before, after) in zip(one.turns, pairwise(left), strict=True)
    ]
    return replace(one, turns=tuple(turns))


def test_rates_by_hand():
    """Ways 3 2 2 1 0 and 2 3 3 2: errors at turn 2 of the first, and at turns 1 and 2 of the second.

    Before an error: turns 1 and 2 of the first and 1 of the second, 2 of 3 wrong. After one: 3 and 4 of the first, 2
    and 3 of the second, 1 of 4 wrong.
    """
    found = error_row([with_path([3, 2, 2, 1, 0]), with_path([2, 3, 3, 2])])

    assert found["kind"] == "wrong"
    assert (found["before"]["mean"], found["before"]["turns"]) == (2 / 3, 3)
    assert (found["after"]["mean"], found["after"]["turns"], found["after"]["n"]) == (1 / 4, 4, 2)
    assert found["difference"]["mean"] == pytest.approx(1 / 4 - 2 / 3)
    rates = [[row[side] and row[side]["mean"] for side in ("before", "after")] for row in found["by_turn"]]
    assert rates == [[1 / 2, None], [1.0, 1.0], [None, 0.0], [None, 0.0]]
    assert [row["turn"] for row in found["by_turn"]] == [1, 2, 3, 4]


def test_a_policy_is_back_once_it_is_nearer_than_before_its_first_wrong_turn():
    """Ways 3 4 3 2: back at 2 < 3. 3 4 3: only where it was. 2 2 none: lost. 2 1 0: never went wrong, not counted."""
    episodes = [with_path(left) for left in ([3, 4, 3, 2], [3, 4, 3], [2, 2, None], [2, 1, 0])]

    found = error_row(episodes)["back"]

    assert (found["mean"], found["n"]) == (1 / 3, 3)


def test_where_no_way_was_measured_an_error_is_an_invalid_turn():
    """Turns invalid, valid, invalid: the rate after an error is 1 of 2; nothing says whether the policy is back."""
    found = error_row([episode([None] * 3, [0.0] * 3, valid=[False, True, False])])

    assert (found["kind"], found["before"]["mean"], found["after"]["mean"]) == ("invalid", 1.0, 1 / 2)
    assert found["back"] is None


def test_one_episode_without_a_measured_way_makes_all_count_invalid_turns():
    assert error_row([with_path([2, 1, 0]), episode([None] * 2, [0.0] * 2)])["kind"] == "invalid"


def test_the_difference_is_that_of_the_two_rates_with_an_interval_over_episodes():
    """Two equal episodes have no spread, so there is no interval; three that differ have one around the difference."""
    alike = error_row([with_path([3, 3, 2]), with_path([3, 3, 2])])["difference"]
    several = error_row([with_path([3, 3, 2, 2]), with_path([4, 3, 3, 2]), with_path([3, 3, 3, 2])])[
        "difference"
    ]

    assert (alike["mean"], alike["interval"]) == (-1.0, [None, None])
    assert several["interval"][0] < several["mean"] < several["interval"][1]


def test_an_episode_that_goes_on_says_nothing_yet():
    assert error_row([episode([None] * 2, [0.0] * 2, status=Status.UNFINISHED)]) is None


def test_rates_of_long_episodes_read_each_turn_a_few_times(monkeypatch):
    read = []

    class Counted(turn_errors.TurnError):
        def __getattribute__(self, name):
            read.append(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(turn_errors, "TurnError", Counted)
    error_row([episode([None] * 60, [0.0] * 60)])

    assert read.count("turn") <= 4 * 60


def test_what_the_terminal_and_the_page_say():
    """Two lines a policy: both rates with their difference, and how often it finds back."""
    row = {"name": "sft", "errors": error_row([with_path([3, 2, 2, 1, 0]), with_path([2, 3, 3, 2])])}

    first, second = error_lines([row, {"name": "base", "errors": None}])

    assert first.startswith(
        "sft, turns that do not bring the success nearer: 66.7\u00a0% of the turns up to the first such turn of an "
        "episode"
    )
    assert "25.0\u00a0% of later turns" in first
    assert second.startswith("sft recovers in 50.0\u00a0% of 2 episodes")


def test_the_interval_of_a_difference_ends_at_what_is_possible():
    """All turns before an error are right but one an episode; Student's t around the difference would pass 1."""
    episodes = [with_path([3, 3, 3, 3]), with_path([4, 3, 2, 2, 2]), with_path([9, 8, 7, 6, 5, 5, 5])]

    found = error_row(episodes)["difference"]

    assert found["mean"] > 0.5
    assert found["interval"][1] == 1.0
