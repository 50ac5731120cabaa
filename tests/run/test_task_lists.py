"""Which tasks an iteration explores, and which the laboratory never sees."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perturn.config.recipe import read_recipe
from perturn.config.sections import Tasks
from perturn.envs.load_environment import make_environment
from perturn.run.task_lists import choose_tasks, dealt, look_up
from perturn.types import Task

RECIPES = Path(__file__).parents[2] / "recipes"
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


@pytest.mark.parametrize("recipe", ["alfworld_lab", "alfworld-like_lab", "alfworld-like_ipr"])
def test_every_panel_of_the_laboratory_skips_what_is_held_out(recipe):
    """A panel of `train` without `n` would skip so many of each kind, and take games that are held out."""
    read = read_recipe(RECIPES / f"{recipe}.yaml")
    panels = [part.tasks for part in (read.base, read.sft, read.explore, read.evaluate)]
    own = [panel for panel in panels if panel.split == "train"]

    assert len(own) == 3
    assert all(panel.n is not None and panel.skip == 1000 for panel in own)
    assert "valid_unseen" not in {panel.split for panel in panels}


def test_what_the_laboratory_holds_out_is_in_no_panel_of_it():
    """The games themselves, those that are made up."""
    recipe = read_recipe(RECIPES / "alfworld-like_lab.yaml")
    env = make_environment(recipe.environment)
    held_out = {task.id for task in choose_tasks(env, Tasks("train", n=1000))}
    found = look_up(recipe, env)

    assert len(held_out) == 1000
    assert held_out.isdisjoint(task.id for tasks in found.tasks.values() for task in tasks)
    assert [len(found.tasks[name]) for name in ("base", "sft", "explore")] == [2553, 1500, 600]
