"""Sources of rows: what each file, folder and name is recognised as, and how what holds no rows is named."""

import bz2
import gzip
import json
import lzma
import pickle
import tarfile
import zipfile

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from perturn.data.store import write_records
from perturn.errors import DataError, PerturnError
from perturn.formats import hub_and_parquet
from perturn.formats.read_rows import Tally, open_rows, read_each, read_rows, rows_of
from perturn.types import Action, PreferencePair, Task, Trajectory, Turn, WeightedTrajectory

ROWS = [
    {"messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": f"answer {n}"}]}
    for n in range(3)
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
OBJECTS = "JSON objects one after the other"


def answers(data):
    """Recognised as, and the answers."""
    source = open_rows(data)
    return source.shape, [row.turns[0].action.text for _, row in read_each(source)]


def zstandard(data, packing="zstd"):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, packing) as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


TEXTS = {
    "lines": ("JSON lines", LINES),
    "no last newline": ("JSON lines", LINES.rstrip()),
    "blank lines": ("JSON lines", "\n \n" + LINES.replace("\n", "\n\n") + "\n\t\n"),
    "byte order mark": ("JSON lines", "\ufeff" + LINES),
    "line ends of Windows": ("JSON lines", LINES.replace("\n", "\r\n")),
    "separators of Unicode": ("JSON lines", LINES.replace("é", "\u2028 \x85")),
    "array": ("a JSON array", json.dumps(ROWS)),
    "pretty array": ("a JSON array", json.dumps(ROWS, indent=2) + "\n"),
    "array with a byte order mark": ("a JSON array", "\ufeff\n" + json.dumps(ROWS, indent=2)),
    "array of lines": ("a JSON array", "[\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]"),
    "pretty objects": (OBJECTS, "\n".join(json.dumps(row, indent=2) for row in ROWS)),
    "line ends of old Macs": (OBJECTS, LINES.replace("\n", "\r")),
    "a message in a line": (
        OBJECTS,
        "\n".join(json.dumps(row).replace("[{", "[\n{").replace("}]", "}\n]") for row in ROWS),
    ),
}


@pytest.mark.parametrize(("shape", "text"), TEXTS.values(), ids=TEXTS.keys())
def test_json_of_every_layout(tmp_path, shape, text):
    """The name of the file says nothing."""
    file = tmp_path / "rows"
    file.write_bytes(text.encode())

    assert answers(file) == (shape, ["answer 0", "answer 1", "answer 2"])


PACKED = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "Zstandard": zstandard,
    "LZ4": lambda data: zstandard(data, "lz4"),
}


@pytest.mark.parametrize(("packing", "pack"), PACKED.items(), ids=PACKED.keys())
def test_packed_lines_and_arrays(tmp_path, packing, pack):
    """Also of several frames; and what was cut short is said to be."""
    file = tmp_path / "rows"
    half = len(LINES.encode()) // 2
    file.write_bytes(pack(LINES.encode()[:half]) + pack(LINES.encode()[half:]))
    array = tmp_path / "array"
    array.write_bytes(pack(json.dumps(ROWS, indent=1).encode()))
    cut = tmp_path / "cut"
    cut.write_bytes(pack(LINES.encode() * 400)[:-9])

    assert answers(file) == (f"JSON lines, {packing}", ["answer 0", "answer 1", "answer 2"])
    assert answers(array)[0] == f"a JSON array, {packing}"
    with pytest.raises(DataError, match="cut cannot be read"):
        answers(cut)


def test_columns_are_read_a_batch_at_a_time(tmp_path, monkeypatch):
    """Parquet, and both forms of Arrow; nulls that Arrow filled in are no keys."""
    monkeypatch.setattr(hub_and_parquet, "_BATCH", 2)
    rows = [row | {"tools": None if n else "[]"} for n, row in enumerate(ROWS)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "parquet")
    for name, writer in (("Arrow", pa.ipc.new_file), ("Arrow stream", pa.ipc.new_stream)):
        with writer(str(tmp_path / name), table.schema) as opened:
            opened.write_table(table)
    (tmp_path / "cut").write_bytes((tmp_path / "parquet").read_bytes()[:-40])

    for name, shape in (("parquet", "Parquet"), ("Arrow", "Arrow"), ("Arrow stream", "Arrow stream")):
        assert answers(tmp_path / name) == (shape, ["answer 0", "answer 1", "answer 2"])
    with pytest.raises(DataError, match="cut is Parquet, and cannot be read after row 0"):
        answers(tmp_path / "cut")


