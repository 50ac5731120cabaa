"""Online learning learns: what a credit says of its own episodes moves a small policy on games of `alfworld-like`."""

from pathlib import Path

import pytest

from household import make_policy
from perturn.data.store import read_trajectories
from perturn.run.execute import open_run, run_stages
from perturn.stats import paired_comparison
from perturn.types import succeeded

pytestmark = pytest.mark.slow

RECIPE = """
name: rloo
seed: {seed}
output: {place}
model: {{name: {place}/base, dtype: float32}}
environment: {{name: "household:ShortGames"}}
worlds: {{processes: 0}}
protocol: {{name: household, format: action, system: "", max_turns: 10}}
deterministic: true
iterations: 12
explore:
  tasks: {{split: train}}
  per_iteration: 12
  samples: 8
  sampling: {{temperature: 1.0, max_new_tokens: 8}}
  concurrency: 96
rows: {{name: groups}}
credit: {{name: rloo, returns: {{invalid_penalty: 0.05}}}}
align:
  loss: {{name: ppo-clip, kl: 0.02}}
  reference: start
  minibatches: 1
  token_budget: 16384
  learning_rate: 5.0e-4
  scheduler: constant
  warmup_ratio: 0
  adam_beta2: 0.95
evaluate:
  tasks: {{split: test}}
  sampling: {{temperature: 1.0, max_new_tokens: 8}}
  concurrency: 100
  every: 12
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a policy that solves some of the games."""
    folder = tmp_path_factory.mktemp("learning")
    make_policy(folder / "base", seed=0)
    return folder


def learn(place, *words, seed=0):
    """Do `perturn run`; success on each held-out game before and after."""
    file = place / "recipe.yaml"
    file.write_text(RECIPE.format(place=place, seed=seed))
    with open_run(file, words) as run:
        run_stages(run)
        scored = sorted((Path(run.folder) / "evaluation").glob("*.jsonl"))
    return [{one.task.id: float(succeeded(one)) for one in read_trajectories(each)} for each in scored]


def test_the_sign_of_the_credit_decides_which_way_the_policy_goes(place):
    """100 games that nobody explored, paired: RLOO's policy solves more than that of RLOO with its sign flipped.

    After equally many steps. How far RLOO rises above where both began depends on the policy it begins with.
    """
    before, after = learn(place)
    same, flipped = learn(place, "name=flipped", "credit={name: 'household:Flipped'}")

    assert before == same
    assert 0.1 < sum(before.values()) / len(before) < 0.6
    assert paired_comparison(after, flipped).low > 0
    assert sum(flipped.values()) < sum(before.values())
