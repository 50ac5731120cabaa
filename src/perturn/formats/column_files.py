"""Rows of files that hold columns: Parquet and Arrow, a record batch in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from perturn.errors import DataError
from perturn.formats.json_stream import Record
from perturn.table import locate, require

_BATCH = 256
"""Rows that are made Python's at a time."""
_JSON = "Json"
"""Type of `datasets` whose values are JSON text in the file."""


def read_columns(file: Path, shape: str) -> Iterator[Record]:
    """Yield the rows of a Parquet or Arrow file.

    Args:
        file: The file.
        shape: `Parquet`, `Arrow` or `Arrow stream`.

    Raises:
        ConfigError: If pyarrow is not installed, or `datasets`, where the file needs it too.
        DataError: If the file is damaged.
    """
    require("pyarrow", f"{file} is {shape}, which", "datasets")
    number = 0
    try:
        for batch in _OPENED[shape](file):
            decode = _decoder(batch.schema, file)
            for start in range(0, batch.num_rows, _BATCH):
                for row in batch.slice(start, _BATCH).to_pylist(maps_as_pydicts="lossy"):
                    number += 1
                    yield Record(number, f"{file}: row {number}", str(number), decode(row))
    except (OSError, ValueError, locate("pyarrow:ArrowException")) as error:
        raise DataError(
            f"{file} is {shape}, and cannot be read after row {number}: {error}. Get the file again."
        ) from error


def _of_parquet(file: Path) -> Iterator[Any]:
    with locate("pyarrow.parquet:ParquetFile")(file) as opened:
        yield from opened.iter_batches(batch_size=_BATCH)


def _of_arrow(file: Path) -> Iterator[Any]:
    with (
        locate("pyarrow:memory_map")(str(file)) as mapped,
        locate("pyarrow.ipc:open_file")(mapped) as opened,
    ):
        for index in range(opened.num_record_batches):
            yield opened.get_batch(index)


def _of_stream(file: Path) -> Iterator[Any]:
    with (
        locate("pyarrow:memory_map")(str(file)) as mapped,
        locate("pyarrow.ipc:open_stream")(mapped) as opened,
    ):
        yield from opened


_OPENED = {"Parquet": _of_parquet, "Arrow": _of_arrow, "Arrow stream": _of_stream}


def _decoder(schema: Any, file: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that makes a row plain: values of the type Json of `datasets` are text in the file."""
    noted = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = noted.get("info", {}).get("features") or {}
    encoded = [name for name, feature in features.items() if f'"{_JSON}"' in json.dumps(feature)]
    if not encoded:
        return lambda row: row
    require("datasets", f"{file} has columns of the type {_JSON}, which", "datasets")
    kind = locate("datasets:Features")
    known = kind.from_arrow_schema(schema)
    decoded = kind({name: known[name] for name in encoded})
    return lambda row: {**row, **decoded.decode_example({name: row[name] for name in encoded})}
