"""Misbehaving worlds in processes of their own: how to make them, play in them, and see them gone."""

import contextlib
import time
from pathlib import Path

import psutil

from perturn.config.sections import Worlds
from perturn.envs.world_process import ProcessWorlds
from perturn.episodes.play_many import Job, play
from perturn.types import Action, EpisodeProtocol, Sampling, Task

FILE = str(Path(__file__).with_name("misbehaving.py"))
EXAMPLE = {"name": f"{Path(__file__).parents[2] / 'examples/own_environment.py'}:GuessNumber"}
LIMITS = Worlds(start_seconds=60, step_seconds=60, episode_seconds=180)
IMPATIENT = Worlds(start_seconds=60, step_seconds=2, episode_seconds=180)


SHORT_START = Worlds(start_seconds=5)
"""A limit that is waited for in full, and yet long enough for an interpreter to start on a busy machine."""
PROTOCOL = EpisodeProtocol(name="plain", format="action", system="Play.", max_turns=4)


def section(cls="World", **settings):
    return {"name": f"{FILE}:{cls}", **settings}


class Engine:
    """Answers with the kind of action that the task's id begins with."""

    name = "script"

    def generate(self, prompts, sampling):
        """The action."""
        return [
            Action("Action: " + prompt.conversation.partition("#")[0].split("/")[0]) for prompt in prompts
        ]

    def forget(self, conversation):
        """Nothing is kept."""


def played(*names, limits=IMPATIENT, retries=0, concurrency=3, kinds=None, **settings):
    """Trajectories by task after playing a task for each name; each task's name is the action that is taken."""
    jobs = [Job(Task(name, (kinds or {}).get(name, "")), seed=n) for n, name in enumerate(names)]
    found = play(
        jobs,
        Engine(),
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
    """The processes end, without being told again."""
    until = time.monotonic() + 60
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert [pid for pid in pids if is_alive(pid)] == []
