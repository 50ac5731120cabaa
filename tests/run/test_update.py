"""A session gives an open engine the weights of the next policy, and it is then as one that was just opened."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from perturn.engines import ENGINES
from perturn.engines.local.engine import LocalEngine
from perturn.episodes.seeds import make_jobs
from perturn.run.execute import open_run
from perturn.run.session import Session
from perturn.types import Sampling
from support.models import make_tiny_model

SAMPLING = Sampling(temperature=1.0, max_new_tokens=4)


@pytest.fixture(params=["float32", "bfloat16"])
def run(request, recipe, tokenizer):
    """A run of which two policies are trained, to weights that no rounding hides."""
    words = ["deterministic=true", f"model.dtype={request.param}"]
    with open_run(recipe, words) as opened:
        for seed, policy in enumerate(("sft", "tlm-dre"), start=1):
            make_tiny_model(seed).save_pretrained(opened.paths.checkpoint(policy))
            tokenizer.save_pretrained(opened.paths.checkpoint(policy))
        yield opened


@pytest.fixture
def opened(monkeypatch):
    """The policies for which an engine was opened."""
    policies, settings = [], ENGINES["local"]
    before = settings.open

    def noted(self, serving):
        policies.append(serving.policy)
        return before(self, serving)

    monkeypatch.setattr(settings, "open", noted)
    return policies


def play(session, file, policy):
    """The episodes of a policy, as they are stored."""
    jobs = make_jobs(session.task_lists.tasks["explore"], 0)
    session.play(file, jobs, policy, SAMPLING, 3, "episodes")
    return file.read_bytes()


def test_an_engine_that_was_updated_is_to_the_bit_the_one_that_is_opened(run, opened, tmp_path, monkeypatch):
    """Names, actions and log-probabilities of the same episodes; no second model is made."""
    with Session(run) as session:
        play(session, tmp_path / "sft.jsonl", "sft")
        with monkeypatch.context() as patched:
            patched.setattr(AutoModelForCausalLM, "from_pretrained", None)
            patched.setattr(LlamaForCausalLM, "from_pretrained", None)
            updated = play(session, tmp_path / "updated.jsonl", "tlm-dre")
        engine = session.engine("tlm-dre")

    with Session(run) as session:
        fresh = play(session, tmp_path / "fresh.jsonl", "tlm-dre")
        assert session.engine("tlm-dre").name == engine.name
    assert opened == ["sft", "tlm-dre"]
    assert updated == fresh
    assert json.loads(fresh.splitlines()[0])["policy"].startswith("tlm-dre@")
    assert fresh != (tmp_path / "sft.jsonl").read_bytes()


@pytest.mark.parametrize("run", ["float32"], indirect=True)
def test_the_base_and_another_architecture_are_opened(run, opened):
    """The base may be a Hub id; another architecture does not fit."""
    config = run.paths.checkpoint("tlm-dre") / "config.json"
    with Session(run) as session:
        for policy in ("sft", "base", "sft", "tlm-dre", "sft"):
            session.engine(policy)
        assert opened == ["sft", "base"]

        config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-3}))
        assert session.engine("tlm-dre").name.startswith("tlm-dre@")
        assert opened == ["sft", "base", "tlm-dre"]


@pytest.mark.parametrize("run", ["float32"], indirect=True)
def test_files_that_only_transformers_can_read_are_opened(run, opened):
    """Weights under a name that the model does not have."""
    file = run.paths.checkpoint("tlm-dre") / "model.safetensors"
    renamed = {name.replace("model.norm", "norm"): tensor for name, tensor in load_file(file).items()}
    save_file(renamed, file, {"format": "pt"})
    with Session(run) as session:
        session.engine("sft")
        session.engine("tlm-dre")

    assert opened == ["sft", "tlm-dre"]


def test_tied_weights_are_stored_once_and_served_twice(tmp_path, renderer, monkeypatch):
    """The output layer has no weight of its own in the file."""
    models = []
    for seed in (0, 1):
        config = make_tiny_model().config
        config.tie_word_embeddings = True
        torch.manual_seed(seed)
        models.append(AutoModelForCausalLM.from_config(config))
    models[1].save_pretrained(tmp_path)
    engine = LocalEngine(models[0], renderer)

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", None)
    engine.update_weights(tmp_path, "new")

    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    for name, weight in models[1].state_dict().items():
        assert torch.equal(engine._model.state_dict()[name], weight)
