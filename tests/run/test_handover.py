"""An online run that trains adapters: its policies are adapters upon one model, and the engine is given them alone."""

import json
import shutil

import pytest
import torch
from torch.testing import assert_close

from perturn.chat.model_names import adapters_in
from perturn.config import stages
from perturn.data.run_folder import Run
from perturn.data.store import read_trajectories
from perturn.engines import ENGINES
from perturn.policy.models import load_model
from perturn.run.execute import open_run, run_stages

from .online import recipe_of

LORA = "align.lora={rank: 2, target_modules: [q_proj, v_proj, down_proj]}"
WORDS = [LORA, "align.minibatches=null", "deterministic=true", "evaluate=null", "align.learning_rate=1.0e-2"]


@pytest.fixture(scope="module")
def policy_folder(whole_vocabulary):
    """One that is not sure of what to do after SFT."""
    return whole_vocabulary


def run_of(place, name, monkeypatch, *words):
    """A run with adapters, done in this process; and the policies for which an engine was opened."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    opened, opens = [], ENGINES["local"].open

    def noted(self, serving):
        opened.append(serving.policy)
        return opens(self, serving)

    monkeypatch.setattr(ENGINES["local"], "open", noted)
    with open_run(recipe_of(place, *WORDS, *words, f"name={name}")) as run:
        run_stages(run)
    monkeypatch.setattr(ENGINES["local"], "open", opens)
    return run, opened


@pytest.fixture(scope="module")
def both(place):
    """The run, and the run whose policies are merged after each iteration, as a whole model for each."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        one = run_of(place, "adapters", monkeypatch)
        monkeypatch.setattr("perturn.run.stages.train_stage.keeps_adapters", lambda *_: False)
        two = run_of(place, "merged", monkeypatch)
    return one, two


def weights(run, policy):
    return load_model(str(run.paths.checkpoint(policy))).state_dict()


def test_policies_are_adapters_upon_one_model_and_equal_the_merged_ones(both):
    (run, opened), (merged, _) = both
    print(opened)
    for name in ("dpo-003",):
        a, b, c = weights(run, name), weights(merged, name), weights(run, "sft")
        print(
            max(float((a[k] - b[k]).abs().max()) for k in a), max(float((a[k] - c[k]).abs().max()) for k in a)
        )
    print(
        sorted(p.name for p in (run.folder / "checkpoints").iterdir()),
        [(p.name, p.stat().st_size) for p in (run.folder / "checkpoints/dpo-003").iterdir()],
    )
    print((run.folder / "checkpoints/dpo-003/adapter_config.json").read_text())
    assert 0
