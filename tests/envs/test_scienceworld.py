"""ScienceWorld through its adapter, on a real JVM."""

import gzip
import itertools
import json
import os
import random
import re
from pathlib import Path

import pytest

from perturn.config.sections import Tasks
from perturn.envs import ENVIRONMENTS
from perturn.envs.environment_check import check_environment
from perturn.envs.scienceworld import jvm as _scienceworld_jvm
from perturn.envs.scienceworld.environment import ETO_MAX_TURNS, ScienceWorld
from perturn.errors import ConfigError, EnvironmentFailure
from perturn.run.task_lists import choose_tasks
from perturn.types import Task
from support.science import PLANT, SHORT, play


def data_folder():
    """Folder of the ETO lists and recorded gold paths; the test is skipped where it is absent."""
    root = os.environ.get("PERTURN_DATA") or Path(__file__).parents[3] / "shared" / "data"
    folder = Path(root) / "scienceworld"
    if not folder.is_dir():
        pytest.skip(f"no ScienceWorld data at {folder}; set PERTURN_DATA to the folder that holds it")
    return folder


def own_name(published):
    """Name of a kind in ScienceWorld 1.2.3, from the name the ETO lists use."""
    bare = re.sub(r"^task-\w+?-", "", published)
    return re.sub(r"[()]", "", bare).replace("mendellian", "mendelian")


# Episodes


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHORT)
def test_gold_actions_earn_the_full_score(world, kind):
    """Rewards of a solved episode sum to 1, and it ends in success, for the first and last train task."""
    tasks = [task for task in world.tasks("train") if task.kind == kind]

    for task in (tasks[0], tasks[-1]):
        seen = play(world, task, world.expert(task))
        assert sum(one.reward for one in seen) == pytest.approx(1.0)
        assert seen[-1].terminated
        assert seen[-1].success
        assert all(one.valid for one in seen)


@pytest.mark.slow
def test_reset_shows_the_task_and_the_room(world):
    """The text is the description, a blank line and the look that the official wrapper returns."""
    seen = world.reset(PLANT, 0)

    task, _, room = seen.text.partition("\n\n")
    assert task.startswith("Your task is to find a(n) plant.")
    assert room.startswith("This room is called the ")
    assert seen.reward == 0.0
    assert not seen.terminated


@pytest.mark.slow
def test_reward_is_the_increase_of_the_highest_score(world):
    """`reset task` lowers the score: nothing is taken back, and nothing is paid twice."""
    world.reset(PLANT, 0)
    actions = ["go to hallway", "go to greenhouse", "focus on adult pea plant", "reset task", "look around"]
    actions += ["focus on adult pea plant"]

    highest, scores, rewards = 0.0, [], []
    for action in actions:
        rewards.append(world.step(action).reward)
        scores.append(world._simulator.call("getScore"))
        expected = max(0.0, scores[-1] - highest)
        highest = max(highest, scores[-1])
        assert rewards[-1] == pytest.approx(expected)

    assert min(rewards) == 0.0
    assert sum(rewards) == pytest.approx(max(scores))
    assert any(later < earlier for earlier, later in itertools.pairwise(scores))


def test_wrong_focus_ends_the_episode_unrewarded(world):
    """The simulator scores -1 without calling the task completed."""
    world.reset(PLANT, 0)

    seen = world.step("focus on agent")

    assert (seen.reward, seen.terminated, seen.success) == (0.0, True, False)


def test_wrong_focus_takes_nothing_back(world):
    """Rewards earned before it stay, and the -1 is not among them."""
    seen = play(world, PLANT, ["go to hallway", "go to greenhouse", "focus on agent"])

    assert sum(one.reward for one in seen) > 0
    assert seen[-1].reward == 0.0
    assert not seen[-1].success


def test_stepping_after_the_end_raises(world):
    world.reset(PLANT, 0)
    world.step("focus on agent")

    with pytest.raises(EnvironmentFailure, match="call reset"):
        world.step("look around")


def test_stepping_before_a_reset_raises(make):
    with pytest.raises(EnvironmentFailure, match="call reset"):
        make().step("look around")


@pytest.mark.parametrize(
    "action", ["xyzzy", "go to mars", "look around.", "open", "7", "a\nb", "\ud800", "\x00", "☃", "x " * 9999]
)
def test_what_is_not_understood_is_invalid_and_costs_nothing(world, action):
    """The state stays as it was and the number of moves with it."""
    before = world.reset(PLANT, 0)
    moves = world._simulator.call("getNumMoves")

    seen = world.step(action)

    assert not seen.valid
    assert not seen.terminated
    assert seen.state_key == before.state_key
    assert world._simulator.call("getNumMoves") == moves


@pytest.mark.parametrize("action", ["", "  ", "\n\t"])
def test_empty_actions_stay_here(world, action):
    """An empty line would cancel a menu; after ours, the menu still takes its number."""
    world.reset(PLANT, 0)
    world.step("go to hallway")
    menu = world.step("open door")

    seen = world.step(action)

    assert menu.valid
    assert menu.text.startswith("Ambiguous request: Please enter the number")
    assert not seen.valid
    assert "Write one action" in seen.text
    assert world.step("0").text == "The door is already open."


def test_menu_answered_with_words_is_invalid(world):
    """The simulator takes nothing but a number there, so the action is lost."""
    world.reset(PLANT, 0)
    world.step("go to hallway")
    world.step("open door")

    seen = world.step("look around")

    assert not seen.valid
    assert seen.text.startswith("Unknown action.")


def test_white_space_around_an_action_is_ignored(world):
    """A menu answered with ' 0 ' would be lost otherwise."""
    world.reset(PLANT, 0)
    world.step("go to hallway")
    world.step("open door")

    assert world.step(" 0\n").text == "The door is already open."