def test_values_of_type_json_are_data(tmp_path):
    """`datasets` keeps them as text; a null within stays."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"a": [1, None]}}}]
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    features = datasets.Features({"messages": datasets.Json()})
    datasets.Dataset.from_dict({"messages": [messages]}, features=features).to_parquet(tmp_path / "rows")

    (row,) = read_rows(tmp_path / "rows")

    assert row.turns[0].action.tool_calls[0]["function"]["name"] == "f"


def test_folders_of_datasets_and_of_files(tmp_path):
    """What lies beside the rows does not matter; rows are numbered through."""
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "saved", num_shards=2)
    datasets.DatasetDict({"train": data}).save_to_disk(tmp_path / "dict")
    folder = tmp_path / "files" / "data"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("Rows.")
    (folder / ".hidden").write_text("no")
    for name in ("b", "a"):
        (folder / f"train-{name}.jsonl").write_text(LINES + "7\n")

    assert answers(tmp_path / "saved") == ("a `datasets` folder", ["answer 0", "answer 1", "answer 2"])
    assert answers(tmp_path / "dict") == ("a `datasets` folder", ["answer 0", "answer 1", "answer 2"])
    source = open_rows(tmp_path / "files")
    assert source.shape == "a folder of 2 files of JSON lines"
    assert [record.label for record, _ in read_each(source)][3:5] == [
        "4 (train-a.jsonl, line 4)",
        "5 (train-b.jsonl, line 1)",
    ]
    with pytest.raises(
        DataError, match=r"row 4 \(train-a.jsonl, line 4\), 8 \(train-b.jsonl, line 4\): expected"
    ):
        list(read_rows(tmp_path / "files"))


def test_folders_of_several_meanings_are_refused(tmp_path):
    """Each says which there are."""
    data = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "dict")
    for folder, names in (("splits", ("train.jsonl", "test.jsonl")), ("kinds", ("a.jsonl", "b.json"))):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(LINES if name.endswith("l") else json.dumps(ROWS))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "none").mkdir()

    for folder, says in {
        "dict": "with the splits test, train. Give one of them, such as .*dict/test",
        "splits": r"holds files of several splits \(test, train\)",
        "kinds": "holds files of several kinds .*JSON lines; a JSON array.*the same rows twice",
        "model": "this is the folder of a model",
        "none": "holds no file of rows",
    }.items():
        with pytest.raises(DataError, match=says):
            open_rows(tmp_path / folder)


def archive(kind, tmp_path):
    """A file of one row in an archive."""
    (tmp_path / "in.jsonl").write_text(LINES)
    file = tmp_path / "archive"
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as opened:
            opened.write(tmp_path / "in.jsonl")
    else:
        with tarfile.open(file, "w:gz") as opened:
            opened.add(tmp_path / "in.jsonl")
    return file.read_bytes()


UNREADABLE = {
    "this is a zip archive. Unpack it": lambda path: archive("zip", path),
    "this is a pickle": lambda _: pickle.dumps(ROWS),
    "this is CSV. Convert it": lambda _: b'prompt,completion\n"a, b",c\n',
    "this is TSV, a table with tabs": lambda _: b"prompt\tcompletion\na, b\tc\n",
    "this is text in UTF-16": lambda _: LINES.encode("utf-16"),
    "this is a web page": lambda _: b"\n<!DOCTYPE html>\n<html>",
    "this is a pointer of Git LFS": lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "this is Parquet within gzip": lambda _: gzip.compress(b"PAR1" + bytes(20)),
    "this is binary data": lambda _: bytes(range(7, 200)) + bytes(9),
    "this is text, not JSON": lambda _: b"Hello!\nHow are you?\n",
    ":1: expected a JSON object, got a list": lambda _: b'[{"role": "user"}]\n[{"role": "user"}]\n',
}


@pytest.mark.parametrize(("says", "made"), UNREADABLE.items(), ids=UNREADABLE.keys())
def test_what_holds_no_rows_is_named(tmp_path, says, made):
    file = tmp_path / "file"
    file.write_bytes(made(tmp_path))

    with pytest.raises(DataError) as raised:
        list(read_rows(file))

    assert says in str(raised.value)


def test_bad_rows_are_named_by_line_or_number(tmp_path):
    """All of them; those of an array by their number and line. Nothing is read after what is no JSON."""
    lines = tmp_path / "rows.jsonl"
    lines.write_bytes(b"no\n" + LINES.encode() + b'\n[1]\n{"a": "\xe9"}\n{"data": [{"messages": []}]}\n{"a')
    array = tmp_path / "rows.json"
    array.write_text(f'[{json.dumps(ROWS[0])},\n7,\n{{"messages": []}},\n{{"a": }},\n{json.dumps(ROWS[1])}]')

    refused = {
        file: [
            (record.label, str(row))
            for record, row in read_each(open_rows(file))
            if isinstance(row, DataError)
        ]
        for file in (lines, array)
    }

    assert [label for label, _ in refused[lines]] == ["1", "6", "7", "8", "9"]
    assert "The rows may be in its key 'data'" in refused[lines][3][1]
    assert [label for label, _ in refused[array]] == ["2 (line 2)", "3 (line 3)", "4 (line 4)"]
    with pytest.raises(
        DataError, match=r"rows\.jsonl: line 1: expected JSON, got 'no.* line 6: .* line 7: .* And 2 more"
    ):
        list(read_rows(lines))


def test_a_row_alone_is_named_by_its_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{LINES}\n7\n")

    with pytest.raises(DataError, match=r"rows\.jsonl:5: expected a JSON object, got 7 \(int\)"):
        list(read_rows(file))


@pytest.mark.parametrize("text", ["", "\n\n", "[]", "[ \n]\n"])
def test_nothing_is_no_rows(tmp_path, text):
    file = tmp_path / "rows"
    file.write_text(text)

    assert list(read_rows(file)) == []
    with pytest.raises(DataError, match="rows holds no row; give rows with chosen and rejected"):
        list(rows_of(file, PreferencePair))


def test_places_without_rows(tmp_path, monkeypatch):
    """A missing file is no name of the Hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()

    for place, says in {
        "rows.jsonl": "there is no such file or folder",
        "some/rows.jsonl": "there is no such file or folder",
        "data/rows": "there is no such file or folder",
        "https://example.org/rows.jsonl": "it is an address. Download",
        "/dev/null": "pipe or device",
    }.items():
        with pytest.raises(DataError, match=says):
            open_rows(place)


