"""Objects of a file, one at a time, with the line that each begins at."""

import json

import pytest

from perturn.envs.json_rows import read_rows
from perturn.errors import DataError
from perturn.formats import json_stream

ROWS = [{"a": 1, "text": 'x ] } \\ " [ {'}, {"b": [{"c": "é"}, []]}, {}]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (json.dumps(ROWS), [1, 1, 1]),
        (json.dumps(ROWS, indent=1), [2, 6, 14]),
        ("\n".join(map(json.dumps, ROWS)), [1, 2, 3]),
        ("\n\n".join(map(json.dumps, ROWS)) + "\n\n", [1, 3, 5]),
        ("\ufeff" + json.dumps(ROWS), [1, 1, 1]),
    ],
)
def test_arrays_and_lines(tmp_path, monkeypatch, text, lines, chunk):
    """Both forms, however the reads fall."""
    monkeypatch.setattr(json_stream, "_CHUNK", chunk)
    file = tmp_path / "rows.json"
    file.write_text(text)

    found = list(read_rows(file))

    assert found == [(f"{file}:{line}", row) for line, row in zip(lines, ROWS, strict=True)]


@pytest.mark.parametrize("text", ["", "[]", " [ ] \n"])
def test_no_rows(tmp_path, text):
    """Is no error here."""
    file = tmp_path / "rows.json"
    file.write_text(text)

    assert list(read_rows(file)) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}\n{"a": \n', "rows.json:2: expected JSON, got"),
        ('[\n{"a": 1},\n{"a": 2}', "rows.json:3: the array does not end: the file was cut short"),
        ('[\n{"a": 1},\n7]', "rows.json:3: expected a JSON object, got 7 (int)"),
        ("title\ttext\n", "rows.json:1: expected a JSON object, got 'title"),
        ("title\ttext\na\tb\n", "rows.json:1: this is TSV"),
        ('{"a": 1}]', "rows.json:1: expected JSON, got"),
        ('[{"a": 1}, {"a": }]', "rows.json:1: the object that begins here is not valid JSON"),
    ],
)
def test_what_is_no_row_is_named_with_its_line(tmp_path, text, message):
    """Also where a file was cut short."""
    file = tmp_path / "rows.json"
    file.write_text(text)

    with pytest.raises(DataError) as raised:
        list(read_rows(file))

    assert message in str(raised.value)


def test_files_that_cannot_be_read(tmp_path):
    """Missing ones, and those that are not UTF-8."""
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')

    for name, says in {"none.json": " cannot be read", "latin.json": ":1: expected text in UTF-8"}.items():
        with pytest.raises(DataError, match=f"{name}{says}"):
            list(read_rows(tmp_path / name))


def test_half_a_character_in_a_row_is_mended_with_a_warning(tmp_path, caplog):
    """With its line; whole pairs are left alone, and so is what only looks like a half."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": "\\ud83d\\ude00 \\\\ud83d"}\n{"b\\udc00": ["x \\ud83d"]}\n')

    assert [row for _, row in read_rows(file)] == [{"a": "\U0001f600 \\ud83d"}, {"b\ufffd": ["x \ufffd"]}]
    assert [record.getMessage() for record in caplog.records] == [
        f"{file}:2: half a surrogate pair is read as U+FFFD; the text was cut in a character."
    ]


def test_a_bomb_of_brackets_is_named_with_its_line(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text('{"a": ' + "[" * 100_000)

    with pytest.raises(DataError, match=r"rows\.json:1: expected JSON, got .* \(it is nested too deeply\)"):
        list(read_rows(file))
