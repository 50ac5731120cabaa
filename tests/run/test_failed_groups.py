"""A whole online run in a world of which some episodes crash: its groups, its ledger and what is trained."""

import json

import pytest

from perturn.config.recipe import read_recipe
from perturn.data.group_account import read_credits
from perturn.data.run_paths import RunPaths
from perturn.data.store import read_trajectories
from perturn.episodes.seeds import make_jobs
from perturn.run.execute import open_run, run_stages
from perturn.types import Task

WORLD = '''
from perturn.types import Observation, Task


class Fragile:
    """One turn pays 1 to 3; two of four episodes of the first task crash in it, and three of the second."""

    name = "fragile-1"

    async def tasks(self, split):
        return [Task("two", split=split), Task("three", split=split), Task("none", split=split)]

    async def reset(self, task, seed):
        self.task, self.seed = task.id, seed
        return Observation(f"Say something in {task.id}.")

    async def step(self, action):
        crash = {"two": CRASH_TWO, "three": CRASH_THREE, "none": ()}[self.task]
        if self.seed in crash:
            raise RuntimeError("fell over")
        return Observation("Done.", 1.0 + self.seed % 3, True, True)

    async def close(self):
        pass
'''
RECIPE = """
name: fragile
output: {output}
model: {{name: "{model}", dtype: float32}}
environment: {{name: "{world}:Fragile"}}
worlds: {{processes: 0, max_failed: 1.0}}
protocol: {{name: tiny, format: plain, system: Talk., max_turns: 2}}
explore:
  tasks: {{split: train}}
  samples: 4
  sampling: {{temperature: 1.0, max_new_tokens: 4}}
rows: {{name: groups}}
credit: {{name: rloo}}
align:
  loss: {{name: ppo-clip}}
  learning_rate: 1.0e-3
evaluate: null
"""


@pytest.fixture
def recipe_file(tmp_path, tiny_folder):
    """A recipe, and its world: two of four samples of a task crash, and three of another."""
    seeds = {
        name: [job.seed for job in make_jobs([Task(name)], 0, 4, 1)] for name in ("two", "three", "none")
    }
    text = f"CRASH_TWO = {set(seeds['two'][:2])}\nCRASH_THREE = {set(seeds['three'][:3])}\n{WORLD}"
    (tmp_path / "fragile_world.py").write_text(text)
    file = tmp_path / "recipe.yaml"
    world = tmp_path / "fragile_world.py"
    file.write_text(RECIPE.format(output=tmp_path / "runs", model=tiny_folder, world=world))
    return file


@pytest.mark.parametrize("failures", ["leave_out", "zero"])
def test_a_run_accounts_for_every_episode(recipe_file, failures):
    """The credit of each group is that of its episodes that did not FAIL; `zero` counts the others with score 0."""
    recipe = read_recipe(recipe_file, [f"rows.failed={failures}"])
    with open_run(recipe) as run:
        run_stages(run)
        folder = run.folder
    episodes = list(read_trajectories(folder / "trajectories/explore.jsonl"))
    rows = read_credits(next((folder / "credits").glob("rloo*.jsonl")))
    counts = json.loads(RunPaths(folder).manifest.read_text())["stages"]["credit"]["counts"]

    scores = {one.key: one.total_reward for one in episodes}
    for row in rows:
        members = [
            one for one in rows if one.task == row.task and (failures == "zero" or one.bin != "failed")
        ]
        others = [scores[one.key] for one in members if one.key != row.key]
        if row.bin != "failed" and others:
            assert row.weight == pytest.approx([scores[row.key] - sum(others) / len(others)])
    assert (
        counts["asked"]
        == 12
        == sum(counts[name] for name in ("trained", "no_spread", "failed", "cut", "filtered"))
    )
    assert counts["failed"] == 5
    assert counts["alone"] == (1 if failures == "leave_out" else 0)