@pytest.mark.slow
def test_state_key_is_of_the_state(world, make):
    """Asking changes nothing, going does, and another instance gives the same key."""
    start = world.reset(PLANT, 0)
    asked = world.step("inventory")
    settled = world.step("inventory")
    moved = world.step("go to hallway")
    other = make()
    other.reset(PLANT, 0)

    assert start.state_key is not None
    assert asked.state_key == settled.state_key
    assert moved.state_key != settled.state_key
    assert other.step("inventory").state_key == asked.state_key


def test_expert_leaves_a_running_episode_alone(world):
    world.reset(PLANT, 0)
    before = world.step("go to hallway")

    world.expert(Task("find-animal/3", "find-animal", data={"variation": 3}))

    assert world.step("inventory").state_key == before.state_key


# Tasks


def test_own_splits_are_all_variations_without_overlap():
    """3592 + 1796 + 1819 = 7207, each variation of the 30 kinds once."""
    world = ScienceWorld()
    splits = {split: [task.id for task in world.tasks(split)] for split in ("train", "dev", "test")}
    world.close()

    assert {split: len(ids) for split, ids in splits.items()} == {"train": 3592, "dev": 1796, "test": 1819}
    assert len(set().union(*splits.values())) == 7207


def test_eto_splits_have_the_published_counts():
    """1483 / 194 / 211 over 24 kinds; test is apart, and 54 dev tasks are in train as published."""
    world = ScienceWorld()
    train, dev, test = ({task.id for task in world.tasks(f"eto-{s}")} for s in ("train", "dev", "test"))

    assert (len(train), len(dev), len(test)) == (1483, 194, 211)
    assert not test & (train | dev)
    assert len(train & dev) == 54
    assert {name.split("/")[0] for name in train} == set(ETO_MAX_TURNS)


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_eto_splits_are_the_published_lists(split):
    published = json.loads((data_folder() / f"sciworld_{split}_indices.json").read_text())

    ids = [task.id for task in ScienceWorld().tasks(f"eto-{split}")]

    assert sorted(ids) == sorted(f"{own_name(kind)}/{variation}" for kind, variation in published)


def test_eto_turn_limits_are_the_published_ones():
    published = json.loads((data_folder() / "sciworld_max_steps.json").read_text())

    assert {own_name(kind): limit for kind, limit in published.items()} == ETO_MAX_TURNS


def test_eto_turn_limits_by_heart():
    """A few, for where the published files are absent."""
    assert len(ETO_MAX_TURNS) == 24
    assert ETO_MAX_TURNS["lifespan-longest-lived"] == 10
    assert ETO_MAX_TURNS["find-plant"] == 15
    assert ETO_MAX_TURNS["measure-melting-point-known-substance"] == 120


def test_tasks_carry_what_reset_needs(world):
    """Tasks are listed by kind, then by variation, and only the kinds asked for."""
    tasks = world.tasks("eto-test")

    assert tasks[0] == Task("find-animal/225", "find-animal", "eto-test", {"variation": 225})
    assert {task.kind for task in tasks} == set(SHORT)
    assert list(tasks) == sorted(tasks, key=lambda task: (task.kind, task.data["variation"]))


def test_recorded_gold_paths_still_score_in_full(world):
    """Ten of the recorded paths of the short kinds, drawn with a fixed seed."""
    with gzip.open(data_folder() / "gold_paths_1308.jsonl.gz", "rt") as lines:
        rows = [row for row in map(json.loads, lines) if row["task"] in SHORT]

    for row in random.Random(7).sample(rows, 10):
        task = Task("recorded", row["task"], data={"variation": row["var"]})
        seen = play(world, task, row["gold"])
        assert sum(one.reward for one in seen) == pytest.approx(row["score"] / 100)
        assert row["tdesc"].removeprefix("Task Description:\n") == seen[0].text.split("\n\n")[0]


# Settings


def test_it_is_listed_and_named_with_its_version():
    assert ENVIRONMENTS["scienceworld"]().name == "scienceworld-1.2.3+exact"


def test_construction_starts_no_jvm(make):
    world = make()

    assert (os.getpid(), world.jvm_memory) not in _scienceworld_jvm._JVMS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kinds": ("find-plnt",)}, "Did you mean 'find-plant'"),
        ({"kinds": "find-plant"}, r"Write \[find-plant\]"),
        ({"simplification": "eazy"}, "Did you mean 'easy'"),
        ({"simplification": "noElectricalAction"}, "power-component"),
        ({"jvm_memory": "lots"}, "such as 512m"),
    ],
)
def test_wrong_settings_are_refused_with_a_remedy(settings, message):
    with pytest.raises(ConfigError, match=message):
        ScienceWorld(**settings)


def test_unknown_split_names_the_known_ones(world):
    with pytest.raises(ConfigError, match=r"Did you mean 'test'\? Known: dev, eto-dev"):
        world.tasks("tests")


def test_a_split_without_the_kinds_is_refused(tmp_path):
    """ETO left six kinds out."""
    with pytest.raises(
        ConfigError, match=r"split 'eto-train' of scienceworld.* must have a task, got .*Take another split"
    ):
        choose_tasks(ScienceWorld(kinds=("inclined-plane-determine-angle",)), Tasks(split="eto-train"))


@pytest.mark.slow
def test_settings_without_simplification_pose_the_full_game(make):
    """Doors are closed unless `openDoors` opens them."""
    text = make(simplification="").reset(PLANT, 0).text

    assert "(that is closed)" in text
    assert "(that is closed)" not in make(simplification="openDoors").reset(PLANT, 0).text


@pytest.mark.slow
def test_it_keeps_the_contract(make):
    assert check_environment(lambda: make(kinds=("find-plant",))) == []
