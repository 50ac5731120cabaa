"""Worlds in processes of their own: whatever one does costs its own episode, and none outlives us."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from perturn import errors
from perturn.data.store import read_trajectories
from perturn.envs import process
from perturn.envs.check import check_environment
from perturn.envs.process import ProcessWorlds, runs_here, world_count
from perturn.envs.remote import told, value_of
from perturn.episodes.play import Job, play
from perturn.errors import ConfigError, EnvironmentFailure, WorldLost
from perturn.settings.recipe import Worlds, parse
from perturn.types import Action, EpisodeProtocol, Observation, Sampling, Status, Task

FILE = str(Path(__file__).with_name("misbehaving.py"))
EXAMPLE = {"name": f"{Path(__file__).parents[2] / 'docs/examples/own_environment.py'}:GuessNumber"}
LIMITS = Worlds(start_seconds=60, step_seconds=60, episode_seconds=180)
IMPATIENT = Worlds(start_seconds=60, step_seconds=2, episode_seconds=180)
SHORT_START = Worlds(start_seconds=5)
"""A limit that is waited for in full, and yet long enough for an interpreter to start on a busy machine."""
PROTOCOL = EpisodeProtocol(name="plain", format="action", system="Play.", max_turns=4)


def section(cls="World", **settings):
    return {"name": f"{FILE}:{cls}", **settings}


@pytest.fixture
def world():
    """A world in a process of its own."""
    world = ProcessWorlds(section(), LIMITS)()
    yield world
    world.close()


class _Engine:
    """Answers with the kind of action that the task's id begins with."""

    name = "script"

    def generate(self, prompts, sampling):
        return [
            Action("Action: " + prompt.conversation.partition("#")[0].split("/")[0]) for prompt in prompts
        ]

    def forget(self, conversation):
        pass


def played(*names, limits=IMPATIENT, retries=0, concurrency=3, kinds=None, **settings):
    """Trajectories by task after playing a task for each name; each task's name is the action that is taken."""
    jobs = [Job(Task(name, (kinds or {}).get(name, "")), seed=n) for n, name in enumerate(names)]
    found = play(
        jobs,
        _Engine(),
        ProcessWorlds(section(**settings), limits),
        protocol=PROTOCOL,
        sampling=Sampling(),
        concurrency=concurrency,
        retries=retries,
    )
    return {one.task.id: one for one in found}


def is_alive(pid):
    """Whether a process runs; zombies do not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def assert_ends(*pids):
    """The processes are gone within 10 s."""
    until = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert [pid for pid in pids if is_alive(pid)] == []


def test_a_sound_world_is_as_sound_in_a_process():
    """The documentation's example: contract kept, same tasks, same expert, solved by it."""
    world = ProcessWorlds(EXAMPLE, LIMITS)()
    task = world.tasks("train")[2]

    posed = world.reset(task, 0)
    seen = world.step(world.expert(task)[0])

    assert (world.name, task.id, task.data) == ("guess-number-1.0", "guess/3", {"secret": 3})
    assert posed.text.startswith("I think of a whole number")
    assert (seen.text, seen.reward, seen.terminated, seen.success) == ("Right!", 1.0, True, True)
    assert check_environment(lambda: world) == []


def test_every_field_of_an_observation_crosses_the_pipe(world):
    """Tuples stay tuples."""
    world.reset(world.tasks("train")[0], 0)

    assert world.step("all") == Observation(
        "fine", 0.5, True, True, True, "s", ("up",), ({"function": {"name": "add"}},), ("5", "6")
    )


