"""Implicit rewards in the loop: a reward model that learns beside the policy, and a policy that was trained."""

import io
import json
import shutil

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch.testing import assert_close
from typer.testing import CliRunner

import perturn
from perturn.audit import inspect, model_of
from perturn.cli import app
from perturn.config.stages import stages
from perturn.credit import CREDITS
from perturn.data.group_account import read_credits
from perturn.data.store import read_pairs, read_trajectories
from perturn.errors import ConfigError
from perturn.group import counted, groups_of
from perturn.quantities.readers import open_reader
from perturn.quantities.reference_logprobs import reference_of
from perturn.report import summarize, write_report
from perturn.run.execute import check, open_run
from perturn.run.export_run import export_policy
from perturn.run.stages.credit_stage import credit_run
from perturn.run.verify_run import verify
from perturn.study.stage_sharing import unsure_inputs
from perturn.types import failed, score
from perturn.watch import Watcher
from support.credited import EPISODES
from support.weights import weights_of

from .kills import Forks
from .online import GROUPS, recipe_of

REWARD = "reward={model: {learning_rate: 3.0e-3, batch_size: 2, epochs: 2}}"
WORDS = [*GROUPS, "credit.name=oprl", REWARD, "iterations=2", "align.learning_rate=1.0e-4"]
ALONE = ["explore.concurrency=1", "engine={name: local, speculate: false}"]
"""One episode at a time and no guesses, so that rounding is the same whenever it is killed."""
MEASURED = '''
from perturn_letters import Letters


class Measured(Letters):
    """Knows that an episode has two turns."""

    def remaining(self, task, actions, sense):
        return [2 - number for number in range(len(actions) + 1)]
'''


@pytest.fixture(scope="module")
def forks(place):
    """Starts `perturn` in the folder of the world and its recipe."""
    recipe_of(place)
    return Forks(place)


@pytest.fixture(scope="module")
def judged(forks):
    """Two iterations with a reward model that nothing interrupted."""
    forks.run("judged", "online.yaml", *WORDS, *ALONE)
    return forks.place / "runs" / "judged"


def logprobs(episodes, run, *names):
    """Log-probabilities of the tokens of each turn under policies of a run."""
    return [reference_of(episodes, open_reader(str(run / "checkpoints" / name))) for name in names]


def weights(run, name):
    """Weights that a credit wrote, by episode."""
    return {
        row.key: torch.tensor(row.weight, dtype=torch.float64)
        for row in read_credits(run / f"credits/{name}.jsonl")
    }


def assert_weights(found, episodes, credit, **needed):
    """They are those of the formula, group by group."""
    for group in groups_of(episodes):
        its = {name: [values[episodes.index(one)] for one in group] for name, values in needed.items()}
        for one, expected in zip(group, credit(group, **its), strict=True):
            assert_close(found[one.key], expected, atol=1e-6, rtol=0)


def test_the_model_learns_before_the_credit_reads_it(tmp_path):
    """From the policy of the beginning, then from itself; its reference is the start, or the policy that explored."""
    recipe = recipe_of(tmp_path, *WORDS)
    found = {stage.name: stage for stage in stages(recipe)}

    names = ("explore", "prefer", "reward", "credit", "align")
    assert list(found)[4:] == [
        *(f"{name}-001" for name in names),
        *(f"{name}-002" for name in names),
        "evaluate-ppo-clip-002",
    ]
    made = [(one.policy, one.start, one.reference) for one in found.values() if one.section == "reward.model"]
    assert made == [("prm-001", "sft", "sft"), ("prm-002", "prm-001", "sft")]
    assert found["credit-002"].needs == ("explore-002", "reward-002")
    assert found["credit-002"].reference == "sft"
    moving = stages(recipe_of(tmp_path, *WORDS, "reward.model.reference=previous"))
    assert [one.reference for one in moving if one.section == "reward.model" or one.command == "credit"] == [
        *("sft", "sft"),
        *("ppo-clip-001", "ppo-clip-001"),
    ]


