"""A small world, a recipe and a study of a tiny policy in it."""

CORRIDOR = '''
import os
import time

from perturn.types import Observation, Task


class Corridor:
    """A door one or two steps to the left or to the right; a step takes CORRIDOR_PAUSE seconds."""

    name = "corridor-1.0"

    def tasks(self, split):
        return [Task(f"{split}-{kind}/{n}", kind, split) for kind in ("left", "right") for n in range(6)]

    def reset(self, task, seed):
        self.task, self.walked = task, 0
        return Observation(f"The door is to the {task.kind}.")

    def step(self, action):
        time.sleep(float(os.environ.get("CORRIDOR_PAUSE", "0")))
        if action not in ("left", "right"):
            return Observation("Say left or right.", valid=False)
        self.walked += 1 if action == self.task.kind else -1
        return Observation("You walk.", reward=float(self.walked), terminated=True, success=self.walked == 1)

    def expert(self, task):
        return [task.kind]

    def close(self):
        pass
'''
RECIPE = """
name: corridor
model: {name: tiny, dtype: float32}
environment: {name: "perturn_corridor:Corridor"}
protocol: {name: tiny, format: action, system: Walk to the door., max_turns: 2}
worlds: {processes: 0}
deterministic: true
sft: {loss: {name: sft}, tasks: {per_kind: 4}, epochs: 2, learning_rate: 1.0e-2}
explore:
  tasks: {per_kind: 2, skip: 4}
  samples: 2
  sampling: {temperature: 1.0, max_new_tokens: 4}
  concurrency: 4
align: {loss: {name: tlm-dre}, batch_size: 4, learning_rate: 1.0e-3}
evaluate: {sampling: {max_new_tokens: 4}, concurrency: 4}
"""
STUDY = """
name: whole
recipe: corridor.yaml
output: studies
seeds: [0, 1]
methods:
  dpo: {align.loss: {name: dpo}}
  tlm-dre: {}
sweep: {align.learning_rate: [1e-3, 1.0e-2]}
tune: {tasks: {split: dev, per_kind: 1}, seeds: [0]}
test: {tasks: {split: test, per_kind: 2}}
"""


def make_place(folder, policy, recipe=RECIPE):
    """Put the world, the policy, the recipe and the study into a folder."""
    (folder / "perturn_corridor.py").write_text(CORRIDOR)
    (folder / "corridor.yaml").write_text(recipe)
    (folder / "study.yaml").write_text(STUDY)
    (folder / "tiny").symlink_to(policy)
