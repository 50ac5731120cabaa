"""An online run whose policies are trained by two processes: its weights, its engine, and FSDP2."""

import json

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from perturn.data.run_paths import OPTIMIZER
from perturn.engines import ENGINES
from perturn.run.execute import open_run, run_stages

from .online import GROUPS, recipe_of

WORDS = [*GROUPS, "deterministic=true", "evaluate=null", "align.learning_rate=1.0e-5"]


@pytest.fixture(scope="module")
def policy_folder(whole_vocabulary):
    """One that is not sure of what to do after SFT."""
    return whole_vocabulary


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["{processes: 2}", "{processes: 2, sharding: fsdp2}"])
def test_three_iterations_by_two_processes_are_those_of_one(place, monkeypatch, launch):
    """The engine is opened once, episodes are the same, and the optimizer goes on from iteration to iteration."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    opened, opens = [], ENGINES["local"].open

    def noted(self, serving):
        opened.append(serving.policy)
        return opens(self, serving)

    monkeypatch.setattr(ENGINES["local"], "open", noted)
    found = []
    for name, words in ((f"one-{len(launch)}", []), (f"two-{len(launch)}", [f"launch={launch}"])):
        with open_run(
            recipe_of(place, *WORDS, f"name={name}")
        ) as run:  # large steps from nothing, in one process
            run_stages(run, names=["expert", "sft"])
        with open_run(recipe_of(place, *WORDS, *words, f"name={name}")) as run:
            run_stages(run)
            found.append(run)
        assert len(opened) == 1
        opened.clear()

    before, one, two = (
        load_file(run.paths.checkpoint(policy) / "model.safetensors")
        for run, policy in ((found[0], "sft"), (found[0], "ppo-clip-003"), (found[1], "ppo-clip-003"))
    )
    moved = max(float((one[name] - before[name]).abs().max()) for name in one)
    assert moved > 1e-5
    assert_close(two, one, rtol=0, atol=1e-6)
    for iteration in (1, 2, 3):
        actions = [
            [turn["action"]["text"] for line in lines for turn in json.loads(line)["turns"]]
            for run in found
            for lines in [run.paths.trajectories(f"explore-00{iteration}").read_text().splitlines()]
        ]
        assert actions[0] == actions[1]
    kept = [run.paths.checkpoint("ppo-clip-003") / OPTIMIZER[0] for run in found]
    assert [file.is_file() for file in kept] == [True, True]
