"""Alignment on single episodes by how they ended: RFT and its kin, whole runs of a tiny policy."""

import json

import pytest
from safetensors.torch import load_file
from tests.small import small
from torch.testing import assert_close

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.config.sections import HeldOutTasks
from perturn.config.stages import stages
from perturn.data.store import read_records, read_trajectories
from perturn.errors import ConfigError, RunError
from perturn.rows import kto_rows
from perturn.run.execute import check, open_run, run_stages
from perturn.run.stages.row_stage import check_made
from perturn.study import settings as study_settings
from perturn.study.cells import Plan
from perturn.study.settings import Study
from perturn.types import WeightedTrajectory, succeeded

WORDS = ["evaluate=null", "sft.save_steps=99", "align.save_steps=99", "align.learning_rate=1.0e-2"]
"""Settings over the recipe of a small world, for runs that nothing interrupts."""
KTO = ["rows.name=kto", "align.loss={name: kto}"]
RFT = ["rows.name=rft", "align.loss={name: sft}"]


@pytest.fixture
def run(place, monkeypatch):
    """Do a run of the recipe with some words, in this process; its folder."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("PERTURN_CACHE", str(place / "cache"))

    def do(name, *words):
        with open_run("tiny.yaml", [f"name={name}", *WORDS, *words]) as opened:
            run_stages(opened)
        return place / "runs" / name

    return do


def rows_of(folder):
    return list(read_records(folder / "outcomes.jsonl", WeightedTrajectory))


@pytest.mark.slow
def test_rft_trains_the_base_anew_on_what_sft_was_taught_and_own_successes(run):
    folder = run("rft", *RFT)
    noted = json.loads((folder / "manifest.json").read_text())["stages"]
    explored = list(read_trajectories(folder / "trajectories/explore.jsonl"))
    rows = rows_of(folder)

    counts = noted["outcomes"]["counts"]
    assert list(noted) == ["expert", "sft", "explore", "outcomes", "align"]
    assert counts["taught"] == noted["sft"]["counts"]["examples"] == 8
    assert sum(counts[fate] for fate in ("failed", "no_turns", "repeated", "success", "failure")) == len(
        explored
    )
    assert counts["rows"] == len(rows) == noted["align"]["counts"]["examples"] == 8 + counts["success"]
    assert all(succeeded(row.trajectory) for row in rows)
    assert {row.trajectory.policy.partition("@")[0] for row in rows} <= {"expert", "sft"}
    assert (folder / "checkpoints/rft/config.json").is_file()


@pytest.mark.slow
def test_rft_without_own_successes_is_sft_again(run):
    """From the same weights, on the same rows, with the same settings: the policy of SFT."""
    same = ["align.epochs=4", "align.batch_size=4", "explore.sampling.max_new_tokens=1"]
    folder = run("again", *RFT, *same)

    assert json.loads((folder / "manifest.json").read_text())["stages"]["outcomes"]["counts"]["success"] == 0
    sft, rft = (load_file(folder / f"checkpoints/{name}/model.safetensors") for name in ("sft", "rft"))
    assert_close(rft, sft, rtol=0, atol=0)


@pytest.mark.slow
def test_kto_goes_on_from_the_policy_that_explored_with_its_failures(run):
    """Two iterations, each from the policy before; the second explores with the first's."""
    folder = run("kto", *KTO, "iterations=2", "explore.per_iteration=3")
    noted = json.loads((folder / "manifest.json").read_text())["stages"]

    for mark in ("-001", "-002"):
        rows = list(read_records(folder / f"outcomes{mark}.jsonl", WeightedTrajectory))
        counts = noted[f"outcomes{mark}"]["counts"]
        assert sum(row.weight[0] < 0 for row in rows) == counts["failure"] > 0
        assert all(succeeded(row.trajectory) == (row.weight[0] > 0) for row in rows)
        logged = [
            json.loads(line) for line in (folder / f"metrics/align{mark}.jsonl").read_text().splitlines()
        ]
        assert all(entry["kl"] >= 0 for entry in logged)
    explored = list(read_trajectories(folder / "trajectories/explore-002.jsonl"))
    assert {one.policy.partition("@")[0] for one in explored} == {"kto-001"}


@pytest.mark.slow
@pytest.mark.parametrize("says", ["none is a failure", "none is a success", "all are of one task"])
def test_kto_has_nothing_to_learn_from_one_label_or_one_task(run, monkeypatch, says):
    """An iteration of several leaves the policy as it is; a loop that is done once ends before it trains."""
    monkeypatch.setattr(kto_rows, "lacking", lambda divided: says)
    folder = run("stays", *KTO, "iterations=2", "explore.per_iteration=3")
    noted = json.loads((folder / "manifest.json").read_text())["stages"]

    for mark in ("-001", "-002"):
        assert noted[f"outcomes{mark}"]["counts"]["rows"] == noted[f"align{mark}"]["counts"]["examples"] == 0
    sft, last = (load_file(folder / f"checkpoints/{name}/model.safetensors") for name in ("sft", "kto-002"))
    assert_close(last, sft, rtol=0, atol=0)
    with pytest.raises(RunError, match=f"explored trajectories and the expert's, {says}"):
        run("once", *KTO)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nat", "coh"])
