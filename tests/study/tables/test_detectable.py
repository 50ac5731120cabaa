"""Studies that could detect no difference, or whose differences have no spread."""

import json

import numpy as np
import pytest

from perturn.study.tables.study_page import write_study_page
from perturn.study.tables.verdict_text import sentences
from perturn.study.tables.verdicts import summarize
from study.recorded_studies import by_task, small


def toy(summary):
    return summary["environments"]["toy"]


@pytest.mark.parametrize(
    ("seeds", "tasks", "size"), [(3, 5, "few tasks"), (2, 100, "two seeds"), (3, 100, "a number")]
)
def test_a_study_that_could_detect_nothing_names_no_detectable_difference(tmp_path, seeds, tasks, size):
    """The least p-value over 5 tasks is 2/2^5, and two seeds give none."""
    generator = np.random.default_rng(0)
    played = {
        method: {seed: by_task(*generator.integers(0, 2, tasks).tolist()) for seed in range(seeds)}
        for method in ("sft", "rft")
    }
    small(tmp_path, played)

    row = toy(summarize(tmp_path))["methods"][1]["success"]["against"]

    assert (row["smallest_difference"] is not None) == (size == "a number")
    said = "with so few seeds or tasks, the size of a detectable difference is unknown"
    assert (said in sentences("rft", row)[0]) == (size != "a number")


def test_equal_differences_are_not_equal_results(tmp_path):
    """All episodes differ, by as much, so that their spread is unknown."""
    small(tmp_path, {"sft": {0: by_task(*[0] * 5)}, "rft": {0: by_task(*[1] * 5)}})

    said = sentences("rft", toy(summarize(tmp_path))["methods"][1]["success"]["against"])

    assert "equal results" not in said[0]
    assert "of which 100.0" in said[1]


def test_the_page_shows_a_seed_without_an_interval(tmp_path):
    """The seed's rewards have no bounds, and all of its differences are equal."""
    alike = {seed: by_task(1, 0, 1) for seed in range(3)}
    small(tmp_path, {"sft": alike, "rft": alike}, measure=lambda method, task: float(task[-1]) * 100)

    write_study_page(tmp_path)

    row = toy(json.loads((tmp_path / "summary.json").read_text()))["methods"][1]["score"]["against"]
    assert row["by_seed"][0]["interval"] == [None, None]
