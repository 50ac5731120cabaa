"""Environments with Gymnasium's interface."""

import sys
from pathlib import Path

import numpy as np
import pytest

from perturn.config.sections import Worlds
from perturn.envs.environment_check import check_environment
from perturn.envs.gymnasium import Gymnasium
from perturn.envs.world_process import ProcessWorlds
from perturn.episodes.episode import Job, episode
from perturn.episodes.replay import play_script
from perturn.errors import ConfigError, EnvironmentFailure
from perturn.types import Action, EpisodeProtocol, Task

EXAMPLE = str(Path(__file__).parents[2] / "examples/gymnasium_environment.py") + ":Maze"


class Odd:
    """Answers with what it is made with."""

    def __init__(self, reset=("text", {}), step=("text", 0.0, False, False, {})):
        self.answers = reset, step

    def reset(self, *, seed):
        """As given."""
        return self.answers[0]

    def step(self, action):
        """As given."""
        return self.answers[1]


@pytest.fixture
def odd(monkeypatch):
    """Makes worlds of the class above."""
    monkeypatch.setitem(sys.modules, "odd_world", sys.modules[__name__])

    def make(**settings):
        return Gymnasium("odd_world:Odd", seeds={"train": 1}, settings=settings)

    return make


def test_the_example_keeps_the_contract():
    """Also through a process of its own."""
    assert check_environment(lambda: Gymnasium(EXAMPLE)) == []
    section = {"name": "gymnasium", "make": EXAMPLE, "seeds": {"train": 2}}
    world = ProcessWorlds(section, Worlds())()
    try:
        assert check_environment(lambda: world) == []
    finally:
        world.close()


def test_a_task_is_a_seed():
    """Splits share none; the seed poses the task, the episode's own seed does not."""
    world = Gymnasium(EXAMPLE, seeds={"train": 3, "test": 2})
    tasks = [*world.tasks("train"), *world.tasks("test")]

    assert [(task.id, task.data["seed"]) for task in tasks] == [
        ("train/0", 0),
        ("train/1", 1),
        ("train/2", 2),
        ("test/0", 3),
        ("test/1", 4),
    ]
    assert len({world.reset(task, 0).text for task in tasks}) == 2
    assert world.reset(tasks[0], 1) == world.reset(tasks[0], 2)


@pytest.mark.parametrize(("way", "success"), [("right", True), ("wrong", False)])
def test_an_episode_is_solved_or_cut_off(way, success):
    """The exit pays 1 and ends the episode; six rooms the other way end it without."""
    world = Gymnasium(EXAMPLE)
    task = world.tasks("train")[0]
    east = "east of here" in world.reset(task).text
    action = "east" if east is success else "west"
    protocol = EpisodeProtocol("maze", "action", list_admissible=True)

    played = play_script(
        episode(world, Job(task, 0), protocol=protocol), [Action(f"Action: {action}")] * 9, OSError()
    )

    assert (played.terminated, played.success, played.total_reward) == (True, success, float(success))
    assert played.turns[0].observation_text.endswith("Admissible commands:\neast\nwest")


def test_what_info_says_counts(odd):
    """`success` and `valid` of info; a truncated episode is over."""
    info = {"success": True, "valid": False}
    seen = odd(step=("a", 0, False, True, info)).step("x")

    assert (seen.terminated, seen.success, seen.valid, seen.reward) == (True, True, False, 0.0)


def test_values_of_numpy_and_none_in_info_count(odd):
    """Commands as an array, whose truth is ambiguous; None says nothing."""
    info = {"admissible_commands": np.array(["east", "west"]), "success": None, "valid": None}
    seen = odd(step=(np.str_("a"), np.float32(1), np.bool_(True), np.bool_(False), info)).step("x")

    assert (seen.reward, seen.terminated, seen.success, seen.valid) == (1.0, True, True, True)
    assert seen.admissible == ("east", "west")


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"reset": (7, {})}, "the observation is 7 of type int, not a text. Remedy: write it as words first"),
        ({"reset": "text"}, r"returned 'text', not \(observation, info\)"),
        ({"reset": ("text", None)}, "info is None, not a dict"),
        ({"step": ("text", 0.0, False, {})}, "four values are the interface before Gymnasium"),
        ({"step": (1.5, 0.0, False, False, {})}, "the observation is 1.5 of type float"),
        ({"step": ("text", "much", False, False, {})}, "the reward is 'much', which is not a number"),
        ({"reset": ("text", {"admissible_commands": "east"})}, "'east', a text. Remedy: return a list"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_remedy(odd, answers, says):
    world = odd(**answers)
    with pytest.raises(EnvironmentFailure, match=says):
        world.reset(world.tasks("train")[0]) and world.step("x")


@pytest.mark.parametrize(
    ("make", "settings", "says"),
    [
        ("nowhere:Maze", {}, "'nowhere:Maze' cannot be loaded"),
        (EXAMPLE, {"seeds": {"train": 0}}, "seeds must give each split a number of tasks >= 1"),
        (EXAMPLE, {"seeds": {}}, "seeds must give each split"),
    ],
)
def test_wrong_settings_are_refused(make, settings, says):
    with pytest.raises(ConfigError, match=says):
        Gymnasium(make, **settings)


def test_a_task_of_another_environment_is_refused():
    with pytest.raises(EnvironmentFailure, match="task 'x' has no seed in its data"):
        Gymnasium(EXAMPLE).reset(Task("x"))