def test_a_world_without_an_expert_has_none_in_a_process(world):
    """`Expert` is asked for by its attribute."""
    assert not hasattr(world, "expert")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "exit",
            "WorldLost: the world's process died in step('exit') with exit code 3; it wrote: going down",
        ),
        ("kill", "WorldLost: the world's process died in step('kill') (killed by SIGKILL)."),
        ("hang", "was killed in step('hang'), where worlds.step_seconds = 2 ran out"),
        ("hang-in-C", "was killed in step('hang-in-C'), where worlds.step_seconds = 2 ran out"),
        ("raise", "EnvironmentFailure: Foreign: ('not', 'unpicklable') (at "),
        ("quit", "EnvironmentFailure: SystemExit: enough (at "),
        ("none", "EnvironmentFailure: step returned None, not an Observation."),
        ("text", "EnvironmentFailure: step returned 'just a text', not an Observation."),
        ("nan", "EnvironmentFailure: step returned the reward nan, which is not finite."),
        ("bytes", "EnvironmentFailure: step returned a text of type bytes."),
        ("flag", "EnvironmentFailure: step returned terminated='no'."),
        ("half", "step returned text: expected valid Unicode, got 'fine \\ud800' (str). Remedy: keep valid"),
        ("deep tool", ".a: expected at most 100 levels of lists and objects, got {"),
        ("RunError", "EnvironmentFailure: RunError: no more"),
        ("BudgetError", "EnvironmentFailure: BudgetError: all is spent (at "),
        ("our BudgetError", "EnvironmentFailure: BudgetError: all is spent"),
        ("silent", "EnvironmentFailure: Silent: (no text: RuntimeError) (at "),
        ("2 GB head", "was killed in step('2 GB head'): it sent an answer of 2000000000 bytes, more than"),
        ("text on the pipe", " bytes, more than 268435456; with worlds.processes=0"),
        ("two answers", "it sent more than one answer"),
        ("list", "it sent b'[]'"),
        ("strange error", 'it sent b\'{"error": "strange"}\''),
        ("nested", "it sent no JSON"),
        ("close the pipe", "died in step('close the pipe') (it closed its pipe)."),
        ("pipe in a grandchild", "died in step('pipe in a grandchild') with exit code 3."),
    ],
)
def test_a_world_that_misbehaves_costs_its_own_episode(name, says):
    """Before and after it, on the same workers, episodes are played to their ends; the cause is kept."""
    found = played("up/1", name, "up/2", "up/3", concurrency=2)

    assert found[name].status is Status.FAILED
    assert says in found[name].error
    assert "\n" not in found[name].error
    assert found[name].environment == "misbehaving-1.0"
    assert [found[f"up/{n}"].success for n in (1, 2, 3)] == [True] * 3


@pytest.mark.parametrize("how", ["stop", "half a head", "head alone"])
def test_no_part_of_an_answer_is_waited_for_beyond_the_limit(world, how):
    """A child that is stopped, that ignores SIGTERM, or goes to sleep over its answer; what it started ends too."""
    world = ProcessWorlds(section(), Worlds(step_seconds=1))()
    world.reset(Task("t"), 0)
    pids = [int(world.step("pid").text), int(world.step("child").text)]

    with pytest.raises(WorldLost, match=r"was killed in step\('.*'\), where worlds.step_seconds = 1 ran out"):
        world.step(how)

    assert_ends(*pids)


def test_a_task_that_nobody_takes_is_not_waited_for_beyond_the_limit():
    """4 MB, more than a pipe holds, for a child that was stopped between two calls."""
    world = ProcessWorlds(section(), Worlds(start_seconds=5))()
    world.reset(Task("t"), 0)
    pid = int(world.step("pid").text)
    psutil.Process(pid).suspend()
    world._link._limits = Worlds(start_seconds=0.5)

    with pytest.raises(
        WorldLost, match=r"was killed in reset of task 'u', where worlds.start_seconds = 0.5 ran"
    ):
        world.reset(Task("u", data={"text": "x" * 4_000_000}), 0)

    assert_ends(pid)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.ConfigError("x"), ConfigError),
        (errors.DataError("x"), errors.DataError),
        (errors.WorldLost("x"), WorldLost),
        (errors.BystanderLost("x"), errors.BystanderLost),
        (EnvironmentFailure("x"), EnvironmentFailure),
    ],
)
def test_what_the_library_raises_elsewhere_it_raises_here(error, kind):
    """By a table of five; also where worlds live on other nodes."""
    with pytest.raises(kind) as caught:
        value_of(told(error))

    assert (type(caught.value), str(caught.value)) == (kind, "x")