def test_pairs_are_of_the_iterations_own_episodes(judged):
    """The better over the worse; each episode is counted once."""
    counts = json.loads((judged / "manifest.json").read_text())["stages"]
    for mark, policy in (("-001", "sft"), ("-002", "ppo-clip-001")):
        pairs = read_pairs(judged / f"preferences{mark}.jsonl")

        assert pairs
        assert all(score(pair.chosen) > score(pair.rejected) for pair in pairs)
        assert {side.policy.partition("@")[0] for pair in pairs for side in (pair.chosen, pair.rejected)} == {
            policy
        }
        assert sum(counts[f"prefer{mark}"]["counts"].values()) == 12
        assert counts[f"reward{mark}"]["counts"]["examples"] == len(pairs)


def test_the_weights_are_those_of_the_model_and_its_reference(judged):
    """Of the second iteration, whose model is there."""
    episodes = list(read_trajectories(judged / "trajectories/explore-002.jsonl"))
    ours, theirs = logprobs(episodes, judged, "prm-002", "sft")

    found = weights(judged, "oprl-002")

    assert_weights(found, episodes, CREDITS["oprl"](), progress=ours, reference=theirs)
    assert any(one.std() > 0.01 for one in found.values() if len(one) > 1)


def test_the_model_has_learned(judged):
    """It tells the pairs of an iteration apart after training; SFT and the first model were let go or stayed."""
    logged = [
        json.loads(line)
        for mark in ("-001", "-002")
        for line in (judged / f"metrics/reward{mark}.jsonl").read_text().splitlines()
    ]
    kept = {folder.name for folder in (judged / "checkpoints").iterdir()}

    assert "rewards/accuracies" in logged[0]
    assert kept == {"sft", "prm-002", "ppo-clip-002"}


def test_a_run_with_a_model_is_looked_at_like_any_other(judged):
    """Report, watch, inspect, verify; the last policy is the one that is exported, and the model has its own loss."""
    assert [row["name"] for row in summarize(judged)["policies"]] == ["base", "sft", "ppo-clip-002"]
    assert "reward, 2 times" in write_report(judged, output=judged.parent / "judged.html").read_text()
    state = Watcher(judged).look()
    assert state.is_well
    assert {"prefer-002", "reward-002"} <= {stage.name for stage in state.stages}
    assert model_of(judged, None) == str(judged / "checkpoints" / "sft")
    console = Console(file=io.StringIO(), width=120)
    inspect(judged, model_of(judged, None), None, console, limit=1)
    assert console.file.getvalue()
    assert not verify(judged).damaged
    assert export_policy(judged, judged.parent / "policy") == "ppo-clip-002"
    export_policy(judged, judged.parent / "model", "prm-002")
    assert "loss `dpo`" in (judged.parent / "model" / "README.md").read_text()


def test_weights_by_a_model_that_was_deleted_cannot_be_made_again(judged, tmp_path):
    """The first iteration's, whose policy is there and whose reward model is not; with its pairs all is made again."""
    copy = tmp_path / "judged"
    shutil.copytree(judged, copy)
    weights_file, pairs = copy / "credits/oprl-001.jsonl", copy / "preferences-001.jsonl"
    whole = weights_file.read_bytes()
    weights_file.write_bytes(whole[:-2] + b" }")
    (remedy,) = verify(copy).remedies
    weights_file.write_bytes(whole)
    pairs.write_bytes(pairs.read_bytes()[:-2] + b" }")
    (other,) = verify(copy).remedies

    assert remedy.endswith("prm-001 was not kept.")
    assert "rm -r" in other


@pytest.mark.slow
def test_pairs_of_a_reward_model_are_measured(forks):
    """Where `groups.remaining` says so, so that the loss w-dpo finds the way that is left of its turns."""
    (forks.place / "perturn_measured.py").write_text(MEASURED)
    words = [*WORDS, "environment.name=perturn_measured:Measured", "iterations=1", "evaluate=null"]
    words += [
        "reward={model: {loss: {name: w-dpo}}}",
        "rows={name: groups}",
        "worlds.processes=0",
    ]

    forks.run("measured", "online.yaml", *words)

    pairs = list(read_pairs(forks.place / "runs/measured/preferences.jsonl"))
    assert pairs
    assert all(
        turn.remaining for pair in pairs for side in (pair.chosen, pair.rejected) for turn in side.turns
    )


