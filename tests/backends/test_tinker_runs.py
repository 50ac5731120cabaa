"""Whole runs through a service: no weights in this process, the same files, and a resume after a kill."""

import json
import os
import random
import signal
import sys
import time

import pytest
import transformers

from guest_losses import EntropyBonus
from perturn.config.recipe import read_recipe
from perturn.engines.engine_check import check_engine
from perturn.engines.tinker.stored_policy import stored_policy
from perturn.errors import ConfigError, RunError
from perturn.estimate.dry_run import make_plan
from perturn.losses import LOSSES
from perturn.run.execute import open_run, run_stages
from perturn.run.served_policy import open_engine
from perturn.run.verify_run import verify
from run.online import LETTERS
from support.processes import Started

RECIPE = """
name: online
model: {{name: {model}}}
environment: {{name: "perturn_letters:Letters"}}
protocol: {{name: tiny, format: action, system: Talk., max_turns: 3}}
engine: {{name: tinker, base_url: "{url}", model: tiny, timeout: 20, patience: 1}}
backend: {{name: tinker, base_url: "{url}", model: tiny, timeout: 20, patience: 1}}
iterations: 3
explore:
  per_iteration: 2
  samples: 3
  sampling: {{temperature: 1.0, max_new_tokens: 4}}
  concurrency: 6
rows: {{name: groups}}
credit: {{name: anchor-rloo}}
align:
  loss: {{name: ppo-clip, kl: 0.1}}
  reference: start
  minibatches: 2
  learning_rate: 3.0e-3
  lora: {{rank: 4}}
evaluate:
  tasks: {{split: test, n: 2}}
  sampling: {{max_new_tokens: 4}}
  every: 3
worlds: {{processes: 0}}
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the world, where the run lies too."""
    (tmp_path / "perturn_letters.py").write_text(LETTERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("perturn_letters", None)


@pytest.fixture
def recipe_at(place, tiny_folder):
    """The recipe for a service."""

    def recipe_at(service, *words):
        file = place / "online.yaml"
        file.write_text(RECIPE.format(model=tiny_folder, url=service.url))
        return read_recipe(file, words)

    return recipe_at


def done(recipe):
    """Open the run of a recipe and do it whole; its folder."""
    run = open_run(recipe)
    try:
        run_stages(run)
    finally:
        run.close()
    return run.folder


def episodes_of(folder):
    """How many episodes each exploration and score has, by its file."""
    return {
        file.stem: len(file.read_text().splitlines()) for file in (folder / "trajectories").glob("*.jsonl")
    }


@pytest.mark.slow  # a whole run
def test_an_online_run_has_no_model_in_this_process(serving, recipe_at, monkeypatch):
    """Three iterations, six steps at the service; policies are names, and everything else is as in any other run."""

    def refuse(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    service = serving()
    before = service.steps

    folder = done(recipe_at(service))

    policy = folder / "checkpoints" / "ppo-clip-003"
    assert stored_policy(policy).path in service.saved
    assert not list(policy.glob("*.safetensors"))
    assert (policy / "optimizer.pt").is_file()
    steps = [len((folder / f"metrics/align-00{n}.jsonl").read_text().splitlines()) for n in (1, 2, 3)]
    assert sum(steps) < service.steps - before  # the self-test has made some too
    assert episodes_of(folder)["explore-003"] == 6
    agreement = [
        json.loads(line)["kl"] for line in (folder / "metrics/align-001.jsonl").read_text().splitlines()
    ]
    assert agreement[0] == pytest.approx(0, abs=1e-6)
    assert not service.adapters
    verify(folder)
    json.loads((folder / "manifest.json").read_text())["files"]["checkpoints/ppo-clip-003/tinker.json"]


def test_a_dry_run_claims_no_time_for_what_the_service_computes(serving, recipe_at):
    plan = make_plan(recipe_at(serving()), [], None)

    computed = [step for step in plan.steps if step.name.startswith(("explore", "align", "evaluate"))]
    assert len(computed) >= 6
    assert all((step.seconds, step.memory_gb) == (None, None) for step in computed)
    assert plan.how == ["The time of the backend tinker is not estimated: it trains and answers."]


def test_the_engine_keeps_the_contract(serving, recipe_at, place):
    """Token ids and log-probabilities; a stop text ends an answer."""
    run = open_run(
        recipe_at(serving(), "align=null", "iterations=1", "rows=null", "explore=null", "credit=null")
    )
    engine = open_engine(run, "base")
    try:
        assert check_engine(engine) == []
        assert engine.name.startswith("base@")
    finally:
        engine.close()
        run.close()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["engine={name: local}"], "reads policies as files, and .*engines that read these: tinker"),
        (["align.lora=null"], "align needs training of all weights.* backends that do: local"),
        (["align.lora.alpha=16"], r"align.lora.alpha must be 32, got 16"),
        (
            ["align.loss={name: entropy-bonus, bonus: 0.5}"],
            "align.loss.name=entropy-bonus needs numbers of whole",
        ),
        (["credit={name: turn-gae}"], r"what its credit reads \(values\) needs a model in this process"),
        (["align.reference=average"], "align.reference=average needs a model in this process"),
        (["align.gradient_checkpointing=true"], "align.gradient_checkpointing must be off"),
        (["backend.name=tinkr"], "unknown backend.name 'tinkr'. Did you mean 'tinker'"),
        (["backend.api_key_env=sk-secret"], "must be the name of an environment variable"),
    ],
)
def test_what_a_service_cannot_do_is_rejected_before_work(
    serving, recipe_at, place, monkeypatch, words, says
):
    """Nothing is written, and the service is not asked."""
    monkeypatch.setitem(LOSSES._own, "entropy-bonus", EntropyBonus)
    service = serving()

    with pytest.raises(ConfigError, match=says):
        open_run(recipe_at(service, *words))
    assert not (place / "runs").exists()
    assert not service.steps


