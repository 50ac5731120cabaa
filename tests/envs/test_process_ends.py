"""No world outlives us, nor what it started."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from envs.in_processes import IMPATIENT, LIMITS, PROTOCOL, Engine, assert_ends, section
from perturn.data.store import read_trajectories
from perturn.envs import world_process
from perturn.envs.world_process import ProcessWorlds
from perturn.episodes.play_many import Job, play
from perturn.errors import WorldLost
from perturn.types import Sampling, Task


def test_a_stopped_world_is_closed_in_time(monkeypatch):
    """Nobody waits for its farewell for longer than for that of others."""
    monkeypatch.setattr(world_process, "_CLOSE_S", 0.2)
    world = ProcessWorlds(section(), LIMITS)()
    world.reset(Task("t"), 0)
    pid = int(world.step("pid").text)
    psutil.Process(pid).suspend()

    world.close()

    assert_ends(pid)


def test_worlds_are_used_again_unless_they_failed():
    """Four episodes on one worker: two in one world, and a new one after the failure; none is left over."""
    before = psutil.Process().children()
    worlds, made = ProcessWorlds(section(), LIMITS), []

    def make():
        made.append(worlds())
        return made[-1]

    jobs = [Job(Task(name), 0) for name in ("up/1", "up/2", "raise", "up/3")]
    list(play(jobs, Engine(), make, protocol=PROTOCOL, sampling=Sampling(), concurrency=1))

    assert len(made) == 2
    assert psutil.Process().children() == before


@pytest.mark.parametrize("end", ["close", "exit", "hang"])
@pytest.mark.parametrize("way", ["child", "fork"])
def test_what_a_world_started_ends_with_it(end, way):
    """A process of the world's own, with an interpreter of its own or forked with the pipes open."""
    world = ProcessWorlds(section(), IMPATIENT)()
    world.reset(Task("t"), 0)
    pids = [int(world.step("pid").text), int(world.step(way).text)]
    if end != "close":
        with pytest.raises(WorldLost, match="exit code 3" if end == "exit" else "step_seconds"):
            world.step(end)

    world.close()

    assert_ends(*pids)


def test_a_forgotten_world_ends():
    """Nobody closes it; it is garbage collected."""
    world = ProcessWorlds(section(), LIMITS)()
    world.reset(Task("t"), 0)
    pid = int(world.step("pid").text)

    del world

    assert_ends(pid)


PARENT = """
import sys, threading, time
from perturn.config.sections import Worlds
from perturn.envs.world_process import ProcessWorlds
from perturn.types import Task
world = ProcessWorlds({section}, Worlds())()
world.reset({task}, 0)
{steps}
print("ready", flush=True)
{last}
time.sleep(1000)
"""


def kill_a_parent(section, task="Task('t')", steps="", last=""):
    """Descendants of a process that was killed with -9 in the midst of an episode."""
    program = PARENT.format(section=section, task=task, steps=steps, last=last)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout.readline() == "ready\n"
        time.sleep(0.3)
        family = [each.pid for each in psutil.Process(parent.pid).children(recursive=True)]
    finally:
        parent.kill()
        parent.communicate()
    return family


@pytest.mark.parametrize("last", ["", 'world.step("hang")', 'world.step("hang-in-C")'])
def test_no_world_outlives_a_parent_that_is_killed(last):
    """Idle, asleep, or in a call that never gives the interpreter back; the world's own child goes too."""
    family = kill_a_parent(section(), steps='world.step("child")', last=last)

    assert len(family) == 2
    assert_ends(*family)


@pytest.mark.slow
def test_no_jvm_outlives_a_parent_that_is_killed():
    """ScienceWorld in a process of its own: the child and its Java."""
    task = "Task('find-plant/1', 'find-plant', data={'variation': 1})"
    family = kill_a_parent({"name": "scienceworld", "jvm_memory": "200m"}, task=task)

    assert len(family) == 2
    assert_ends(*family)


RUN = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from envs import in_processes as t
from perturn.data.store import TrajectoryStore
with TrajectoryStore(Path({file!r})) as store:
    held = store.keys()
    jobs = [t.Job(t.Task(f"up/{{n}}"), n) for n in range(40)]
    jobs = [job for job in jobs if (job.task.id, job.sample) not in held]
    worlds = t.ProcessWorlds(t.section(pause={pause}), t.LIMITS)
    for one in t.play(jobs, t.Engine(), worlds, protocol=t.PROTOCOL, sampling=t.Sampling(), concurrency=4):
        store.append(one)
"""


def run_process_worlds(file, pause):
    program = RUN.format(here=str(Path(__file__).parents[1]), file=str(file), pause=pause)
    return subprocess.Popen([sys.executable, "-c", program])


def test_episodes_are_stored_exactly_once_though_we_are_killed(tmp_path):
    """SIGKILL after some of 40 episodes, twice, with four worlds in the midst of a step; then a run to the end."""
    file = tmp_path / "trajectories.jsonl"
    for wanted in (5, 15):
        parent = run_process_worlds(file, pause=0.2)
        while parent.poll() is None and (not file.is_file() or file.read_bytes().count(b"\n") < wanted):
            time.sleep(0.005)
        family = [each.pid for each in psutil.Process(parent.pid).children(recursive=True)]
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert len(family) == 4
        assert_ends(*family)

    assert run_process_worlds(file, pause=0.0).wait(timeout=60) == 0

    keys = [one.key for one in read_trajectories(file)]
    assert len(keys) == len(set(keys)) == 40
    assert all(one.success for one in read_trajectories(file))


def test_a_script_needs_no_guard_of_its_main_module(tmp_path):
    """Spawned by multiprocessing, a child would run this script again."""
    (tmp_path / "script.py").write_text(
        "print('once')\n"
        "from perturn.config.recipe import Worlds\n"
        "from perturn.envs.world_process import ProcessWorlds\n"
        f"ProcessWorlds({section()!r}, Worlds())().close()\n"
    )

    ended = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=60
    )

    assert (ended.stdout, ended.stderr, ended.returncode) == ("once\n", "", 0)


def test_a_lost_world_leaves_nothing_open():
    """Killed, reaped, and its pipes closed."""
    children, files = psutil.Process().children(), psutil.Process().num_fds()
    world = ProcessWorlds(section(), IMPATIENT)()
    world.reset(Task("t"), 0)
    with pytest.raises(WorldLost):
        world.step("hang")

    assert psutil.Process().children() == children
    assert psutil.Process().num_fds() == files
