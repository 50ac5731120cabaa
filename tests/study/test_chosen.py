"""Methods of a study whose scores are chosen by what their runs have explored, or by what they were trained from."""

import json
from pathlib import Path

import pytest

from perturn.data.run_paths import RunPaths
from perturn.errors import ConfigError
from perturn.study.cell_processes import do_cell
from perturn.study.cell_results import is_done
from perturn.study.cells import Plan
from perturn.study.settings import read_study
from perturn.study.stage_sharing import Sharing, identities
from perturn.study.tables.study_records import protocols_of

from .corridor import make_place

METHODS = """
methods:
  sampled: &sampled {align: null, evaluate.sampling: &one {temperature: 1.0, max_new_tokens: 4}}
  value: {<<: *sampled, evaluate.select: {name: value, samples: 3}}
  rerank-value: {<<: *sampled, evaluate.select: {name: value, among: actions, samples: 2}}
  few: {<<: *sampled, evaluate.select: {name: value, samples: 3}, explore.samples: 1}
  implicit: {evaluate.sampling: *one, evaluate.select: {name: implicit-reward, samples: 3}}
tune: null
sweep: {}
"""


@pytest.fixture
def plan(tmp_path, tiny_folder, monkeypatch):
    """The plan of a small study with such methods."""
    make_place(tmp_path, tiny_folder)
    file = tmp_path / "study.yaml"
    kept = [
        line
        for line in file.read_text().splitlines()
        if not line.startswith(("methods", "  ", "sweep", "tune"))
    ]
    file.write_text("\n".join(kept) + METHODS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return Plan(*read_study(Path("study.yaml")))


def cell(plan, method, seed=0):
    return plan.cell("perturn_corridor-Corridor", method, {}, seed)


def note(run, manifest):
    (run / "manifest.json").write_text(json.dumps(manifest))


def test_a_method_without_an_alignment_explores_where_its_score_learns_from_that(plan):
    """And the same as an aligned one, so that it is made once; what nothing reads is not explored."""
    found = {name: cell(plan, name) for name in plan.study.methods}
    made = {name: identities(each.recipe) for name, each in found.items()}

    assert found["sampled"].stages == ["expert", "sft"]
    assert found["value"].stages == found["rerank-value"].stages == ["expert", "sft", "explore"]
    assert [each.policy for each in found.values()] == ["base", "sft", "sft", "sft", "sft", "sft", "tlm-dre"]
    assert made["value"] == made["rerank-value"]
    assert made["value"].items() <= made["implicit"].items()
    assert made["value"]["explore"] != made["few"]["explore"]
    assert made["value"]["sft"] == made["sampled"]["sft"] == made["few"]["sft"]


@pytest.mark.parametrize(
    "method", ["{align: null, explore.samples: 9}", "{align: null, rows.threshold: 0.1}"]
)
def test_what_no_score_reads_is_still_refused_without_an_alignment(plan, method):
    with pytest.raises(ConfigError, match="belongs to the alignment, and `align` is null"):
        Plan(*read_study(Path("study.yaml"), [f"methods.odd={method}"]))


@pytest.mark.slow
def test_cells_share_and_are_scored_by_what_their_runs_made(plan):
    """SFT and exploration are made once; each score says of which run's files it was chosen."""
    sharing, cells = Sharing(), {name: cell(plan, name) for name in ("value", "rerank-value", "implicit")}
    for each in cells.values():
        sharing.add(each)

    for each in cells.values():
        do_cell(each, sharing.sources(each), True)

    assert all(is_done(each, "test") for each in cells.values())
    stamps = {name: json.loads(RunPaths(each.scored).stamp.read_text()) for name, each in cells.items()}
    seals = json.loads((cells["value"].folder / "manifest.json").read_text())["files"]
    assert stamps["value"]["maker"] == stamps["rerank-value"]["maker"]
    assert stamps["value"]["maker"]["explored_sha256"] == seals["trajectories/explore.jsonl"]["sha256"]
    assert (stamps["implicit"]["maker"]["policy"], stamps["implicit"]["maker"]["start"]) == ("tlm-dre", "sft")
    for name in ("rerank-value", "implicit"):
        stages = json.loads((cells[name].folder / "manifest.json").read_text())["stages"]
        assert {stage for stage, one in stages.items() if "taken_from" in one} >= {"sft", "explore"}
    row = {"environment": "e", "method": "value", "panel": "test", "state": "done"}
    runs = [
        str(each.relative_to(plan.study.folder)) for each in (cells["value"].folder, cells["value"].scored)
    ]
    kept = protocols_of(plan.study.folder, [{**row, "runs": runs}])["e"]["value"]
    assert kept["select"] == {"name": "value", "among": "episodes", "samples": 3}
    assert kept.keys().isdisjoint({"maker", "seed"})


@pytest.mark.parametrize(
    ("method", "file"), [("value", "explore.jsonl"), ("implicit", "sft/model.safetensors")]
)
def test_a_score_is_made_again_once_what_chose_it_is_another(plan, method, file):
    """The policy that is scored being the same; a score that was stopped goes so too, and does not mix both."""
    one = cell(plan, method)
    do_cell(one, {}, True)
    noted = one.scored / "scored.json"
    before = json.loads(noted.read_text())
    assert any(name.endswith(file) for name in before)
    noted.write_text(json.dumps({name: "x" if name.endswith(file) else sha for name, sha in before.items()}))
    manifest = json.loads((one.scored / "manifest.json").read_text())
    manifest["stages"]["evaluate-base"]["done"] = False
    note(one.scored, manifest)

    assert not is_done(one, "test")
    do_cell(one, {}, True)

    assert is_done(one, "test")
    assert json.loads(noted.read_text()) == before
