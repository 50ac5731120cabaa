"""Notes of a study: reasons to read its verdicts with care."""

from dataclasses import replace
from types import SimpleNamespace

from perturn.study import files
from perturn.study.verdicts import summarize
from study.recorded_studies import make, write
from study.test_board import episode


def notes(folder):
    """Notes of the one environment."""
    return summarize(folder)["environments"]["alfworld"]["notes"]


def test_failed_episodes_are_counted_and_stay_in(tmp_path):
    """Seven losses of dpo were failures: the numbers stay, and a note says how many."""
    settings, cells, rows = make(tmp_path, methods=("sft", "dpo"))
    before = summarize(tmp_path)["environments"]["alfworld"]
    lost = [row for row in rows if (row["method"], row["panel"], row["success"]) == ("dpo", "test", False)]
    for row in lost[:7]:
        row["failed"] = True
    write(tmp_path, settings, cells, rows)

    found = summarize(tmp_path)["environments"]["alfworld"]

    said = "dpo: 7 of 420 test episodes failed in the environment or the engine; each counts as no success."
    assert said in found["notes"]
    assert not any("failed" in note for note in before["notes"])
    assert [row["failed"] for row in found["methods"]] == [0, 7]
    assert found["methods"] == [before["methods"][0], before["methods"][1] | {"failed": 7}]


def test_episodes_that_do_not_say_whether_they_failed_are_named(tmp_path):
    settings, cells, rows = make(tmp_path, methods=("sft", "dpo"))
    del next(row for row in rows if row["panel"] == "test")["failed"]
    write(tmp_path, settings, cells, rows)

    assert any(
        note.startswith("episodes.jsonl does not say which episodes failed") for note in notes(tmp_path)
    )


def test_a_row_says_whether_its_episode_failed(monkeypatch):
    monkeypatch.setattr(files, "outcomes", lambda cell, panel: [replace(episode(False), failed=True)])
    cell = SimpleNamespace(environment="toy", method="dpo", point={}, seed=0)

    assert [row["failed"] for row in files.episode_rows(cell, "test")] == [True]
