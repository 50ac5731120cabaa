"""Online learning learns: a small policy gets better at games of `alfworld-like` that it never played."""

from pathlib import Path

import pytest

from household import make_policy
from perturn.data.store import read_trajectories
from perturn.run.loop import open_run, run_stages
from perturn.stats import paired_comparison
from perturn.types import succeeded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skip(
        reason="not settled: at a learning rate of 1e-3 seed 1 rises by 21 points and seed 0 falls by 12"
    ),
]

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
groups: {{}}
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


def test_success_rises_on_games_that_were_not_explored(place):
    """100 games, paired: the lower end of the difference's 95 % interval is above zero."""
    before, after = learn(place)

    assert 0.1 < sum(before.values()) / len(before) < 0.6
    assert paired_comparison(after, before).low > 0


def test_with_the_credits_sign_flipped_it_does_not(place):
    """The same games and steps in the other direction."""
    before, after = learn(place, "name=flipped", "credit={name: 'household:Flipped'}", "iterations=5")

    assert paired_comparison(after, before).high < 0