def test_a_policy_that_was_told_how_episodes_end_is_asked_for_success(run, name):
    """In its prompts alone; what each policy was asked stands in its episodes and beside the scores."""
    scored = "evaluate={tasks: {split: test, per_kind: 1}, sampling: {max_new_tokens: 6}}"
    texts = ["rows.success=Well.", "rows.failure=Badly.", scored]
    folder = run(name, f"rows.name={name}", "align.loss={name: sft}", *texts)
    posed = {
        policy: {one.turns[0].observation_text.partition("\n")[2] for one in read_trajectories(file)}
        for policy in ("base", "sft", name)
        for file in [folder / f"evaluation/{policy}.jsonl"]
    }
    rows = rows_of(folder)
    first = [row.trajectory.turns[0].observation_text.partition("\n")[2] for row in rows]
    suffixes = [
        {turn.observation_text.partition("\n")[2] for turn in row.trajectory.turns} - {""} for row in rows
    ]

    assert posed == {"base": {""}, "sft": {""}, name: {"Well."}}
    assert json.loads((folder / "evaluation/protocol.json").read_text())["told"] == {name: "Well."}
    assert set(first) == {"Well.", "Badly."}
    counts = json.loads((folder / "manifest.json").read_text())["stages"]["outcomes"]["counts"]
    assert first.count("Badly.") == counts["failure"]
    chained = sum(len(found) == 2 for found in suffixes)
    assert chained == (counts["failure"] if name == "coh" else 0)


def recipe(**changes):
    return parse(Recipe, small(**changes))


def test_the_stages_of_outcomes():
    found = stages(recipe(rows={"name": "rft"}, align={"loss": {"name": "sft"}}, evaluate=None))

    assert [(stage.name, stage.command, stage.needs, stage.start) for stage in found] == [
        ("expert", "collect", (), ""),
        ("sft", "train", ("expert",), "base"),
        ("explore", "collect", ("sft",), ""),
        ("outcomes", "pair", ("explore", "expert"), ""),
        ("align", "train", ("outcomes",), "base"),
    ]
    assert found[-1].policy == "rft"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"rows": {"name": "rft"}},
            "align.loss.name must be a loss on single trajectories (sft), got 'tlm-dre'",
        ),
        ({"rows": {"name": "kto"}}, "must be a loss on labelled trajectories (kto), got 'tlm-dre'"),
        (
            {"rows": {"name": "rft"}, "align": {"loss": {"name": "kto"}}},
            "such a loss goes into align, with rows.name one of kto.",
        ),
        ({"align": {"loss": {"name": "sft"}}}, "with rows.name one of rft, coh, nat, oec, or into sft."),
    ],
)
def test_a_loss_on_other_rows_is_refused_before_work(changes, says):
    with pytest.raises(ConfigError, match=r"align\.loss\.name") as caught:
        check(recipe(**changes))

    assert says in str(caught.value)


def test_two_episodes_are_not_put_into_a_history_that_is_cut():
    with pytest.raises(
        ConfigError,
        match=r"protocol\.history must be full, since rows.name=coh puts two episodes into one conversation, got 2",
    ):
        check_made(recipe(rows={"name": "coh"}, protocol={"name": "scienceworld-eto", "history": 2}))


def test_takeovers_by_confidence_are_refused_before_work_where_nothing_says_it():
    """An API gives no log-probabilities; at random the expert takes over there too."""
    given = {
        "align": {"loss": {"name": "sft"}},
        "engine": {"name": "api", "base_url": "http://127.0.0.1:9/v1"},
    }
    with pytest.raises(ConfigError, match=r"rows\.name=oec reads .* engine 'api' does not give"):
        check_made(recipe(rows={"name": "oec", "takeover": "confidence"}, **given))

    check_made(recipe(rows={"name": "oec"}, **given))
    check_made(recipe(rows={"name": "oec", "takeover": "confidence"}, align=given["align"]))


def test_a_study_scores_a_policy_that_was_told_with_what_it_was_told():
    """The run that scores has no outcomes, but the suffix; of other methods it has none."""
    study = Study(
        name="s",
        recipe="r",
        methods={
            "nat": {"rows": {"name": "nat", "success": "Well."}, "align.loss": {"name": "sft"}},
            "rft": {"rows": {"name": "rft"}, "align.loss": {"name": "sft"}},
        },
        test=study_settings.Test(HeldOutTasks()),
        environments={"e": {}},
    )
    plan = Plan(study, small())
    scored = {name: plan.cell("e", name, {}, 0).scoring_recipe("m") for name in study.methods}

    assert {name: one.protocol.suffix for name, one in scored.items()} == {"nat": "Well.", "rft": None}
    assert all(one.rows is None for one in scored.values())
