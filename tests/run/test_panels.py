"""Which tasks an iteration explores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perturn.run.panels import dealt
from perturn.types import Task

TASKS = [Task(str(number)) for number in range(7)]


@given(st.integers(0, 99), st.integers(1, 7))
def test_no_task_is_dealt_twice_before_too_few_are_left(seed, number):
    """Of 7 tasks, 7 // number iterations share none; the next round has another order."""
    rounds = 7 // number
    first = [task.id for place in range(rounds) for task in dealt(TASKS, seed, place + 1, number)]

    assert len(set(first)) == rounds * number
    assert all(len(dealt(TASKS, seed, iteration, number)) == number for iteration in range(1, 20))


def test_the_seed_decides_the_order_and_without_a_number_all_are_played():
    """Equal seeds deal alike; another seed and another round do not."""
    assert dealt(TASKS, 0, 1, 3) == dealt(TASKS, 0, 1, 3)
    assert len({tuple(task.id for task in dealt(TASKS, seed, 1, 3)) for seed in range(9)}) > 3
    assert dealt(TASKS, 0, 1, 7) != dealt(TASKS, 0, 2, 7)
    assert dealt(TASKS, 5, 9, None) == TASKS


@pytest.mark.parametrize("number", [1, 7])
def test_the_ends_of_the_range_are_dealt(number):
    """One task an iteration, and all of them."""
    assert len(dealt(TASKS, 0, 3, number)) == number
