"""check_environment says what is wrong with an environment, and nothing about a sound one."""

import importlib.util
import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perturn.envs.environment_check import check_environment
from perturn.envs.user_environment import at_border
from perturn.errors import ConfigError
from perturn.types import Observation, Task

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_environment.py"


def example_class():
    """The class in the documentation's example."""
    spec = importlib.util.spec_from_file_location("own_environment", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GuessNumber


GuessNumber = example_class()


def broken(**methods):
    """The example's class with some of its attributes replaced."""
    return type("Broken", (GuessNumber,), methods)


def answering(**changes):
    """`step` that gives the example's answer with some of its fields replaced."""
    return lambda self, action: replace(GuessNumber.step(self, action), **changes)


def posing(**changes):
    """`reset` that poses the example's task with some fields of the observation replaced."""
    return lambda self, task, seed: replace(GuessNumber.reset(self, task, seed), **changes)


def listing(*tasks):
    return lambda self, split: list(tasks)


def raising(*arguments):
    raise RuntimeError("out of luck")


numbers = itertools.count()


def shuffled(self, split):
    """`tasks` that begins with another one at each call."""
    tasks = GuessNumber.tasks(self, split)
    return tasks[next(numbers) % 2 :] + tasks[:1]


def restless(self, task, seed):
    """`reset` that poses another text at each call."""
    return replace(GuessNumber.reset(self, task, seed), text=f"Guess number {next(numbers)}.")


def still_ended(self, task, seed):
    """A `reset` that forgets to clear the flag of the last episode."""
    self.episodes = getattr(self, "episodes", 0) + 1
    return replace(GuessNumber.reset(self, task, seed), terminated=self.episodes > 1)


TASK = Task("guess/1", "guess", data={"secret": 1})


def test_example_keeps_the_contract():
    assert check_environment(GuessNumber) == []


@pytest.mark.parametrize("split", ["train", "test"])
def test_example_is_solved_by_its_expert(split):
    """Each task ends in success with a total reward of 1."""
    world = GuessNumber()
    for task in world.tasks(split):
        world.reset(task, 0)

        seen = [world.step(action) for action in world.expert(task)]

        assert sum(one.reward for one in seen) == 1.0
        assert seen[-1].success


def test_example_answers_higher_and_lower():
    world = GuessNumber()
    world.reset(Task("guess/5", data={"secret": 5}), 0)

    assert [world.step(guess).text for guess in ("3", "7", "5")] == ["higher", "lower", "Right!"]


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        (broken(__init__=raising), r"make\(\) raised RuntimeError: out of luck"),
        (broken(step=None), r"Method step\(\) is missing"),
        (broken(name=""), "name must be a text"),
        (broken(tasks=raising), r"tasks\('train'\) raised RuntimeError: out of luck"),
        (broken(tasks=listing()), "is empty"),
        (broken(tasks=lambda self, split: "guess"), "tasks\\('train'\\) returned 'guess', not a list"),
        (broken(tasks=listing(TASK, TASK)), "repeats the id 'guess/1'"),
        (broken(tasks=listing(replace(TASK, data={"secret": 1, "at": Path()}))), "does not survive JSON"),
        (broken(tasks=listing(replace(TASK, data={"secret": 1, 2: "key"}))), "does not survive JSON"),
        (broken(tasks=shuffled), "changed between two calls"),
        (broken(reset=raising), r"reset\('guess/1', seed=0\) raised RuntimeError"),
        (broken(reset=lambda self, task, seed: 7), "not an Observation"),
        (broken(reset=posing(text=" ")), "returned no text"),
        (broken(reset=posing(reward=0.5)), "belongs to no action"),
        (broken(reset=restless), "posed two texts"),
        (broken(reset=still_ended), "ended before it began"),
        (broken(step=raising), r"step\('xyzzy .*raised RuntimeError.*valid=False"),
        (broken(step=lambda self, action: None), "returned None, not an Observation"),
        (broken(step=lambda self, action: ("text", 0.0)), "not an Observation"),
        (broken(step=answering(text=b"higher")), "text of type bytes"),
        (broken(step=answering(reward=float("nan"))), "reward nan"),
        (broken(step=answering(reward=float("inf"))), "reward inf"),
        (broken(step=answering(reward="1")), "reward '1', which is not a number"),
        (broken(step=answering(reward=True)), "reward True, which is not a number"),
        (broken(step=answering(terminated=1)), "terminated=1"),
        (broken(step=answering(valid=None)), "valid=None"),
        (broken(step=answering(state_key=7)), "state_key=7"),
        (broken(step=answering(admissible="7")), "admissible='7'. Remedy: return a list"),
        (broken(reset=posing(admissible=(7,))), r"admissible=\(7,\)"),
        (
            broken(reset=posing(admissible=("7", "guess"))),
            r"step\('guess'\).*listed as admissible.*valid=False",
        ),
        (broken(close=raising), r"close\(\) raised RuntimeError"),
    ],
)
def test_each_fault_is_named_with_a_remedy(environment, problem):
    """The fault is found, and every problem told says what to do."""
    problems = check_environment(environment)

    assert any(re.search(problem, told) for told in problems), problems
    assert all("Remedy: " in told for told in problems)


