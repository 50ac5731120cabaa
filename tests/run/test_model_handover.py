"""An online run whose engine is given each trained model from memory."""

import gc
import weakref
from dataclasses import dataclass, replace

import pytest
from torch.testing import assert_close

from perturn.engines import ENGINES
from perturn.engines.local.settings import LocalSettings
from perturn.errors import ConfigError
from perturn.policy.models import load_model
from perturn.run.execute import open_run, run_stages
from perturn.run.stages.backend_checks import check_backend

from .online import GROUPS, recipe_of

WORDS = [*GROUPS, "iterations=2", "evaluate=null", "deterministic=true"]


@pytest.fixture(scope="module")
def policy_folder(whole_vocabulary):
    """One that is not sure of what to do after SFT."""
    return whole_vocabulary


@dataclass(frozen=True)
class TakingSettings(LocalSettings):
    """The local engine, which is given models from memory and counts what it gets."""

    handover: str = "memory"

    @property
    def traits(self):
        """It takes models."""
        return replace(super().traits, takes_models=True)

    def open(self, serving):
        """The engine of this process, with a method more."""
        engine = super().open(serving)
        engine.take_model = lambda model, folder, name: take(engine, model, folder, name)
        return engine


TAKEN = []


def take(engine, model, folder, name):
    """Serve what was written, which must be the model."""
    written = load_model(str(folder)).state_dict()
    for key, weight in model.state_dict().items():
        assert_close(weight.cpu(), written[key], atol=0, rtol=0)
    TAKEN.append((name.partition("@")[0], weakref.ref(model)))
    engine.update_weights(folder, name)


def played(place, name, monkeypatch, *words):
    """A run, done in this process: the bytes of its last policy and of its episodes."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    with open_run(recipe_of(place, *WORDS, f"name={name}", *words)) as run:
        run_stages(run)
    folder = place / "runs" / name
    files = [folder / "checkpoints/ppo-clip-002/model.safetensors", folder / "trajectories/explore-002.jsonl"]
    return [each.read_bytes() for each in files]


@pytest.mark.slow
def test_the_engine_gets_each_trained_model_once_and_the_run_ends_as_one_that_reads_files(place, monkeypatch):
    """Each is the model that was written, and is freed afterwards; the ends are equal to the last bit."""
    plain = played(place, "plain", monkeypatch)
    monkeypatch.setitem(ENGINES._own, "local", TakingSettings)
    TAKEN.clear()
    assert played(place, "taken", monkeypatch) == plain

    gc.collect()
    assert [name for name, _ in TAKEN] == ["ppo-clip-001", "ppo-clip-002"]
    assert [model() for _, model in TAKEN] == [None, None]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["staleness=1"], "staleness is set, and the engine answers while a policy is trained"),
        (["launch.processes=2"], "launch.processes is set, and the policy is trained in other processes"),
        (
            ["align.lora={rank: 2}", "align.minibatches=null"],
            "align.lora is set, and adapters are small files",
        ),
        (["cluster={address: local, engines: 1}"], "cluster.engines is set, and engines on nodes read files"),
    ],
)
def test_what_leaves_no_model_in_memory_is_refused(place, monkeypatch, words, says):
    """Before work, with what to do."""
    monkeypatch.setitem(ENGINES._own, "local", TakingSettings)
    recipe = recipe_of(place, *WORDS, "deterministic=false", "engine={name: local, handover: memory}", *words)

    with pytest.raises(ConfigError, match=f"engine.handover=memory: {says}.*; leave engine.handover out"):
        check_backend(recipe)
