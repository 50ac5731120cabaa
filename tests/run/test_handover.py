"""An online run that trains adapters: its policies are adapters upon one model, and the engine is given them alone."""

import time

import pytest
from torch.testing import assert_close

from perturn.chat.model_names import adapters_in
from perturn.data.store import read_trajectories
from perturn.engines import ENGINES
from perturn.policy.models import load_model
from perturn.report import summarize
from perturn.run.execute import open_run, run_stages
from perturn.run.export_run import export_policy
from perturn.run.served_policy import open_policy
from perturn.run.verify_run import verify
from support.loop import finish, kill

from .online import begin, recipe_of

LORA = "align.lora={rank: 2, target_modules: [q_proj, v_proj, down_proj]}"
WORDS = [LORA, "align.minibatches=null", "deterministic=true", "align.learning_rate=1.0e-2"]


@pytest.fixture(scope="module")
def policy_folder(whole_vocabulary):
    """One that is not sure of what to do after SFT."""
    return whole_vocabulary


def run_of(place, name, monkeypatch):
    """A run with adapters, done in this process; and the policies for which an engine was opened."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    opened, opens = [], ENGINES["local"].open

    def noted(self, serving):
        opened.append(serving.policy)
        return opens(self, serving)

    monkeypatch.setattr(ENGINES["local"], "open", noted)
    with open_run(recipe_of(place, *WORDS, f"name={name}")) as run:
        run_stages(run)
    monkeypatch.setattr(ENGINES["local"], "open", opens)
    return place / "runs" / name, opened


@pytest.fixture(scope="module")
def both(place):
    """The run, and a run whose policies are merged after each iteration; with the policies that engines opened with."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        adapters = run_of(place, "adapters", monkeypatch)
        monkeypatch.setattr("perturn.run.stages.train_stage.keeps_adapters", lambda *_: False)
        return adapters, run_of(place, "merged", monkeypatch)


def weights(run, policy):
    return load_model(str(run / "checkpoints" / policy)).state_dict()


@pytest.mark.slow
def test_an_online_run_ends_with_the_weights_of_a_run_that_merges_each_iteration(both, place):
    """Within rounding; the engine is opened once after SFT, and no copy of a merged model is written."""
    (run, opened), (merged, _) = both

    assert opened == ["base", "sft"]
    assert not (place / "cache/models/merged").exists()
    assert adapters_in(str(run / "checkpoints/dpo-003")).low_rank.rank == 6
    ours, theirs, before = weights(run, "dpo-003"), weights(merged, "dpo-003"), weights(run, "sft")
    assert max(float((ours[name] - before[name]).abs().max()) for name in ours) > 0.01
    for name, weight in ours.items():
        assert_close(weight, theirs[name], atol=1e-5, rtol=0)
    for number in (1, 2, 3):
        first, second = (
            [
                [turn.action.text for turn in one.turns]
                for one in read_trajectories(each / f"trajectories/explore-00{number}.jsonl")
            ]
            for each in (run, merged)
        )
        assert first == second


@pytest.mark.slow
def test_what_reads_policies_reads_adapters(both, tmp_path):
    """Reports, `verify`, `export` and `serve`; the exported policy is a whole model."""
    (run, _), _ = both
    assert [row["name"] for row in summarize(run)["policies"]] == ["base", "sft", "dpo-002", "dpo-003"]
    assert not verify(run).damaged
    assert export_policy(run, tmp_path / "exported") == "dpo-003"
    assert adapters_in(str(tmp_path / "exported")) is None
    exported = load_model(str(tmp_path / "exported")).state_dict()
    assert_close(exported, weights(run, "dpo-003"), atol=0, rtol=0)
    engine = open_policy(str(run), (), print)
    assert engine.name.startswith("dpo-003@")
    engine.close()


@pytest.mark.slow
def test_a_run_that_is_killed_between_and_in_iterations_ends_as_the_other_did(both, place):
    """Killed while it explores and while it trains; adapters and episodes are the same to the bit."""
    (run, _), _ = both
    for file in ("trajectories/explore-002.jsonl", "metrics/align-002.jsonl", "checkpoints/dpo-002"):
        killed = begin(place, "killed", *WORDS)
        deadline = time.monotonic() + 100
        while not (place / "runs/killed" / file).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        kill(killed)
    finish(begin(place, "killed", *WORDS))

    for name in ("checkpoints/dpo-003/adapter_model.safetensors", "trajectories/explore-003.jsonl"):
        assert (place / "runs/killed" / name).read_bytes() == (run / name).read_bytes()