@pytest.mark.parametrize(
    "error",
    [errors.RunError("x"), errors.BudgetError("x"), errors.EngineFailure("x"), errors.ModelError("x")]
    + [type(name, (Exception,), {})("x") for name in ("BudgetError", "WorldLost", "ConfigError")],
)
def test_a_world_elsewhere_cannot_name_what_is_raised_here(error):
    """Not by raising one of ours that ends a run, and not by a class of its own of the same name."""
    with pytest.raises(EnvironmentFailure) as caught:
        value_of(told(error))

    assert type(caught.value) is EnvironmentFailure
    assert str(caught.value) == f"{type(error).__name__}: x"


def test_large_tasks_and_observations_cross_in_pieces(world):
    """8 MB each way, with a child that prints meanwhile."""
    task = Task("x" * 8_000_000, kind="print")

    assert world.reset(task, 0).text == f"this is {task.id}"


def test_a_stopped_world_is_closed_in_time(monkeypatch):
    """Nobody waits for its farewell for longer than for that of others."""
    monkeypatch.setattr(process, "_CLOSE_S", 0.2)
    world = ProcessWorlds(section(), LIMITS)()
    world.reset(Task("t"), 0)
    pid = int(world.step("pid").text)
    psutil.Process(pid).suspend()

    world.close()

    assert_ends(pid)


def test_keys_stay_with_us(monkeypatch):
    """Whatever looks like one by its name or its value; others, and those that are named, are passed on."""
    secret = {
        **dict.fromkeys(["OPENAI_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY"], "x"),
        **dict.fromkeys(["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "GITHUB_TOKEN", "PGPASSWORD"], "x"),
        **dict.fromkeys(["my_api_key", "MYSQL_PWD", "SSH_AUTH_SOCK", "GOOGLE_APPLICATION_CREDENTIALS"], "x"),
        "DATABASE_URL": "postgres://me:hunter2@db/x",
        "SIGNER": "-----BEGIN RSA PRIVATE KEY-----\n",
    }
    needed = {
        **dict.fromkeys(
            ["JAVA_HOME", "ALFWORLD_DATA", "PERTURN_DATA", "HF_HOME", "CUDA_VISIBLE_DEVICES"], "x"
        ),
        **dict.fromkeys(["TOKENIZERS_PARALLELISM", "MY_GAME", "OLDPWD"], "x"),
        "HTTPS_PROXY": "http://proxy:3128",
    }
    for name, value in (secret | needed).items():
        monkeypatch.setenv(name, value)
    world = ProcessWorlds(section(), Worlds(pass_env=["MYSQL_PWD"]))()
    world.reset(Task("t"), 0)
    found = set(world.step("environ").text.split("\n"))
    world.close()

    assert found & secret.keys() == {"MYSQL_PWD"}
    assert found >= needed.keys() | {"PATH", "HOME"}


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("exit", "died in reset of task 'bad' with exit code 3"),
        ("hang", "in reset of task 'bad', where worlds.start_seconds = 5 ran out"),
    ],
)
def test_a_world_that_misbehaves_in_reset_costs_its_own_episode(kind, says):
    """The limit of a reset is that of a start."""
    found = played("up/1", "bad", "up/2", kinds={"bad": kind}, limits=SHORT_START, concurrency=1)

    assert says in found["bad"].error
    assert found["bad"].turns == ()
    assert found["up/1"].success
    assert found["up/2"].success


