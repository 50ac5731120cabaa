"""Sources that need an optional library: where it is missing, the message says what to install."""

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from perturn.errors import ConfigError
from perturn.formats import hub_and_parquet
from perturn.formats.read_rows import open_rows, read_rows

ROWS = [{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}]
INSTALL = '; run: pip install "perturn[datasets]"'


def write(file):
    """The rows in a file whose name says how."""
    table = pa.Table.from_pylist(ROWS)
    if file.suffix == ".parquet":
        pq.write_table(table, file)
    elif file.suffix == ".arrow":
        with pa.ipc.new_file(str(file), table.schema) as opened:
            opened.write_table(table)
    else:
        packing = {".zst": "zstd", ".lz4": "lz4"}[file.suffix]
        with pa.output_stream(str(file), compression=packing) as packed:
            packed.write(f"{json.dumps(ROWS[0])}\n".encode())


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.jsonl.zst", "rows.jsonl.lz4"])
def test_without_pyarrow_a_file_that_needs_it_says_what_to_install(tmp_path, monkeypatch, name):
    """The extra `datasets` brings it, since a first run reads no such file."""
    file = tmp_path / name
    write(file)
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(ConfigError) as raised:
        list(read_rows(file))

    assert str(raised.value).startswith(f"{file} is ")
    assert str(raised.value).endswith(f"needs pyarrow{INSTALL}")


def test_without_datasets_the_hub_is_not_asked(tmp_path, monkeypatch):
    """A misspelt path may look like a name of the Hub, so the message says that there is no such file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    hub_and_parquet.hub_rows.cache_clear()

    with pytest.raises(ConfigError) as raised:
        open_rows("owner/name:train")

    says = "owner/name:train is not a file or folder here, and reading it from the Hub needs datasets"
    assert str(raised.value) == f"{says}{INSTALL}"


def test_without_datasets_columns_of_its_type_json_say_what_to_install(tmp_path, monkeypatch):
    """Their values are text in the file, which only `datasets` decodes."""
    features = {"info": {"features": {"messages": {"_type": "Json"}}}}
    table = pa.Table.from_pylist([{"messages": json.dumps(ROWS[0]["messages"])}])
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(features)}), tmp_path / "rows")
    monkeypatch.setitem(sys.modules, "datasets", None)

    with pytest.raises(ConfigError) as raised:
        list(read_rows(tmp_path / "rows"))

    says = f"{tmp_path / 'rows'} has columns of the type Json, which needs datasets"
    assert str(raised.value) == f"{says}{INSTALL}"