@pytest.fixture
def on_hub(monkeypatch):
    """Data sets that the Hub would give."""
    held = datasets.Dataset.from_list(ROWS)
    asked = []

    def load(name, config=None, *, revision=None):
        asked.append((name, config, revision))
        if name != "owner/name":
            raise ConnectionError("Couldn't reach the Hub")
        return datasets.DatasetDict(
            {"train": held, "test": held.select([2])} if config is None else {"all": held}
        )

    monkeypatch.setattr(datasets, "load_dataset", load)
    hub_and_parquet.hub_rows.cache_clear()
    yield asked
    hub_and_parquet.hub_rows.cache_clear()


def test_data_sets_of_the_hub(on_hub, tmp_path, monkeypatch):
    """By split, configuration and revision; asked once in a process."""
    monkeypatch.chdir(tmp_path)

    assert answers("owner/name:test") == ("a data set of the Hub", ["answer 2"])
    assert len(answers("owner/name@v1:small:all")[1]) == 3
    assert len(list(read_rows("owner/name:test"))) == 1
    assert on_hub == [("owner/name", None, None), ("owner/name", "small", "v1")]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("owner/name", "has the splits train, test. Name one, such as owner/name:train"),
        ("owner/name:tset", "no split 'tset'. Did you mean 'test'"),
        (
            "owner/other",
            "there is no such file or folder, and the Hub gave no data set of that name: ConnectionError",
        ),
    ],
)
def test_names_that_the_hub_does_not_know(on_hub, tmp_path, monkeypatch, name, says):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(DataError) as raised:
        open_rows(name)

    assert says in str(raised.value)


def test_trajectories_of_ours_come_from_any_source(tmp_path, caplog):
    """In an array as in lines; of lines a torn last one is dropped with a warning."""
    from perturn.data.records import trajectory_to_dict

    turns = (Turn(({"role": "user", "content": "u"},), Action("a")),)
    played = [Trajectory(Task(f"t/{n}"), turns) for n in range(2)]
    rows = [trajectory_to_dict(one) for one in played]
    (tmp_path / "array").write_text(json.dumps(rows, indent=1))
    (tmp_path / "torn").write_text("\n".join(map(json.dumps, rows)) + '\n{"version": 1, "tas')
    (tmp_path / "twice").write_text("\n\n".join(map(json.dumps, [*rows, rows[0]])))

    assert list(read_rows(tmp_path / "array")) == played
    assert list(read_rows(tmp_path / "torn")) == played
    assert "torn:3: dropped the last line" in caplog.text
    with pytest.raises(PerturnError, match="twice:5: has the task and sample of line 1"):
        list(read_rows(tmp_path / "twice"))


def test_the_shapes_of_rows_are_counted(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(LINES + '{"prompt": "u", "completion": "a"}\n{"text": "a"}\n')
    tally = Tally()
    list(read_each(open_rows(file), tally))

    assert tally.shapes == {
        "messages": 3,
        "prompt and completion as text": 1,
        "an answer without a question as text": 1,
    }


def test_rows_with_numbers_of_their_own_are_no_rows_of_a_recipe(tmp_path):
    """A label is for the loss kto, and weights are for the trainer."""
    turns = (Turn(({"role": "user", "content": "u"},), Action("a")),)
    (tmp_path / "labelled").write_text('{"prompt": "u", "completion": "a", "label": true}')
    write_records(tmp_path / "weighted", [WeightedTrajectory(Trajectory(Task("t"), turns), (0.5,))])

    for file, says in {"labelled": "label: unpaired preferences", "weighted": "got one with weights"}.items():
        with pytest.raises(DataError, match=f"{file}:1: .*{says}"):
            list(read_rows(tmp_path / file))
