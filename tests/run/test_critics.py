"""Critics that go on with a run: kept, sealed, let go, resumed to the bit, and learned again from stored episodes."""

import json
import random
import shutil
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from perturn.config.stages import stages
from perturn.credit import CREDITS, CreditTraits
from perturn.data.group_account import read_credits
from perturn.data.store import TrajectoryStore, read_trajectories
from perturn.episodes.seeds import seed_of
from perturn.errors import ConfigError, RunError
from perturn.methods.archer.critics import critics_of
from perturn.quantities.readers import open_reader
from perturn.run.execute import open_run, run_stages
from perturn.run.stages import group_stage
from perturn.run.stages.credit_stage import credit_run
from perturn.run.stages.quantity_source import read_state
from perturn.run.verify_run import verify
from support.credited import EPISODES, KEPT
from support.weights import weights_of

from .online import GROUPS, recipe_of

ARCHER = CREDITS["archer"]
WORDS = [*GROUPS, "credit.name=archer", "deterministic=true", "worlds.processes=0"]


@pytest.fixture(scope="module")
def online(place):
    """Three iterations of policy gradient by critics, in this process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(place)
        patched.setenv("PERTURN_CACHE", str(place / "cache"))
        with open_run(recipe_of(place, *WORDS, "name=judged")) as run:
            run_stages(run)
    return place / "runs" / "judged"


def test_the_loop_weighs_by_critics_that_have_learned_from_all_iterations(online):
    """On SFT's hidden states, whoever acted; counts say what V explains and how large the TD error is."""
    stages = json.loads((online / "manifest.json").read_text())["stages"]
    reader, critics = open_reader(str(online / "checkpoints" / "sft")), None
    for mark in ("-001", "-002", "-003"):
        episodes = list(read_trajectories(online / f"trajectories/explore{mark}.jsonl"))
        learned = critics_of(episodes, ARCHER().needs[0], reader, critics, seed_of(0, "critics"))
        weights = ARCHER()(episodes, critics=learned.critiques)
        expected = dict(zip([one.key for one in episodes], weights, strict=True))
        critics = learned.critics

        for row in read_credits(online / f"credits/archer{mark}.jsonl"):
            assert_close(torch.tensor(row.weight, dtype=torch.float64), expected[row.key], atol=1e-9, rtol=0)
        counts = stages[f"credit{mark}"]["counts"]
        assert counts["explained_variance"] == pytest.approx(learned.explained_variance, abs=1e-4)
        assert counts["td_error"] == pytest.approx(learned.td_error, abs=1e-4)
        assert counts["trained"] == counts["asked"] == 12


def test_the_newest_critics_alone_are_kept_and_sealed(online):
    """As policies are; the manifest seals them with the stage, and does not list them as data."""
    kept = sorted(file.name for file in online.glob("credits/*.safetensors"))
    manifest = json.loads((online / "manifest.json").read_text())

    assert kept == ["critics-003.safetensors"]
    assert manifest["files"]["credits/critics-003.safetensors"]["stage"] == "credit-003"
    assert "credits/critics-002.safetensors" not in manifest["files"]
    assert not [name for name in manifest["data"] if "critics" in name]
    assert int(read_state(online / "credits" / kept[0], "critics")["iterations"]) == 3
    assert not verify(online).damaged


@pytest.mark.slow
def test_stored_episodes_are_judged_again_alike(online, monkeypatch):
    """From the first iteration on, or the run's own weights would be refused; and as the other side."""
    monkeypatch.chdir(online.parents[1])
    again = credit_run(online, ["credit.name=archer"])
    other = credit_run(online, ["credit.name=archer", "credit.gamma=1.0"], against="archer", name="far")
    for iteration in (1, 2, 3):
        (online / f"credits/archer-{iteration:03d}.jsonl").rename(online / f"credits/own-{iteration:03d}")
    try:
        anew = credit_run(online, ["credit.name=rloo"], against="archer", writes=False)
    finally:
        for iteration in (1, 2, 3):
            (online / f"credits/own-{iteration:03d}").rename(online / f"credits/archer-{iteration:03d}.jsonl")
    theirs = credit_run(online, ["credit.name=rloo"], against="archer", writes=False)

    assert [one["iteration"] for one in again["iterations"]] == [1, 2, 3]
    assert all(one["td_error"] > 0 for one in again["iterations"])
    assert all(one["against"]["turns"] > 0 for one in other["iterations"])
    assert [one["against"] for one in anew["iterations"]] == [one["against"] for one in theirs["iterations"]]
    assert sorted(file.name for file in online.glob("credits/*.safetensors")) == ["critics-003.safetensors"]


@pytest.mark.slow
def test_a_kill_between_the_stages_changes_no_bit(place, online, monkeypatch):
    """Stopped behind each stage of the second iteration, and in its credit, and opened again each time."""
    monkeypatch.chdir(place)
    recipe = recipe_of(place, *WORDS, "name=stopped")
    names = [stage.name for stage in stages(recipe)]
    first = names.index("explore-002")
    for some in (names[:first], ["explore-002"], ["credit-002"], ["align-002"], None):
        with open_run(recipe) as run:
            if some == ["credit-002"]:
                _killed_while_it_writes(run, monkeypatch)
            run_stages(run, names=some)

    for mark in ("-001", "-002", "-003"):
        file = f"credits/archer{mark}.jsonl"
        assert (run.folder / file).read_bytes() == (online / file).read_bytes()
    kept = "credits/critics-003.safetensors"
    assert (run.folder / kept).read_bytes() == (online / kept).read_bytes()


