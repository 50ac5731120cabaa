"""A world that rewards a habit, and a small recipe of many iterations in it: pieces that several tests share."""

from perturn.config.recipe import read_recipe
from support.loop import start

LETTERS = '''
from perturn.types import Observation, Task


class Letters:
    """Two turns; each is rewarded whose action begins with a letter of the first half of the alphabet.

    Half of what the expert says does, so SFT teaches words and no habit.
    """

    name = "letters-1.0"

    def tasks(self, split):
        return [Task(f"{split}/{n}", "", split) for n in range(16)]

    def reset(self, task, seed):
        self.turns = 0
        return Observation(f"Task {task.id}: say something.", state_key="begun")

    def step(self, action):
        self.turns += 1
        good = action[:1].lower() in [*"abcdefghijklm"]
        last = self.turns == 2
        return Observation(
            "Go on.", reward=0.5 * good, terminated=last, success=last and good, state_key=f"said {good}"
        )

    def expert(self, task):
        number = int(task.id.rpartition("/")[2])
        return [["left", "right"][number % 2], ["left", "right"][number // 2 % 2]]

    def close(self):
        pass
'''
RECIPE = """
name: online
output: runs
model: {name: tiny, dtype: float32}
environment: {name: "perturn_letters:Letters"}
protocol: {name: tiny, format: action, system: Talk., max_turns: 3}
iterations: 3
sft:
  loss: {name: sft}
  epochs: 25
  batch_size: 8
  learning_rate: 2.0e-2
explore:
  per_iteration: 3
  samples: 4
  sampling: {temperature: 1.0, max_new_tokens: 4}
  concurrency: 6
rows: {name: group-pairs, per_group: null, threshold: 0.0}
align:
  loss: {name: dpo}
  reference: start
  minibatches: 2
  learning_rate: 3.0e-3
  scheduler: linear
  warmup_ratio: 0.0
evaluate:
  tasks: {split: test, n: 4}
  sampling: {max_new_tokens: 4}
  every: 2
worlds: {processes: 0}
"""
GROUPS = ["rows={name: groups}", "credit.name=anchor-rloo", "align.loss={name: ppo-clip, kl: 0.1}"]
"""Words that make of it a policy gradient on groups."""
UNDECIDED = "sft.epochs=16"
"""Leaves a policy unsure of what to do, so that its episodes differ."""
SPO = [
    *GROUPS,
    UNDECIDED,
    "credit.name=spo",
    "explore.name=branches",
    "explore.every=1",
    "explore.branches=3",
    "iterations=2",
    "evaluate=null",
]
"""Advantages of branches from each turn."""
PAV = [*SPO, "credit.name=pav", "credit.alpha=0.5", "explore.policy=sft"]
PAIRS = [
    UNDECIDED,
    "rows.name=branch-pairs",
    "explore.name=branches",
    "explore.every=1",
    "explore.branches=3",
    "iterations=2",
    "evaluate=null",
]


def begin(place, name, *words):
    """`perturn run` of the recipe as a process of its own."""
    recipe_of(place, *words)
    return start(place, name, *words, recipe="online.yaml")


def recipe_of(place, *words):
    """The recipe, for calls in this process."""
    (place / "perturn_letters.py").write_text(LETTERS)
    (place / "online.yaml").write_text(RECIPE)
    return read_recipe(place / "online.yaml", words)