def test_a_service_that_does_not_clip_is_told_of(serving, recipe_at):
    """The default of 1.0 is not kept to by SkyRL."""
    with pytest.raises(ConfigError, match=r"align.max_grad_norm must be null, got 1\.0\. .* does not clip"):
        open_run(recipe_at(serving(clips=False)))


def test_another_version_of_the_client_is_rejected(serving, recipe_at, monkeypatch):
    """Newer clients send what SkyRL answers with HTTP 500, minutes later."""
    monkeypatch.setattr("perturn.engines.tinker.service_settings.version", lambda _: "0.38.0")

    with pytest.raises(
        ConfigError,
        match=r"version of tinker must be 0.16, .* got '0.38.0'. Run: pip install 'tinker==0.16.\*'",
    ):
        open_run(recipe_at(serving()))


def test_a_service_that_is_not_there_is_said(serving, recipe_at):
    """At once, and not after minutes."""
    began = time.monotonic()

    with pytest.raises(RunError, match=r"http://127.0.0.1:9 cannot be reached .* start the service"):
        open_run(recipe_at(serving(), "backend.base_url=http://127.0.0.1:9"))
    assert time.monotonic() - began < 10


def test_the_key_is_read_from_the_environment(serving, recipe_at, monkeypatch):
    """And it must be one of the Tinker API."""
    monkeypatch.setenv("MY_KEY", "sk-1234")

    with pytest.raises(
        ConfigError, match="environment variable MY_KEY must hold a key that begins with tml-"
    ):
        open_run(recipe_at(serving(), "backend.api_key_env=MY_KEY"))


@pytest.mark.slow  # whole runs as processes of their own
def test_a_client_killed_at_random_moments_counts_the_same_episodes(serving, recipe_at, place):
    """SIGKILL to the client, and now and then the service forgets all that was not saved; then the run ends."""
    service, seeds = serving(), random.Random(0)
    recipe_at(service)
    expected = episodes_of(done(recipe_at(service, "name=whole")))
    for kill in range(5):
        process = Started(["run", "online.yaml"], place, os.environ)
        time.sleep(seeds.uniform(6, 20))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate()
        if kill % 2:
            service.restart()
        if process.returncode == 0:
            break

    folder = done(recipe_at(service))

    assert episodes_of(folder) == expected