def _killed_while_it_writes(run, monkeypatch):
    """The critics of an iteration are there, and not yet its weights: the stage begins anew."""
    with monkeypatch.context() as patched:
        patched.setattr("perturn.run.stages.group_stage.write_credits", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_stages(run, names=["credit-002"])
    assert run.paths.carried("critics", "-002").is_file()
    assert not run.is_done("credit-002")


def test_without_the_critics_before_an_iteration_is_not_weighed(online, monkeypatch):
    """Nothing begins anew in silence."""
    copy = online.with_name("lost")
    shutil.copytree(online, copy)
    monkeypatch.chdir(online.parents[1])
    (copy / "credits/archer-003.jsonl").unlink()
    (copy / "credits/critics-003.safetensors").unlink()
    for left in ("checkpoints/ppo-clip-003", "metrics/align-003.jsonl", "evaluation/ppo-clip-003.jsonl"):
        path = copy / left
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    with (
        open_run(copy, []) as run,
        pytest.raises(RunError, match=r"critics-002\.safetensors, .* is not there"),
    ):
        run_stages(run, names=["credit-003"])


def test_critics_begin_once_there_is_something_to_learn_from(online, monkeypatch):
    """Where no episode of the first iteration has a turn, as if every world had FAILED to start, in the second."""
    copy = online.with_name("late")
    shutil.copytree(online, copy)
    monkeypatch.chdir(online.parents[1])
    with open_run(copy, []) as run:
        first, second = (
            next(one for one in stages(run.recipe) if one.name == f"credit-00{n}") for n in (1, 2)
        )
        with pytest.raises(RunError, match=r"critics-001\.safetensors, .* is not there"):
            group_stage._states_before(run, ["critics"], second)
        file = run.paths.trajectories("explore-001")
        empty = [replace(one, turns=()) for one in read_trajectories(file)]
        file.unlink()
        with TrajectoryStore(file) as store:
            for one in empty:
                store.append(one)

        assert group_stage._states_before(run, ["critics"], first) == {}
        assert group_stage._states_before(run, ["critics"], second) == {}


def test_in_python_critics_begin_and_learn_from_what_is_given(tiny_folder):
    """Of trajectories in memory, by the model's name."""
    learned = critics_of(KEPT, ARCHER().needs[0], open_reader(str(tiny_folder)))

    found = weights_of(EPISODES, "archer", model=str(tiny_folder))

    assert all(not one.any() for one, each in zip(found, EPISODES, strict=True) if each not in KEPT)
    found = [one for one, each in zip(found, EPISODES, strict=True) if each in KEPT]
    for one, expected in zip(found, ARCHER()(KEPT, critics=learned.critiques), strict=True):
        assert_close(one, expected, atol=1e-12, rtol=0)
    assert any(one.abs().max() > 1e-3 for one in found)
    with pytest.raises(
        ConfigError, match="model is missing, and credit ArCHer reads the policy that acted; give model="
    ):
        weights_of(EPISODES, "archer")


def test_the_order_of_episodes_changes_no_critique(tiny_model, tokenizer):
    """Not in any bit; an episode without turns has none, and changes none; of none but such, nothing is learned."""
    empty = replace(EPISODES[0], turns=(), sample=7)
    first = critics_of(EPISODES, ARCHER().needs[0], open_reader(tiny_model, tokenizer))
    order = [empty, *EPISODES]
    random.Random(0).shuffle(order)

    found = critics_of(order, ARCHER().needs[0], open_reader(tiny_model, tokenizer))
    nothing = critics_of([empty], ARCHER().needs[0], open_reader(tiny_model, tokenizer), first.critics)

    assert found.critiques[order.index(empty)].q == [[]]
    assert all(
        found.critiques[order.index(one)] == own for one, own in zip(EPISODES, first.critiques, strict=True)
    )
    assert nothing.critics is first.critics
    assert ARCHER()([empty], critics=nothing.critiques)[0].shape == (0,)


def test_a_stand_in_must_be_named(explored):
    """The policy that the loop began with is not there; the base may judge."""
    with pytest.raises(RunError, match=r"reads policy 'sft', and .* is not there; .* --reference base"):
        credit_run(explored, ["credit.name=archer"])

    (one,) = credit_run(explored, ["credit.name=archer"], reference="base", writes=False)["iterations"]
    assert one["td_error"] >= 0


def test_a_credit_of_ones_own_says_how_its_critics_learn(place):
    """The settings are asked for before any work, in its request."""

    class Own:
        needs = ("critics",)
        traits = CreditTraits()

        def __call__(self, group, *, critics, **_):
            return []

    with pytest.raises(ConfigError, match="needs 'critics' by its name alone, and Critics has"):
        weights_of(EPISODES, Own(), model="tiny")
