"""An online run whose policies are trained by two processes: its weights, its engine, and FSDP2."""

import json

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from perturn.data.run_paths import OPTIMIZER
from perturn.engines import ENGINES
from perturn.run.execute import open_run, run_stages

from .online import GROUPS, recipe_of

WORDS = [*GROUPS, "deterministic=true", "sft.epochs=2", "evaluate=null", "align.minibatches=1"]


@pytest.fixture(scope="module")
def policy_folder(whole_vocabulary):
    """One that is not sure of what to do after SFT."""
    return whole_vocabulary


def weights(run, iteration):
    """Weights of the policy of an iteration."""
    return load_file(run.paths.checkpoint(f"ppo-clip-00{iteration}") / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["{processes: 2}", "{processes: 2, sharding: fsdp2}"])
def test_three_iterations_by_two_processes_are_those_of_one(place, monkeypatch, launch):
    """The engine is opened once, episodes are the same, and the optimizer goes on from iteration to iteration."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    opened, before = [], ENGINES["local"].open

    def noted(self, serving):
        opened.append(serving.policy)
        return before(self, serving)

    monkeypatch.setattr(ENGINES["local"], "open", noted)
    found = []
    for name, words in (("one", []), ("two", [f"launch={launch}"])):
        with open_run(recipe_of(place, *WORDS, *words, f"name={name}")) as run:
            run_stages(run)
            found.append(run)
        assert len(opened) == 1
        opened.clear()

    one, two = found
    for iteration in (1, 2, 3):
        assert_close(weights(two, iteration), weights(one, iteration), rtol=0, atol=1e-6)
        actions = [
            [turn["action"]["text"] for row in map(json.loads, file) for turn in row["turns"]]
            for run in found
            for file in [run.paths.trajectories(f"explore-00{iteration}").read_text().splitlines()]
        ]
        assert actions[0] == actions[1]
    kept = [run.paths.checkpoint("ppo-clip-003") / OPTIMIZER[0] for run in found]
    assert kept[0].is_file() == kept[1].is_file()
