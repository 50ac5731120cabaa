"""A study's policies, scored on another task list: nothing is trained or tuned again."""

import json
import shutil
from pathlib import Path

import pytest

from perturn.config.parsing import to_yaml
from perturn.data.run_paths import RunPaths
from perturn.errors import ConfigError
from perturn.io.atomic_write import write_whole
from perturn.study.cells import Plan
from perturn.study.rescore import Again, open_plan
from perturn.study.run_study import open_study, run_study
from perturn.study.tables.episode_table import EPISODES, read_episodes

from .corridor import RECIPE, STUDY, make_place

FIRST, SECOND = Path("study.yaml"), Path("again.yaml")
AGAIN = """
name: again
again: whole
output: studies
test: {tasks: {split: other, per_kind: 1}, sampling: {temperature: 1.0, max_new_tokens: 3}}
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A place with a study file of each kind; nothing was done there."""
    (tmp_path / "corridor.yaml").write_text(RECIPE)
    (tmp_path / FIRST).write_text(STUDY)
    (tmp_path / SECOND).write_text(AGAIN)
    monkeypatch.chdir(tmp_path)


def record(state="done", leave_out=""):
    """What the first study leaves, as far as a study again reads it: each loss did best at its last rate."""
    plan = open_plan(FIRST)
    rows = [
        {
            "environment": environment,
            "method": method,
            "point": points[-1],
            "seed": 0,
            "panel": "test",
            "state": state,
        }
        for (environment, method), points in plan.points.items()
        if method != leave_out
    ]
    for (environment, method), points in plan.points.items():
        for cell in plan.testing(environment, method, points[-1]):
            notes = {stage: {"done": True} for stage in cell.stages}
            write_whole(RunPaths(cell.folder).manifest, json.dumps({"stages": notes, "files": {}}))
            RunPaths(cell.folder).checkpoint(cell.policy).mkdir(parents=True)
    write_whole(plan.study.folder / "cells.json", json.dumps(rows))
    write_whole(plan.study.folder / "study.yaml", to_yaml(plan.study))
    return plan


def refusal(*words):
    with pytest.raises(ConfigError) as caught:
        open_plan(SECOND, words)
    return str(caught.value)


def test_a_file_without_again_is_an_ordinary_study(place):
    assert isinstance(open_plan(FIRST), Plan)


def test_its_cells_are_those_of_the_other_study_but_for_the_score(place):
    first = record()

    found = open_plan(SECOND)

    assert isinstance(found, Again)
    assert list(found.tuning()) == []
    (environment, method), (point,) = list(found.points.items())[-1]
    assert (method, point) == ("tlm-dre", {"align.learning_rate": 0.01})
    for seed, cell in zip([0, 1], found.testing(environment, method, point), strict=True):
        theirs = first.cell(environment, method, point, seed)
        assert cell.folder == theirs.folder
        assert cell.scored.parent == Path("studies/again/runs")
        assert cell.scored.name != theirs.scored.name
        scoring = cell.scoring_recipe("tiny")
        assert (scoring.evaluate.tasks.split, scoring.evaluate.sampling.temperature) == ("other", 1.0)
        assert theirs.scoring_recipe("tiny").evaluate.sampling.temperature == 0.0


def test_the_same_task_list_decoded_otherwise_is_another_score(place):
    record()
    words = "test={tasks: {split: test, per_kind: 2}, sampling: {temperature: 0.5, max_new_tokens: 4}}"

    names = {
        next(iter(plan.testing("perturn_corridor-Corridor", "sft", {}))).scored.name
        for plan in (open_plan(FIRST), open_plan(SECOND), open_plan(SECOND, [words]))
    }

    assert len(names) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["again=wole"], "there is no study 'wole' in studies. Did you mean 'whole'?"),
        (["name=whole"], "again names the study itself, 'whole'"),
        (["name=a/b"], "name must name a folder, got 'a/b'"),
        (["methods={dpo: {}}"], "unknown key 'methods'"),
        (["seeds=[0]"], "unknown key 'seeds'"),
    ],
)
def test_what_is_refused(place, words, said):
    record()

    assert said in refusal(*words)


def test_a_study_that_is_not_finished_is_refused(place):
    record(state="to do")

    assert "study 'whole' is not finished: base seed 0 is to do" in refusal()


def test_a_study_without_a_result_of_a_method_is_refused(place):
    record(leave_out="dpo")

    assert "study 'whole' has no result of perturn_corridor-Corridor dpo" in refusal()


def test_a_recipe_that_has_changed_is_refused(place):
    """Its policies would be trained anew, in the other study's folder."""
    record()
    Path("corridor.yaml").write_text(RECIPE.replace("epochs: 2", "epochs: 3"))

    assert "does not hold the policy of perturn_corridor-Corridor sft seed 0" in refusal()


def test_a_policy_that_was_removed_is_refused(place):
    plan = record()
    cell = next(plan.testing("perturn_corridor-Corridor", "tlm-dre", {"align.learning_rate": 0.01}))
    RunPaths(cell.folder).checkpoint(cell.policy).rmdir()

    said = refusal()
    assert "does not hold the policy of perturn_corridor-Corridor tlm-dre" in said
    assert "or the run or files of it were removed" in said


def test_it_decodes_as_the_recipe_says_and_not_as_the_other_test(place):
    Path("study.yaml").write_text(
        STUDY.replace("per_kind: 2}}", "per_kind: 2}, sampling: {temperature: 0.7}}")
    )
    record()

    plan = open_plan(SECOND, ["test={tasks: {split: other, per_kind: 1}}"])

    cell = plan.cell("perturn_corridor-Corridor", "sft", {}, 0)
    assert cell.scoring_recipe("tiny").evaluate.sampling.max_new_tokens == 4
    assert cell.scoring_recipe("tiny").evaluate.sampling.temperature == 0.0


def test_a_study_again_has_no_policies_of_its_own(place):
    record()
    shutil.copytree("studies/whole", "studies/second")
    text = Path("studies/second/study.yaml").read_text()
    Path("studies/second/study.yaml").write_text(text.replace("again: null", "again: whole"))

    assert "has no policies of its own; name 'whole'" in refusal("again=second")


@pytest.mark.slow
def test_nothing_but_scores_is_made(tmp_path, tiny_folder, monkeypatch):
    make_place(tmp_path, tiny_folder)
    (tmp_path / SECOND).write_text(AGAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [
        "seeds=[0]",
        "sweep={}",
        "tune=null",
        "test.tasks.per_kind=1",
        "methods={dpo: {align.loss: {name: dpo}}}",
    ]
    run_study(open_study(FIRST, words), workers=1)
    before = {file: file.stat().st_mtime_ns for file in Path("studies/whole").rglob("*.safetensors")}

    run_study(open_study(SECOND), workers=1)

    assert before == {file: file.stat().st_mtime_ns for file in before}
    assert len(list(Path("studies/again/runs").glob("*-test-*"))) == 3
    assert not list(Path("studies/again/runs").rglob("*.safetensors"))
    rows = read_episodes(Path("studies/again") / EPISODES)
    assert {(row["method"], row["panel"], row["task"].split("-")[0]) for row in rows} == {
        (method, "test", "other") for method in ("base", "sft", "dpo")
    }

    for study in ("whole", "again"):  # whose rows are left
        shutil.rmtree(f"studies/{study}/runs")
    left = (Path("studies/again") / EPISODES).read_bytes()
    run_study(open_study(SECOND), workers=1)

    assert (Path("studies/again") / EPISODES).read_bytes() == left
    assert not list(Path("studies").glob("*/runs/*"))
