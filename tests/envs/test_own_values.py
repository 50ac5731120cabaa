"""Values between Perturn and a user's game: copies of tasks, numbers of other libraries, abilities of a wrong form."""

import sys

import numpy as np
import pytest
import torch

from perturn.envs.abilities import abilities_of, ability
from perturn.envs.environment_check import check_environment
from perturn.envs.user_environment import at_border
from perturn.errors import ConfigError, EnvironmentFailure
from perturn.types import Task
from support.guess import Guess, game


def empty(self, task):
    """A `reset` whose game takes the items of its task away."""
    items = task.data["items"] if isinstance(task, Task) else task["items"]
    return " ".join(items.pop() for _ in list(items))


@pytest.mark.parametrize("listed", [{"items": ["a", "b"]}, Task("t", data={"items": ["a", "b"]})])
def test_a_game_may_change_its_task(listed):
    """Each episode gets a copy, so the next episode and the record have all items."""
    world = game(tasks=lambda self, split: [listed], reset=empty)
    (task,) = world.tasks("train")

    assert [world.reset(task, 0).text for _ in range(2)] == ["b a", "b a"]
    assert task.data == world.tasks("train")[0].data


@pytest.mark.parametrize("reward", [torch.tensor(1.0), np.array(1.0), np.float32(1.0)], ids=repr)
def test_a_reward_of_another_library_solves_a_task(reward):
    seen = game(step=lambda self, action: ("won", reward, True)).step("7")

    assert (seen.success, seen.reward, type(seen.reward)) == (True, 1.0, float)


@pytest.mark.parametrize(
    ("answer", "gold"), [(42, "42"), (0.5, "0.5"), ("x", "x"), (True, None), (None, None)]
)
def test_an_answer_of_a_task_may_be_a_number(answer, gold):
    """It becomes a text; `True` is no answer."""
    world = game(tasks=lambda self, split: [{"id": "a", "answer": answer}])

    assert world.tasks("train")[0].data.get("answer") == gold


@pytest.mark.parametrize("kind", [set, frozenset])
def test_tasks_in_a_set_have_no_order(kind):
    """In one process the order of a set never changes, so the type is the only sign."""
    own = {"tasks": lambda self, split: kind(["a", "b"])}

    with pytest.raises(EnvironmentFailure, match=r"returned a set, whose order .* Remedy: return sorted"):
        game(**own).tasks("train")
    problem = check_environment(type("Game", (Guess,), own))[0]
    assert "returned a set" in problem
    assert problem.count("Remedy: ") == 1
    assert problem.endswith("return sorted(...).")


@pytest.mark.parametrize("said", ["go", [7], None, [("thought", "go")]])
def test_an_expert_of_another_form_fails_in_this_process_too(said):
    """With the text that another process gives."""
    own = {"expert": lambda self, task: said}
    world = game(**own)

    with pytest.raises(EnvironmentFailure, match="expert must return texts, got "):
        ability(world, "expert")(world.tasks("train")[0])
    assert any("expert must return texts" in each for each in check_environment(type("Game", (Guess,), own)))


def test_a_method_named_like_an_ability_takes_its_arguments():
    own = {"remaining": lambda self: 3, "correct": lambda self, guess: True}
    problems = check_environment(type("Game", (Guess,), own))

    assert [each.split(" of ")[0] for each in problems] == ["Method remaining()", "Method correct(guess)"]
    assert (
        "cannot be called as correct(task, actions): too many positional arguments. Remedy: " in problems[1]
    )
    with pytest.raises(ConfigError, match=r"cannot be called as remaining\(task, actions, plain\)"):
        at_border(type("Game", (Guess,), own)(), "Game")


def test_a_method_show_is_no_expert_unless_the_game_plays_itself():
    world = game(show=lambda self: print("a board"))

    assert "show" not in abilities_of(world)


def test_a_game_that_exits_is_reported():
    """With the line, as for other exceptions."""
    problems = check_environment(type("Game", (Guess,), {"step": lambda self, action: sys.exit("bye")}))

    assert any("raised SystemExit: bye (line" in each for each in problems)


def test_numbers_of_numpy_from_an_ability_become_plain():
    """In this process as in another."""
    world = game(remaining=lambda self, task, actions, sense: (np.int64(2), None, np.array([1])[0]))
    (task, *_) = world.tasks("train")

    found = ability(world, "remaining")(task, ["1", "2"], "turns")

    assert (found, type(found[0])) == ([2, None, 1], int)
