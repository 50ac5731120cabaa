"""An environment, a policy and a recipe for whole runs, and `perturn run` as a process."""

import contextlib
import os
import shutil
import signal

import psutil

from .processes import Started

CORRIDOR = '''
import os
import time

from perturn.types import Observation, Task


class Corridor:
    """A door one or two steps to the left or to the right; a step takes CORRIDOR_PAUSE seconds."""

    name = "corridor-1.0"

    def tasks(self, split):
        return [
            Task(f"{split}-{kind}/{n}", kind, split, {"length": 1 + n % 2})
            for kind in ("left", "right")
            for n in range(6)
        ]

    def reset(self, task, seed):
        self.task, self.walked = task, 0
        return Observation(f"The door is {task.data['length']} steps to the {task.kind}.")

    def step(self, action):
        time.sleep(float(os.environ.get("CORRIDOR_PAUSE", "0")))
        if action not in ("left", "right"):
            return Observation("Say left or right.", valid=False)
        self.walked += 1 if action == self.task.kind else -1
        if self.walked == self.task.data["length"]:
            return Observation("You are there.", reward=1.0, terminated=True, success=True)
        return Observation("You walk on.")

    def expert(self, task):
        return [task.kind] * task.data["length"]

    def close(self):
        pass
'''


RECIPE = """
name: whole
output: runs
model: {name: tiny, dtype: float32}
environment: {name: "perturn_corridor:Corridor"}
protocol: {name: tiny, format: action, system: Walk to the door., max_turns: 3}
sft:
  loss: {name: sft}
  tasks: {split: train, per_kind: 4}
  epochs: 4
  batch_size: 4
  learning_rate: 1.0e-2
  save_steps: 1
explore:
  tasks: {split: train, per_kind: 2, skip: 4}
  samples: 2
  sampling: {temperature: 1.0, max_new_tokens: 6}
  concurrency: 2
align:
  loss: {name: tlm-dre}
  epochs: 2
  batch_size: 2
  learning_rate: 1.0e-3
  save_steps: 1
evaluate:
  tasks: {split: test, per_kind: 3}
  sampling: {max_new_tokens: 6}
  concurrency: 2
"""


def make_place(folder, policy):
    """Write the environment, the policy and the recipe to a folder, and return it."""
    (folder / "perturn_corridor.py").write_text(CORRIDOR)
    (folder / "tiny.yaml").write_text(RECIPE)
    shutil.copytree(policy, folder / "tiny")
    return folder


def start(place, name, *words, pause=0.0, recipe="tiny.yaml"):
    """Start `perturn run` in a separate process with its own session."""
    environment = os.environ | {"PERTURN_CACHE": str(place / "cache"), "CORRIDOR_PAUSE": str(pause)}
    return Started(["run", recipe, f"name={name}", *words], place, environment)


def finish(process):
    """Wait for the end of a run, and return its standard output and notices."""
    output, notices = process.communicate(timeout=120)
    assert process.returncode == 0, notices
    return output, notices


def kill(process):
    """Send SIGKILL to the process only. The environments that it started end with it."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):  # the process has ended already
        family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    _, left = psutil.wait_procs(family, timeout=60)
    assert [one for one in left if one.status() != psutil.STATUS_ZOMBIE] == []
