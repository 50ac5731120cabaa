"""Plays at the same time that share slots for their worlds."""

import threading
import time

import pytest

from episodes.counting import PROTOCOL, Counter, Script, jobs, up
from perturn.episodes.play_many import play
from perturn.episodes.world_threads import Workers
from perturn.types import Sampling, Status


def test_plays_that_share_slots_have_no_more_worlds_than_slots():
    """The second play's worlds open as worlds of the first are closed, while it still plays its last episode."""
    slots, worlds, hold, found = threading.Semaphore(2), [], threading.Event(), []

    class Held(Counter):
        def reset(self, task, seed):
            assert task.id != "slow" or hold.wait(60)
            return super().reset(task, seed)

    def make():
        world = Held(worlds)
        assert sum(not each.closed for each in worlds) <= 2
        return world

    def run(*names):
        how = {"protocol": PROTOCOL, "sampling": Sampling(), "concurrency": 2, "slots": slots}
        found.extend(play(jobs(*names), Script(up), make, **how))

    first = threading.Thread(target=run, args=("slow", "a", "b"))
    first.start()
    while len(worlds) < 2:
        time.sleep(0.01)
    run("c", "d", "e")
    hold.set()
    first.join()

    assert sorted(one.task.id for one in found) == ["a", "b", "c", "d", "e", "slow"]
    assert found[-1].task.id == "slow"
    assert all(one.success for one in found)


def test_a_play_that_ends_while_it_waits_for_a_slot_makes_no_world():
    """Its worker looks for the end of the play."""
    slots, worlds = threading.Semaphore(0), []
    workers = Workers(None, lambda: Counter(worlds), 0, iter(()), slots=slots)
    workers.begin(jobs("a"))
    workers.close()
    slots.release()

    assert worlds == []
    assert slots.acquire(blocking=False)


@pytest.mark.parametrize(("failures", "succeeds"), [(1, True), (9, False)])
def test_a_replacement_that_cannot_be_made_fails_or_replays_its_episode(failures, succeeds):
    """The run goes on; the episode counts as one whose world was lost."""
    ports, worlds = [OSError("no port is free")] * failures, []

    def make():
        if worlds and ports:
            raise ports.pop()
        return Counter(worlds)

    how = {"protocol": PROTOCOL, "sampling": Sampling(), "concurrency": 1, "retries": 1}
    broken, found = play(jobs("broken", "a"), Script(up), make, **how)

    assert broken.status is Status.FAILED
    assert found.success is succeeds
    assert succeeds or found.error.startswith(
        "WorldLost: no new environment could be made: OSError: no port is free"
    )
