"""Runs side by side: compared task by task where the tasks are equal, marked or refused where they are not."""

import json
from dataclasses import asdict, replace

import pytest

from perturn.analysis import run_contents
from perturn.analysis.run_comparison import against_first, compare_runs, names_of, settings_that_differ
from perturn.analysis.run_contents import read_run
from perturn.analysis.run_summary import summary_of
from perturn.cli import main
from perturn.data.file_seals import read_manifest
from perturn.errors import RunError


@pytest.fixture
def two(make, tmp_path):
    """Two runs that are alike."""
    return [make.whole_run(tmp_path / name) for name in ("one", "other")]


def versus(folders):
    runs = [read_run(folder) for folder in folders]
    return against_first(runs, names_of(runs))[0]


def test_equal_task_lists_are_compared_task_by_task(two, make):
    """The other run's last policy scores 0.25 more on t3 and t4, and is alike on t1 and t2."""
    (two[1] / "evaluation" / "tlm-dre.jsonl").unlink()
    scores = {"t1": 1.0, "t2": 0.75, "t3": 1.0, "t4": 0.25}
    make.put(two[1] / "evaluation" / "tlm-dre.jsonl", [make.trajectory(*row) for row in scores.items()])

    found = versus(two)

    assert (found.row["n"], found.row["mean_difference"]) == (4, 0.125)
    assert (found.row["wins"], found.row["losses"], found.row["ties"]) == (2, 0, 2)
    assert (found.row["a"], found.row["b"]) == ("other / tlm-dre", "one / tlm-dre")
    assert (found.refused, found.differs) == ("", ())


def test_policies_of_one_run_are_compared_as_in_its_summary(two, make):
    """A score below zero of any policy says that no score is bounded."""
    file = two[0] / "evaluation" / "base.jsonl"
    file.unlink()
    make.put(file, [make.trajectory(f"t{n}", score) for n, score in enumerate((1.0, -0.5, 0.0, 0.25), 1)])
    summary = summary_of(read_run(two[0]))["comparison"]

    found = {(each.a, each.b): each.row for each in compare_runs(two[:1])}

    assert (summary["a"], summary["b"]) == ("tlm-dre", "sft")
    assert found[summary["a"], summary["b"]] == summary


PROTOCOL = {"name": "toy-protocol", "panel_sha256": "ab" * 32, "n": 4}


@pytest.mark.parametrize(
    ("changed", "refused", "differs"),
    [
        ({"seed": 5}, "", ()),
        ({"decoding": {"temperature": 1.0}}, "", ("decoding.temperature: –, 1.0",)),
        ({"panel_sha256": "cd" * 32}, "the tasks are not the same: task list differ.", ()),
        ({"environment": "toy-2", "n": 5}, "the tasks are not the same: environment, n differ.", ()),
        (None, "a protocol (evaluation/protocol.json) is missing", ()),
    ],
)
def test_other_protocols_are_refused_or_marked(two, make, changed, refused, differs):
    """Seeds may differ; decoding is marked; other tasks, or nothing that says which, are refused."""
    file = two[1] / "evaluation" / "protocol.json"
    file.unlink()
    if changed is not None:
        make.put_json(file, PROTOCOL | changed)

    found = versus(two)
    page = make.page_of(*two)

    assert found.refused.startswith(refused)
    assert bool(found.refused) == bool(refused)
    assert found.differs == differs
    assert (found.row is None) == bool(refused)
    assert ("are not compared" in page.text) == bool(refused)
    assert ("Not like for like." in page.text) == bool(differs)


def test_a_comparison_names_a_run():
    with pytest.raises(RunError, match="no run is named; give the folder of a run before any settings"):
        compare_runs([])


def test_a_run_without_evaluation_is_not_compared(two):
    for file in (two[1] / "evaluation").glob("*.jsonl"):
        file.unlink()

    assert versus(two).refused == "other has no evaluation."


def test_what_differs_between_the_recipes_is_shown(two, make):
    (two[1] / "recipe.yaml").write_text("name: toy\nloss:\n  name: tlm-dre\n  pivot: 0.5\n", encoding="utf-8")

    assert "recipe.loss.pivot 0.85 0.5" in make.page_of(*two).text
    assert settings_that_differ([{"a": "1", "b": "2"}, {"a": "1"}]) == [("b", ["2", "–"])]


def test_folders_of_one_name_are_told_apart(make, tmp_path):
    runs = []
    for place in ("x", "y", "z"):
        (tmp_path / place).mkdir()
        runs.append(read_run(make.whole_run(tmp_path / place / "run")))

    assert names_of(runs) == ["run", "run-2", "run-3"]
    assert names_of([replace(runs[0]), runs[0]]) == ["run", "run-2"]


def test_the_policies_of_one_run_are_compared_with_each_other(two):
    """The last is tlm-dre against sft, +0.5, +0.25, -0.25 and 0: as in the run's own summary."""
    found = compare_runs(two[:1])

    assert [(each.a, each.b) for each in found] == [("sft", "base"), ("tlm-dre", "base"), ("tlm-dre", "sft")]
    assert found[-1].row["mean_difference"] == 0.125
    assert (found[-1].row["wins"], found[-1].row["losses"], found[-1].row["ties"]) == (2, 1, 1)


