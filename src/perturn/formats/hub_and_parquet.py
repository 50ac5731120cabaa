"""Read rows from Parquet and Arrow files, and from data sets of the Hugging Face Hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from perturn.errors import DataError, did_you_mean
from perturn.formats.json_stream import Record
from perturn.io.plain_data import named_error
from perturn.table import locate, require_library

_BATCH = 256
"""Number of rows that are converted to Python objects at a time."""
_JSON = "Json"
"""Name of the type of `datasets` whose values are stored as JSON text."""


def read_columns(file: Path, shape: str) -> Iterator[Record]:
    """Yield the rows of a Parquet or Arrow file.

    Args:
        file: The file.
        shape: `Parquet`, `Arrow` or `Arrow stream`.

    Raises:
        ConfigError: If pyarrow is not installed, or if the file needs `datasets` and it is not installed.
        DataError: If the file is damaged.
    """
    require_library("pyarrow", f"{file} is {shape}, which", "datasets")
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
    """Return a function that converts a row to plain data. It parses columns of the type `Json` of `datasets`."""
    noted = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = noted.get("info", {}).get("features") or {}
    encoded = [name for name, feature in features.items() if f'"{_JSON}"' in json.dumps(feature)]
    if not encoded:
        return lambda row: row
    require_library("datasets", f"{file} has columns of the type {_JSON}, which", "datasets")
    kind = locate("datasets:Features")
    known = kind.from_arrow_schema(schema)
    decoded = kind({name: known[name] for name in encoded})
    return lambda row: {**row, **decoded.decode_example({name: row[name] for name in encoded})}


_NAME = re.compile(
    r"(?:hf:/{1,2}(?:datasets/)?)?"
    r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?"
    r"(?::(?:(?P<config>[\w.-]+):)?(?P<split>[\w.-]+))?"
)
_FILE = re.compile(
    r".*\.(jsonl?|ndjson|parquet|arrow|feather|gz|bz2|xz|zst|lz4|csv|tsv|txt|ya?ml|zip|pkl|pt)", re.I
)
_FORM = "owner/name, owner/name:split, owner/name:config:split, or with a revision owner/name@revision:split"


class HubName(NamedTuple):
    """The name of a data set of the Hub."""

    id: str
    revision: str | None
    config: str | None
    split: str | None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return ":".join(each for each in (f"{self.id}{revision}", self.config, self.split) if each)


def hub_name(text: str) -> HubName | None:
    """Parse the name of a data set of the Hub. Return None for other texts, and for paths in an existing folder."""
    found = _NAME.fullmatch(text)
    if found is None or _FILE.fullmatch(text) or os.path.isdir(found["id"].partition("/")[0]):
        return None
    return HubName(found["id"], found["revision"], found["config"], found["split"])


@cache
def hub_rows(name: HubName) -> tuple[Iterable[dict[str, Any]], tuple[Path, ...]]:
    """Return the rows of a data set, and the cached files that hold them. A process loads each data set once.

    Raises:
        ConfigError: If `datasets` is not installed.
        DataError: If the data set cannot be loaded, or has several configurations or splits and the name chooses none.
    """
    require_library(
        "datasets", f"{name} is not a file or folder here, and reading it from the Hub", "datasets"
    )
    try:
        found = locate("datasets:load_dataset")(name.id, name.config, revision=name.revision)
    except Exception as error:  # library code that may raise any error
        raise DataError(
            f"{name}: there is no such file or folder, and the Hub gave no data set of that name: "
            f"{named_error(error)}. Correct the path, or name {_FORM}. Without a network, "
            "download the data set where there is one, and give its files."
        ) from error
    splits = dict(found)
    if name.split is not None and name.split not in splits:
        raise DataError(f"{name}: no split {name.split!r}.{did_you_mean(name.split, splits)}")
    if name.split is None and len(splits) != 1:
        example = name._replace(config=name.config, split=next(iter(splits), "train"))
        raise DataError(f"{name} has the splits {', '.join(splits)}. Name one, such as {example}.")
    rows = splits[name.split] if name.split is not None else next(iter(splits.values()))
    return rows, tuple(Path(each["filename"]) for each in rows.cache_files)
