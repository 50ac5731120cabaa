"""The same actions give the same episodes of ScienceWorld, whatever other worlds of the JVM do."""

import threading

import pytest

from perturn.envs.scienceworld.environment import ScienceWorld
from perturn.types import Task
from support.science import PLANT, SHORT, play, playing


@pytest.fixture
def beside():
    """A world in the same JVM as `world`."""
    made = ScienceWorld(kinds=SHORT)
    yield made
    made.close()


def test_contents_are_listed_in_one_order(world):
    """An art studio with three cups of paint in a hash set. With Java's hash codes, the resets give several texts."""
    task = Task("find-living-thing/27", "find-living-thing", data={"variation": 27})

    texts = {world.reset(task, seed).text for seed in range(6)}

    assert "cup (containing red paint)" in texts.pop()
    assert not texts


def test_another_world_changes_no_reward(world, beside):
    """The pick-up has a reward of 0.02 alone. If both worlds number objects with one counter, it has none."""
    world.reset(Task("seeds", "mendelian-genetics-unknown-plant", data={"variation": 123}), 0)
    beside.reset(PLANT, 0)
    for action in ("open door to outside", "go to outside", "open door to greenhouse", "go to greenhouse"):
        world.step(action)
    world.step("look around")

    seen = world.step("pick up seed jar")

    assert seen.reward == pytest.approx(0.02)


def test_random_events_follow_from_the_actions(world, beside):
    """Bees leave an open hive at random, while another world draws random numbers too."""
    actions = ["go to hallway", "go to greenhouse", "open bee hive", *["look around"] * 6]

    alone = play(world, PLANT, actions)
    together = interleaved((world, beside), (PLANT, PLANT), (actions, ["look around", *actions]))

    assert together[0] == alone
    assert alone[-1].text.count("a adult bee") > 1


def interleaved(worlds, tasks, golds):
    """Play one task a world, one action each in turn; returns the observations a world."""
    seen = [[] for _ in tasks]
    live = {n: playing(*args) for n, args in enumerate(zip(worlds, tasks, golds, strict=True))}
    while live:
        for n in list(live):
            one = next(live[n], None)
            if one is None:
                del live[n]
            else:
                seen[n].append(one)
    return seen


@pytest.mark.slow
def test_sixteen_interleaved_worlds_play_as_alone():
    """Each world gives the observations that it gives alone."""
    worlds = [ScienceWorld(kinds=SHORT) for _ in range(16)]
    tasks = [Task(f"{kind}/{v}", kind, data={"variation": v}) for v in (3, 40, 77) for kind in SHORT][:16]
    golds = [worlds[0].expert(task) for task in tasks]
    alone = [play(worlds[0], task, gold) for task, gold in zip(tasks, golds, strict=True)]

    together = interleaved(worlds, tasks, golds)

    assert len({world._simulator.jvm.process.pid for world in worlds}) == 1
    assert together == alone
    for world in worlds:
        world.close()


@pytest.mark.slow
def test_threads_do_not_disturb_each_other(world):
    """Four threads, a world each, play the gold paths to the end as one thread does."""
    tasks = [Task(f"{kind}/5", kind, data={"variation": 5}) for kind in SHORT[:4]]
    golds = [world.expert(task) for task in tasks]
    alone = [play(world, task, gold) for task, gold in zip(tasks, golds, strict=True)]
    together = {}

    def work(n):
        mine = ScienceWorld(kinds=SHORT)
        together[n] = play(mine, tasks[n], golds[n])
        mine.close()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [together[n] for n in range(4)] == alone
