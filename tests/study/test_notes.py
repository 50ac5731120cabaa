"""Notes of a study: reasons to read its verdicts with care."""

from dataclasses import replace
from types import SimpleNamespace

from perturn.study import study_files
from perturn.study.tables.study_page import write_study_page
from perturn.study.tables.verdicts import _on_ends, summarize
from study.recorded_studies import make, write
from support.pretended import episode


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

    said = "dpo: 7 of 420 test episodes failed in the environment or the engine. Each counts as unsolved."
    assert said in found["notes"]
    assert not any("failed" in note for note in before["notes"])
    assert [row["failed"] for row in found["methods"]] == [0, 7]
    assert found["methods"] == [before["methods"][0], before["methods"][1] | {"failed": 7}]


def test_episodes_that_do_not_say_whether_they_failed_are_named(tmp_path):
    settings, cells, rows = make(tmp_path, methods=("sft", "dpo"))
    del next(row for row in rows if row["panel"] == "test")["failed"]
    write(tmp_path, settings, cells, rows)

    assert any(
        note.startswith("episodes.parquet does not say which episodes failed") for note in notes(tmp_path)
    )


def test_a_row_says_whether_its_episode_failed(monkeypatch):
    monkeypatch.setattr(
        study_files, "outcomes", lambda cell, task_list: [replace(episode(False), failed=True)]
    )
    cell = SimpleNamespace(environment="toy", method="dpo", point={}, seed=0)

    assert [row["failed"] for row in study_files.episode_rows(cell, "test")] == [True]


def test_methods_that_are_not_there_yet_are_corrected_for(tmp_path):
    """Of four methods of the study file one has a score: its q is four times its p, as it is beside the others."""
    settings, cells, rows = make(tmp_path, methods=("sft", "dpo"))
    alone = summarize(tmp_path)["environments"]["alfworld"]
    waiting = {name: {} for name in ("base", "sft", "dpo", "online", "rft", "nat")}
    write(tmp_path, settings | {"methods": waiting}, cells, rows)

    found = summarize(tmp_path)["environments"]["alfworld"]

    row, before = (each["methods"][1]["success"]["against"] for each in (found, alone))
    assert (alone["comparisons"]["others"], found["comparisons"]["others"]) == (1, 4)
    assert row["p_value"] == before["corrected"]
    assert row["corrected"] == min(1.0, 4 * row["p_value"])
    assert row["smallest_difference"] == before["smallest_difference"]


def test_a_page_of_two_measures_says_that_each_is_a_family(tmp_path):
    settings, cells, rows = make(tmp_path, methods=("sft", "dpo"))
    one = write_study_page(tmp_path).read_text(encoding="utf-8")
    write(tmp_path, settings, cells, [row | {"score": row["score"] / 2} for row in rows])

    both = write_study_page(tmp_path).read_text(encoding="utf-8")

    assert "q is the Benjamini-Hochberg q-value over 1 comparison." in one
    assert "q is the Benjamini-Hochberg q-value over 1 comparison, each measure by itself." in both


def test_a_point_that_was_chosen_on_tested_seeds_is_named(tmp_path):
    """Points of dpo were tried on seeds 0 and 1; sft has none to choose from, and other seeds do not lean."""
    settings, cells, rows = make(tmp_path, methods=("sft", "dpo"))
    said = [note for note in notes(tmp_path) if note.startswith("The best of")]
    moved = [row | {"seed": row["seed"] + 7} if row["panel"] == "test" else row for row in rows]
    write(tmp_path, settings, cells, moved)

    assert len(said) == 1
    assert said[0].startswith("The best of 3 settings was chosen on seeds 0, 1, which are also test seeds. ")
    assert not any(note.startswith("The best of") for note in notes(tmp_path))


def test_a_learning_rate_at_an_end_of_its_sweep_is_named(tmp_path):
    """Of 1e-6, 1e-5 and 1e-4, each method is tested at one end, or in the middle, which gets no note."""
    chosen = {"dpo": 1e-6, "tlm-dre": 1e-4, "online": 1e-5}
    settings, cells, rows = make(tmp_path, methods=("sft", *chosen))
    for row in cells:
        if row["panel"] == "test" and row["method"] in chosen:
            row["point"] = dict.fromkeys(row["point"], chosen[row["method"]])
    write(tmp_path, settings, cells, rows)

    assert [note for note in notes(tmp_path) if "learning rates" in note] == [
        "The lowest of the learning rates tried was chosen for dpo. The best rate may be lower.",
        "The highest of the learning rates tried was chosen for tlm-dre. The best rate may be higher.",
    ]


def test_rates_of_two_sections_are_two_sweeps():
    """The rate of the alignment is at its top, which is below a rate of SFT, and SFT's rate is in its middle."""
    tried = [(1e-5, 1e-6, False), (4e-5, 5e-6, False), (2e-5, 1e-5, True)]
    tuning = [
        {"method": "dpo", "point": {"sft.learning_rate": sft, "align.learning_rate": align}, "chosen": chosen}
        for sft, align, chosen in tried
    ]

    assert list(_on_ends(tuning)) == [
        "The highest of the learning rates tried was chosen for dpo. The best rate may be higher."
    ]


def test_a_learning_rate_that_was_not_swept_is_at_no_end(tmp_path):
    settings, cells, rows = make(tmp_path, methods=("sft", "dpo"))
    only = {"align.learning_rate": 1e-6}
    kept = [row | {"point": only} if row["method"] == "dpo" else row for row in cells]
    write(
        tmp_path,
        settings,
        kept,
        [row | {"point": row["point"] and "align.learning_rate=1e-06"} for row in rows],
    )

    tuning = summarize(tmp_path)["environments"]["alfworld"]["tuning"]
    assert [row["chosen"] for row in tuning if row["point"]] == [True]
    assert not any("learning rates" in note for note in notes(tmp_path))