@pytest.mark.parametrize(
    ("start", "says"),
    [
        (
            "hang",
            "killed in its start, where worlds.start_seconds = 5 ran out .* it wrote: thinking about it",
        ),
        ("exit", "died in its start with exit code 3; it wrote: going down"),
        ("raise", "cannot start: Foreign: "),
    ],
)
def test_a_world_that_cannot_start_says_so_at_once(start, says):
    """Before any episode; nothing is left behind."""
    with pytest.raises(EnvironmentFailure, match=says):
        ProcessWorlds(section(start=start), SHORT_START)

    assert psutil.Process().children() == []


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (section(strat=1), "unknown key 'environment.strat'. Did you mean 'environment.start'?"),
        (section(cls="Wrld"), "cannot be loaded: AttributeError"),
        ({"name": "scienceworl"}, "unknown environment.name 'scienceworl'. Did you mean 'scienceworld'?"),
    ],
)
def test_a_wrong_setting_is_the_same_mistake_as_without_a_process(wrong, says):
    """A `ConfigError`, made on the other side."""
    with pytest.raises(ConfigError) as caught:
        ProcessWorlds(wrong, LIMITS)

    assert says in str(caught.value)


def test_a_lost_world_starts_again_with_the_next_episode(world):
    """Same object, another process."""
    world.reset(Task("t"), 0)
    first = world.step("pid").text
    with pytest.raises(WorldLost):
        world.step("exit")

    world.reset(Task("t"), 0)

    assert world.step("pid").text != first


def test_the_episode_limit_counts_the_worlds_time_only():
    """Two steps of 1 s are too many for 1.8 s; waiting 2 s in between is not counted, and a reset begins anew."""
    world = ProcessWorlds(section(), Worlds(episode_seconds=1.8))()
    world.reset(Task("t"), 0)
    world.step("slow")
    world.reset(Task("t"), 0)
    time.sleep(2)
    world.step("slow")

    with pytest.raises(WorldLost, match=r"in step\('slow'\), where worlds.episode_seconds = 1.8 ran out"):
        world.step("slow")


def test_a_slow_world_is_no_broken_one():
    """1 s a step under a limit of 60 s."""
    assert played("slow", limits=LIMITS)["slow"].success


@pytest.mark.parametrize("how", ["exit", "kill", "hang"])
def test_an_episode_whose_world_was_lost_is_played_again(tmp_path, how):
    """It misbehaves in its first life only, so the second is recorded, as if it had been the first."""
    name = f"once {how}"

    found = played(name, retries=1, folder=str(tmp_path))

    assert found[name].status is Status.COMPLETED
    assert found[name].success
    assert len(found[name].turns) == 1
    assert len((tmp_path / "trace").read_text().split()) == 2


@pytest.mark.parametrize("retries", [0, 2])
def test_retries_are_bounded(tmp_path, retries):
    """1 + retries lives, each in a process of its own; then it has failed."""
    found = played("always exit", retries=retries, folder=str(tmp_path))

    lives = (tmp_path / "trace").read_text().split()
    assert found["always exit"].status is Status.FAILED
    assert len(set(lives)) == len(lives) == 1 + retries


def test_an_exception_is_not_played_again(tmp_path):
    """A world that raises is alive, and would raise again."""
    found = played("always raise", retries=2, folder=str(tmp_path))

    assert found["always raise"].status is Status.FAILED
    assert len((tmp_path / "trace").read_text().split()) == 1


def test_a_world_prints_nothing_on_our_output(capfd):
    """170 kB through Python and a line past it, more than a pipe holds; the episode goes on."""
    found = played("print", limits=LIMITS)

    assert found["print"].success
    assert capfd.readouterr().out == ""


