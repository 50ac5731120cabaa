"""Nodes of Ray on this machine, and what is played on them."""

import contextlib
import gc
import os
import time
from pathlib import Path

import psutil
import pytest

from perturn.episodes.play_many import Job
from perturn.errors import ModelError
from perturn.types import Action, EpisodeProtocol, Prompt, Task
from support.ports import free_port

WARNINGS = [  # Ray leaves its logs open, and its processes to the system
    pytest.mark.filterwarnings(r"ignore:unclosed file .*/ray/session_:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
]
QUICK_TO_NOTICE = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 4,
    "enable_worker_prestart": False,
}
"""Ray's settings for a node that dies; by default it takes some 15 s to be missed."""


class Nodes:
    """A head that holds no work, and nodes of two processors that come and go."""

    def __init__(self):
        from ray.cluster_utils import Cluster as LocalCluster

        small = {"include_dashboard": False, "object_store_memory": 100 * 2**20}
        self._small = small
        self._port = int(free_port())
        head = {"num_cpus": 0, "ray_client_server_port": self._port, "_system_config": QUICK_TO_NOTICE}
        self._cluster = LocalCluster(initialize_head=True, head_node_args=small | head)
        self._nodes = []

    @property
    def address(self):
        """Where a driver connects."""
        return f"ray://127.0.0.1:{self._port}"

    @property
    def direct(self):
        """Where a driver on a machine of the cluster connects."""
        return self._cluster.address

    def add(self, count=1, **settings):
        """Nodes more."""
        new = [self._cluster.add_node(num_cpus=2, **self._small, **settings) for _ in range(count)]
        self._nodes += new
        self._cluster.wait_for_nodes(60)
        return new

    def kill(self, node):
        """Kill -9 of the node's main process, then of what it started, as if the machine was switched off."""
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in (raylet, *raylet.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def clear(self):
        """No nodes but the head."""
        for node in self._nodes:
            with contextlib.suppress(Exception):
                self._cluster.remove_node(node, allow_graceful=False)
        self._nodes = []

    def close(self):
        """Nothing is left."""
        self._cluster.shutdown()
        gc.collect()  # while the warnings about what Ray leaves open are expected


STEPS = '''
import os
import sys
import time

from perturn.types import Observation, Task


class Steps:
    """Three steps to the end; each reset leaves a line in `trace`, and a process writes more than it should."""

    name = "steps-1.0"

    def __init__(self, trace: str = "", pause: float = 0.0):
        self.trace, self.pause = trace, pause

    def tasks(self, split):
        return [Task(f"t/{n}", "steps", split, {"n": n}) for n in range(12)]

    def reset(self, task, seed):
        print("a world prints"), print("a world prints", file=sys.stderr)
        if self.trace:
            with open(self.trace, "a") as file:
                file.write(f"{task.id} {os.getpid()}\\n")
        self.left = 3
        time.sleep(self.pause)
        return Observation(f"{task.id}, seed {seed}")

    def step(self, action):
        time.sleep(self.pause)
        self.left -= 1
        return Observation(f"{self.left} left after {action}", 1.0, self.left == 0, self.left == 0)

    def close(self):
        pass


class Nameless(Steps):
    name = ""
'''


class Script:
    """Answers with the number of the turn and its own process."""

    name = "script@1"

    def __init__(self, model):
        self.model = model

    def generate(self, prompts, sampling):
        """After a while."""
        time.sleep(0.05)
        return [Action(f"Action: {len(prompt.turns)} {os.getpid()}") for prompt in prompts]

    def update_weights(self, folder, name):
        """Serve what the folder's file says."""
        self.model, self.name = (Path(folder) / "weights.json").read_text(), name

    def forget(self, conversation):
        """Nothing is kept."""

    def close(self):
        """Nothing is held."""


class Reads(Script):
    """Answers with what its model's file says, at its start or since the last update."""

    def __init__(self, model):
        super().__init__((Path(model) / "weights.json").read_text())

    def generate(self, prompts, sampling):
        """The text of the weights, and who answers."""
        return [Action(f"{self.model} {os.getpid()}") for _ in prompts]


class Waits(Script):
    """Answers the conversation `slow` after a second, and others after a moment."""

    def __init__(self, model):
        super().__init__(model)
        self.until = []

    def submit(self, prompts, sampling):
        """Note when each is to be answered."""
        for one in prompts:
            self.until.append((time.monotonic() + (1.0 if one.conversation == "slow" else 0.05), one))

    def advance(self):
        """Those whose time has come."""
        time.sleep(0.01)
        ready = [one for until, one in self.until if until <= time.monotonic()]
        self.until = [each for each in self.until if each[1] not in ready]
        return [(one, Action("Action: done")) for one in ready]


def broken(model):
    """An engine whose model cannot be loaded."""
    raise ModelError(f"no model {model}")


JOBS = [Job(Task(f"t/{n}", "steps", "train", {"n": n}), seed=n) for n in range(12)]


PROTOCOL = EpisodeProtocol(name="plain", format="action", system="Play.", max_turns=6)


def prompt(conversation, turns=0):
    """A prompt of a conversation."""
    return Prompt((), (), ({"role": "user", "content": "go"},), seed=0, conversation=conversation)


def wait_for(condition, seconds=120):
    """Until it holds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)