def test_a_run_is_compared_with_others_alone(two):
    """However its folder is spelled; a file is no folder."""
    with pytest.raises(RunError, match="is named twice; name each run once"):
        compare_runs([two[0], two[1], two[0] / ".." / "one"])
    with pytest.raises(RunError, match=r"recipe\.yaml' is no folder"):
        compare_runs([two[0] / "recipe.yaml"])


def test_a_comparison_needs_two_scores(two):
    """One run with one policy."""
    for policy in ("base", "tlm-dre"):
        (two[0] / "evaluation" / f"{policy}.jsonl").unlink()

    with pytest.raises(RunError, match="has scores of 1 policies; a comparison needs two"):
        compare_runs(two[:1])


@pytest.mark.parametrize("seeds", [2, 3])
def test_runs_of_several_seeds_are_compared_in_the_terminal(make, tmp_path, monkeypatch, capsys, seeds):
    """Each further run with the first; JSON has the same numbers, and one of other tasks is refused with code 1."""
    folders = [make.whole_run(tmp_path / f"seed-{seed}") for seed in range(seeds)]
    for seed, folder in enumerate(folders):
        make.put_json(folder / "evaluation" / "protocol.json", PROTOCOL | {"seed": seed})

    def compare(*words):
        monkeypatch.setattr("sys.argv", ["perturn", "compare", *map(str, folders), *words])
        try:
            main()
        except SystemExit as end:
            return end.code or 0, capsys.readouterr().out
        raise AssertionError("a command ends the process")

    (code, said), (again, rows) = compare(), compare("--json")

    assert (code, again) == (0, 0)
    assert said.count("is not distinguishable from seed-0 / tlm-dre") == seeds - 1
    assert ("no p-value is adjusted" in said) == (seeds > 2)
    assert json.loads(rows) == json.loads(json.dumps([asdict(each) for each in compare_runs(folders)]))
    make.put_json(folders[-1] / "evaluation" / "protocol.json", PROTOCOL | {"n": 5})
    code, said = compare()
    assert code == 1
    assert f"seed-{seeds - 1} / tlm-dre and seed-0 / tlm-dre were not compared: the tasks are not" in said


def interrupt(run, make, **stamp):
    """Leave the evaluation of tlm-dre with three of its episodes."""
    file = run / "evaluation" / "tlm-dre.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
    stages = {"evaluate-sft": {"done": True}, "evaluate-tlm-dre": {"done": False}}
    make.manifest(run, stages=stages)
    make.put_json(run / "evaluation" / "protocol.json", PROTOCOL | stamp)


def test_an_unfinished_evaluation_is_left_out_and_noted(two, make):
    """Its first episodes are short and mostly solved. With `samples` 2, eight episodes of four tasks are asked for."""
    interrupt(two[1], make, samples=2)
    run = read_run(two[1])

    assert list(run.evaluation) == ["base", "sft"]
    assert run.compared is None
    assert summary_of(run)["unfinished"] == ["tlm-dre"]
    note = (
        "The evaluation of tlm-dre is not finished (3 of 8 episodes) and is left out of all numbers. "
        f"If no process works on it, `perturn run {two[1]}` goes on from there."
    )
    assert [each for each in run.notes if "evaluation" in each] == [note]
    assert versus(two).refused == f"other: {note}"
    refused = {(each.a, each.b): each.refused for each in compare_runs(two[1:])}
    assert refused == {("sft", "base"): "", ("tlm-dre", "base"): note, ("tlm-dre", "sft"): note}
    (two[1] / "evaluation" / "base.jsonl").unlink()
    with pytest.raises(RunError, match=r"a comparison needs two\. The evaluation of tlm-dre is not finished"):
        compare_runs(two[1:])


def test_runs_are_compared_although_an_earlier_evaluation_is_unfinished(two, make):
    make.manifest(two[1], stages={"evaluate-base": {"done": False}})

    assert read_run(two[1]).unfinished.keys() == {"base"}
    assert versus(two).row["n"] == 4


def test_an_evaluation_that_begins_while_a_run_is_read_is_left_out(two, make, monkeypatch):
    """Its first episode is written after the manifest, which lacks its stage, was read."""

    def read_and_begin(path):
        found = read_manifest(path)
        make.put(path / "evaluation" / "late.jsonl", [make.trajectory("t1", 1.0)])
        return found

    monkeypatch.setattr(run_contents, "read_manifest", read_and_begin)

    assert list(read_run(two[0]).evaluation) == ["base", "sft", "tlm-dre"]


def test_side_by_side_shows_the_first_run_on_the_left(two, make):
    """The verdict is the further run minus the first run, and the page shows right minus left."""
    assert make.page_of(*two).piece("index")["compare"][0] == [
        "one/evaluation/tlm-dre",
        "other/evaluation/tlm-dre",
    ]