@pytest.mark.slow
def test_a_run_that_is_killed_in_its_second_iteration_ends_as_the_other_did(forks, judged):
    """While the model learns and while the policy does: the same model and policy, to the bit."""
    for file in ("metrics/reward-002.jsonl", "metrics/align-002.jsonl"):
        assert forks.run("killed", "online.yaml", *WORDS, *ALONE, kill_at=file)[1]
    forks.run("killed", "online.yaml", *WORDS, *ALONE)

    other = forks.place / "runs" / "killed"
    assert (other / "preferences-002.jsonl").read_bytes() == (judged / "preferences-002.jsonl").read_bytes()
    for name in ("prm-002", "ppo-clip-002"):
        file = f"checkpoints/{name}/model.safetensors"
        assert_close(load_file(other / file), load_file(judged / file), rtol=0, atol=0)
    assert {folder.name for folder in (other / "checkpoints").iterdir()} == {"sft", "prm-002", "ppo-clip-002"}


@pytest.mark.slow
def test_an_iteration_without_pairs_keeps_the_model(forks):
    """No gap is so large: the model stays what the loop began with, and the outcome alone counts, as in GRPO."""
    forks.run("unpaired", "online.yaml", *WORDS, "iterations=1", "reward.model.threshold=9")
    said = (forks.place / "unpaired.txt").read_text()
    run = forks.place / "runs" / "unpaired"
    episodes = list(read_trajectories(run / "trajectories/explore.jsonl"))

    assert "nothing to learn from; the reward model stays as it is" in said
    assert not read_pairs(run / "preferences.jsonl")
    same = [load_file(run / f"checkpoints/{name}/model.safetensors") for name in ("sft", "prm")]
    assert_close(*same, rtol=0, atol=0)
    assert_weights(
        weights(run, "oprl"), episodes, lambda group, **_: CREDITS["grpo"]()(group), progress=episodes
    )


@pytest.mark.slow
def test_stored_episodes_are_scored_by_a_trained_policy(judged, monkeypatch):
    """By the last policy, or the reward model, over SFT; as many nats as the two differ by."""
    monkeypatch.chdir(judged.parents[1])
    for name in ("ppo-clip-002", "prm-002"):
        words = ["credit.name=progress-advantage", f"credit.checkpoint={name}", "credit.alpha=1.0"]
        words += ["credit.outcome=false", "credit.normalize=mean"]
        found = credit_run(judged, words, name="scored", reference="sft")
        assert [one["iteration"] for one in found["iterations"]] == [1, 2]

        episodes = list(read_trajectories(judged / "trajectories/explore-001.jsonl"))
        ours, theirs = logprobs(episodes, judged, name, "sft")
        credit = CREDITS["progress-advantage"](alpha=1.0, outcome=False, normalize="mean")
        assert_weights(weights(judged, "scored-001"), episodes, credit, progress=ours, reference=theirs)


