"""Folders of studies that are damaged: refused by the file and the place."""

import pytest

from perturn.errors import RunError
from perturn.study.tables.episode_table import EPISODES, read_episodes, write_episodes
from perturn.study.tables.verdicts import summarize
from study.recorded_studies import by_task, small, write


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("cells.json", "[{}]", "cells.json: [0].environment: expected a value, got none"),
        ("cells.json", "{}", "cells.json: expected a list"),
        ("episodes.parquet", "nonsense", "episodes.parquet is not a readable Parquet file"),
        ("study.yaml", "a: [", "study.yaml is not YAML"),
    ],
)
def test_a_malformed_file_is_refused_by_its_place(tmp_path, file, text, said):
    small(tmp_path, {"sft": {0: by_task(1)}})
    (tmp_path / file).write_text(text, encoding="utf-8")

    with pytest.raises(RunError) as caught:
        summarize(tmp_path)
    assert said in str(caught.value)


def test_a_number_that_is_none_is_refused(tmp_path):
    cells, rows = small(tmp_path, {"sft": {0: by_task(1)}})
    write(tmp_path, {}, cells, [rows[0] | {"score": float("nan")}])

    with pytest.raises(RunError, match="score"):
        summarize(tmp_path)


def test_rows_of_episodes_come_back_as_they_were_written(tmp_path):
    """A key that a row lacks is absent again; every other value keeps its type."""
    _, (row,) = small(tmp_path, {"sft": {0: by_task(1)}})
    without = {name: value for name, value in row.items() if name != "failed"}
    write_episodes(tmp_path / EPISODES, [row, without | {"score": 0.1 + 0.2}])

    assert read_episodes(tmp_path / EPISODES) == [row, without | {"score": 0.1 + 0.2}]


def test_a_row_without_a_value_is_refused_by_its_number(tmp_path):
    cells, (row,) = small(tmp_path, {"sft": {0: by_task(1)}})
    write(tmp_path, {}, cells, [row, row | {"task": None}])

    with pytest.raises(RunError, match=r"episodes\.parquet: \[1\]\.task: expected"):
        summarize(tmp_path)


def test_a_folder_without_a_study_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"holds no study\.yaml"):
        summarize(tmp_path)