def test_worlds_are_used_again_unless_they_failed():
    """Four episodes on one worker: two in one world, and a new one after the failure; none is left over."""
    worlds, made = ProcessWorlds(section(), LIMITS), []

    def make():
        made.append(worlds())
        return made[-1]

    jobs = [Job(Task(name), 0) for name in ("up/1", "up/2", "raise", "up/3")]
    list(play(jobs, _Engine(), make, protocol=PROTOCOL, sampling=Sampling(), concurrency=1))

    assert len(made) == 2
    assert psutil.Process().children() == []


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
from perturn.settings.recipe import Worlds
from perturn.envs.process import ProcessWorlds
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
import test_process as t
from perturn.data.store import TrajectoryStore
with TrajectoryStore(Path({file!r})) as store:
    held = store.keys()
    jobs = [t.Job(t.Task(f"up/{{n}}"), n) for n in range(40)]
    jobs = [job for job in jobs if (job.task.id, job.sample) not in held]
    worlds = t.ProcessWorlds(t.section(pause={pause}), t.LIMITS)
    for one in t.play(jobs, t._Engine(), worlds, protocol=t.PROTOCOL, sampling=t.Sampling(), concurrency=4):
        store.append(one)
"""


def run_process_worlds(file, pause):
    program = RUN.format(here=str(Path(__file__).parent), file=str(file), pause=pause)
    return subprocess.Popen([sys.executable, "-c", program])


def test_episodes_are_stored_exactly_once_though_we_are_killed(tmp_path):
    """SIGKILL after some of 40 episodes, twice, with four worlds in the midst of a step; then a run to the end."""
    file = tmp_path / "trajectories.jsonl"
    for wanted in (5, 15):
        parent = run_process_worlds(file, pause=0.05)
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
        "from perturn.settings.recipe import Worlds\n"
        "from perturn.envs.process import ProcessWorlds\n"
        f"ProcessWorlds({section()!r}, Worlds())().close()\n"
    )

    ended = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=60
    )

    assert (ended.stdout, ended.stderr, ended.returncode) == ("once\n", "", 0)


def test_tasks_that_json_would_change_are_refused():
    """A tuple would come back as a list."""
    world = ProcessWorlds(section(cls="Lister"), LIMITS)()

    with pytest.raises(EnvironmentFailure, match=r"'place': \(1, 2\).*worlds.processes=0"):
        world.tasks("train")
    world.close()


def test_texts_cross_as_they_are(world):
    """Control characters, other scripts; in a task's data half a surrogate pair too."""
    task = Task("\x00 \u2028 \u2603 \U0001f600", data={"text": "\udfff", "n": [1, 2.5, None, True]})

    assert world.reset(task, 0).text == f"this is {task.id}"


@pytest.mark.parametrize(
    ("name", "processes", "here", "count"),
    [
        ("scienceworld", None, True, 16),
        ("scienceworld", 2, False, 2),
        ("mine:World", None, False, 4),
        ("mine:World", 0, True, 16),
        ("mine:World", 3, False, 3),
        ("mine:World", 99, False, 16),
    ],
)
def test_the_pool_is_as_large_as_memory_allows(monkeypatch, name, processes, here, count):
    """2 GiB free at 512 MiB a world are four; worlds in this process are not counted."""
    memory = type("Memory", (), {"available": 2 * 2**30})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    settings = Worlds(processes=processes)

    assert runs_here({"name": name}, settings) is here
    assert world_count({"name": name}, settings, 16) == count


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"processes": -1}, "worlds.processes must be >= 0, got -1"),
        ({"retries": -1}, "worlds.retries must be >= 0, got -1"),
        ({"step_seconds": 0}, "worlds.step_seconds must be > 0, got 0"),
        ({"episode_seconds": -2}, "worlds.episode_seconds must be > 0, got -2"),
        ({"start_second": 3}, "unknown key 'worlds.start_second'. Did you mean 'worlds.start_seconds'?"),
    ],
)
def test_wrong_limits_are_refused(settings, says):
    """The section `worlds` of a recipe."""
    with pytest.raises(ConfigError) as caught:
        parse(Worlds, settings, "worlds")

    assert says in str(caught.value)


def test_a_lost_world_leaves_nothing_open():
    """Killed, reaped, and its pipes closed."""
    before = psutil.Process().num_fds()
    world = ProcessWorlds(section(), IMPATIENT)()
    world.reset(Task("t"), 0)
    with pytest.raises(WorldLost):
        world.step("hang")

    assert psutil.Process().children() == []
    assert psutil.Process().num_fds() == before