def test_commands_that_are_understood_may_be_listed():
    assert check_environment(broken(reset=posing(admissible=("7", "8")))) == []


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (
            broken(reset=lambda self: "text"),
            r"Method reset\(\) .* cannot be called as reset\(task\): too many",
        ),
        (
            broken(reset=lambda self, task, seed, size: "text"),
            r"cannot be called as reset\(task\): missing a required argument: 'size'",
        ),
        (broken(step=lambda self: "text"), r"cannot be called as step\(action\): too many"),
        (
            broken(tasks=lambda self, split, size: [1]),
            r"cannot be called as tasks\(split\): missing .*'size'",
        ),
    ],
)
def test_a_method_of_other_arguments_is_named_before_it_is_called(environment, told):
    """The remedy shows the signature, and a command that plays rejects the environment too."""
    (problem,) = check_environment(environment)

    assert re.search(told, problem)
    assert "Remedy: let " in problem
    with pytest.raises(ConfigError, match="cannot be called as"):
        at_border(environment(), "Game")


def test_lines_are_of_the_code_of_the_user():
    """A line of the package would mislead; where none is the user's, none is named."""
    (problem,) = check_environment(broken(__init__=lambda self, size: None))
    assert "'size'. Remedy: " in problem

    (problem, *_) = check_environment(broken(step=raising))
    assert "of test_environment_check.py)" in problem


def test_one_fault_is_told_once():
    """Both tasks, and all of the script, meet the same missing method."""
    assert len(check_environment(broken(step=None))) == 1


def test_numbers_of_other_libraries_are_numbers():
    """A float32 reward is a real number, as JSON-minded code will find when it stores it."""
    assert check_environment(broken(step=answering(reward=np.float32(0.0)))) == []


def test_order_of_words_is_not_part_of_the_text():
    """A simulator may list a set in another order each time; the task posed is the same."""

    class Restless(GuessNumber):
        flip = False

        def reset(self, task, seed):
            super().reset(task, seed)
            self.flip = not self.flip
            return Observation("Guess: low, high." if self.flip else "Guess: high, low.")

    assert check_environment(Restless) == []


def test_split_and_episodes_are_as_asked():
    """Only `episodes` tasks of the split are posed, each twice for the script and once for the expert."""
    posed = []

    class Watched(GuessNumber):
        def reset(self, task, seed):
            posed.append(task.id)
            return super().reset(task, seed)

    check_environment(Watched, split="test", episodes=3)

    ids = ["guess/9", "guess/10", "guess/11"]
    assert posed == [*sorted(2 * ids, key=ids.index), *ids]