@pytest.mark.slow
def test_the_first_policy_is_its_own_reference_and_the_second_is_not(forks):
    """Online: RLOO in the first iteration, and said; then what the update made likelier counts too."""
    words = [*GROUPS, "credit={name: progress-advantage, alpha: 1.0}", "iterations=2"]
    forks.run("ahead", "online.yaml", *words)
    said = " ".join((forks.place / "ahead.txt").read_text().split())
    run = forks.place / "runs" / "ahead"
    first, second = (list(read_trajectories(run / f"trajectories/explore-00{n}.jsonl")) for n in (1, 2))

    assert said.count("policy sft is its own reference; the outcome alone counts") == 1
    found = weights(run, "progress-advantage-001")
    assert_weights(found, first, lambda group, **_: CREDITS["rloo"]()(group), progress=first)
    found = weights(run, "progress-advantage-002")
    rloo = {
        one.key: weight
        for group in groups_of(second)
        for one, weight in zip(group, CREDITS["rloo"]()(group), strict=True)
    }
    assert any((found[key] - rloo[key]).abs().max() > 0.1 for key in found)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["credit.name=oprl"], "reward.model is missing, and credit .* reads a reward model .*; add it"),
        (["credit.name=rloo", "reward={model: {}}"], "credit rloo reads no reward model of the run"),
        (["credit={name: oprl, checkpoint: sft}", "reward={model: {}}"], "reads no reward model of the run"),
        (
            ["credit.name=progress-advantage", "align.reference=previous"],
            "would compare each policy with itself",
        ),
        (["credit.name=progress-advantage", "iterations=1"], "would compare each policy with itself"),
        (["credit={name: progress-advantage, checkpoint: sft}"], "would compare each policy with itself"),
        (
            ["credit={name: progress-advantage, checkpoint: ppo-clip-001}"],
            r"be base, sft, a folder or a Hub id, .* got 'ppo-clip-001'",
        ),
        (["credit={name: progress-advantage, checkpoint: nowhere/model}"], "nowhere/model"),
        (
            ["credit.name=oprl", "reward.model.loss.name=sft"],
            "reward.model.loss.name must be a loss on pairs",
        ),
    ],
)
def test_what_could_not_be_compared_is_refused_before_work(place, monkeypatch, words, said):
    monkeypatch.chdir(place)
    with pytest.raises(perturn.errors.PerturnError, match=said):
        check(recipe_of(place, *GROUPS, *words))


def test_a_reward_model_without_groups_is_refused(place):
    with pytest.raises(ConfigError, match=r"reward\.model is read by credits of groups alone"):
        recipe_of(place, "reward={model: {}}")


def test_stored_episodes_of_a_policy_that_is_its_own_reference_are_refused(explored, tiny_folder):
    """Another policy must be named; it may be a folder, and then weights are those of the formula."""
    with pytest.raises(ConfigError, match="policy sft is compared with itself; name a policy"):
        credit_run(explored, ["credit.name=progress-advantage"])
    with pytest.raises(
        ConfigError, match=r"reward\.model is missing, .*; name a policy in credit\.checkpoint"
    ):
        credit_run(explored, ["credit.name=oprl"])
    words = ["credit", str(explored), "credit.name=oprl", f"credit.checkpoint={tiny_folder}"]

    found = CliRunner().invoke(app, [*words, "--reference", "base", "--json"])

    assert found.exit_code == 0, found.output
    (one,) = json.loads(found.stdout)["iterations"]
    rows = {row.key: row.weight for row in read_credits(explored / one["file"])}
    for group in map(counted, groups_of(EPISODES)):
        for each, weight in zip(group, CREDITS["grpo"]()(group), strict=True):
            assert rows[each.key] == pytest.approx(weight.tolist(), abs=1e-9)
    assert all(not any(rows[each.key]) for each in EPISODES if failed(each))


def test_in_python_both_policies_are_given(tiny_folder, tiny_model, tokenizer):
    """The same model twice leaves the outcome; without a reference there is nothing to compare with."""
    found = weights_of(EPISODES, "oprl", model=tiny_model, tokenizer=tokenizer, reference=str(tiny_folder))

    by_key = {one.key: weight for one, weight in zip(EPISODES, found, strict=True)}
    for group in groups_of(EPISODES):
        for one, expected in zip(group, CREDITS["grpo"]()(group), strict=True):
            assert by_key[one.key].shape == expected.shape
    with pytest.raises(
        ConfigError, match=r"reference is missing, and credit .* compares a policy with its reference; give"
    ):
        weights_of(EPISODES, "oprl", model=tiny_model, tokenizer=tokenizer)


def test_a_folder_that_a_credit_reads_is_a_users_file(place):
    """Its content may change, so no other study takes a stage over that read it."""
    recipe = recipe_of(place, *GROUPS, f"credit={{name: oprl, checkpoint: {place}}}")

    assert "credit.checkpoint" in unsure_inputs(place / "none", recipe)


def test_a_finished_run_has_nothing_left_to_do(place, judged, monkeypatch):
    monkeypatch.chdir(place)
    with open_run(judged) as run:
        assert all(one["done"] for one in run.manifest["stages"].values())
