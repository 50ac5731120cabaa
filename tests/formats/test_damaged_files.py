"""Files of rows that are damaged or incomplete, and folders that would be read in part."""

import gzip
import json
import zlib

import pytest

from perturn.audit import audit
from perturn.data.records import trajectory_to_dict
from perturn.errors import DataError
from perturn.formats.read_rows import open_rows, read_rows
from perturn.types import Action, Task, Trajectory, Turn

TURNS = (Turn(({"role": "user", "content": "u"},), Action("a")),)
TORN = '{"version": 1, "tas'


def line(name):
    return json.dumps(trajectory_to_dict(Trajectory(Task(name), TURNS))) + "\n"


def test_the_files_after_a_torn_one_are_read(tmp_path, caplog):
    """Each part of an interrupted write loses its last line alone."""
    (tmp_path / "1.jsonl").write_text(line("a") + TORN)
    (tmp_path / "2.jsonl").write_text(line("b") + TORN)
    (tmp_path / "3.jsonl").write_text(line("c"))

    assert [row.task.id for row in read_rows(tmp_path)] == ["a", "b", "c"]
    assert "1.jsonl:2: dropped the last line" in caplog.text
    assert "2.jsonl:2: dropped the last line" in caplog.text


def test_the_audit_and_the_trainer_drop_a_torn_line_too(tmp_path, tiny_folder, make_trainer, caplog):
    """As a recipe does; a torn line after another row stays an error."""
    file = tmp_path / "rows.jsonl"
    file.write_text(line("a") + TORN)

    part = audit(file, str(tiny_folder))["parts"]["rows"]

    assert (part["rows"], part["usable"]) == (1, 1)
    assert len(make_trainer(str(file), loss="sft").train_dataset) == 1
    assert caplog.text.count("rows.jsonl:2: dropped the last line") == 2
    file.write_text('{"prompt": "u", "completion": "a"}\n' + TORN)
    with pytest.raises(DataError, match="line 2: row: expected JSON"):
        make_trainer(str(file), loss="sft")


@pytest.mark.parametrize("rows", [0, 1000])
def test_a_damaged_gzip_file_is_named(tmp_path, rows):
    """No block of gzip begins with these bits, which zlib tells in an error of its own."""
    packer = zlib.compressobj(wbits=31)
    head = packer.compress(line("a").encode() * rows) + packer.flush(zlib.Z_FULL_FLUSH)
    (tmp_path / "rows.gz").write_bytes(head + b"\xff" * 40)

    with pytest.raises(DataError, match=r"rows\.gz cannot be read"):
        list(open_rows(tmp_path / "rows.gz").read())


def test_rows_in_files_and_in_a_subfolder_are_rejected(tmp_path):
    """A subfolder without rows does not matter, nor do a cache, a lock, a folder named like rows, and deeper files."""
    (tmp_path / "1.jsonl").write_text(line("a"))
    (tmp_path / "plots" / "deep").mkdir(parents=True)
    for name in ("a.svg", "dataset_infos.json", "config.json", ".a.jsonl", "a.jsonl.lock", "deep/a.jsonl"):
        (tmp_path / "plots" / name).write_text("{}")
    (tmp_path / "plots" / "a.parquet").mkdir()
    assert len(list(read_rows(tmp_path))) == 1

    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "2.jsonl.gz").write_bytes(gzip.compress(line("b").encode()))

    with pytest.raises(DataError, match=r"holds files of rows, and so does its folder more\. Put all files"):
        list(read_rows(tmp_path))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"version": 1, "task": "t1", "turns": []}, r"a\.jsonl:1: task: "),
        (
            {"task": "t1", "turns": [{"observation": [], "action": {"text": "a"}}]},
            r"got task, turns\. Rename",
        ),
    ],
)
def test_a_damaged_trajectory_is_not_taken_for_a_list_of_rows(tmp_path, row, said):
    """`turns` holds turns, which the command for a list of rows would tear apart."""
    (tmp_path / "a.jsonl").write_text(json.dumps(row))

    with pytest.raises(DataError, match=said):
        list(read_rows(tmp_path / "a.jsonl"))


def test_two_imports_of_logs_in_one_folder_say_how_to_keep_both(tmp_path):
    """Each import numbers the samples of a task from 0. A copy of a row is to be deleted."""
    first = trajectory_to_dict(Trajectory(Task("a"), TURNS, environment="log-conversations"))
    for number, reward in enumerate((0.0, 0.5, 0.0)):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(first | {"total_reward": reward}) + "\n")

    with pytest.raises(DataError) as refused:
        list(read_rows(tmp_path))

    assert "perturn import-logs A B" in str(refused.value)
    assert str(refused.value).count("delete one of the two") == 1


def test_an_environment_may_begin_like_an_import(tmp_path):
    first = trajectory_to_dict(Trajectory(Task("a"), TURNS, environment="log-analysis"))
    lines = [json.dumps(first | {"total_reward": reward}) + "\n" for reward in (0.0, 0.5)]
    (tmp_path / "a.jsonl").write_text("".join(lines))

    with pytest.raises(DataError, match=r"line 1; number the episodes .* in the key `sample`: 0, 1, \.\.\."):
        list(read_rows(tmp_path / "a.jsonl"))
