"""Recognise files that hold no training rows, and say how to get rows from them."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROWS = "Give JSON lines, a JSON array or Parquet"
_CONVERT = f"{_ROWS} instead."
_PANDAS = "Convert it: pandas.{}(...).to_json('rows.jsonl', orient='records', lines=True)."
_UTF_16 = "text in UTF-16", "Convert it: iconv -f UTF-16 -t UTF-8 FILE > rows.jsonl."
_STARTS: tuple[tuple[bytes, tuple[str, str]], ...] = (
    (b"PK", ("a zip archive", "Unpack it, and give the file of rows.")),
    (b"\xff\xfe", _UTF_16),
    (b"\xfe\xff", _UTF_16),
    (
        b"version https://git-lfs",
        ("a pointer of Git LFS, not the file itself", "Fetch the file: git lfs pull."),
    ),
)
"""First bytes of a file, with its format and the remedy."""
_MARKUP = re.compile(rb"<!doctype html|<html|<\?xml", re.IGNORECASE)
_DELIMITERS = {",": "CSV", "\t": "TSV, a table with tabs", ";": "CSV with semicolons"}
_SHOWN = 12


def what_bytes(head: bytes) -> str | None:
    """Return the format and the remedy of a file that is neither JSON nor Arrow; None if it may be text.

    Args:
        head: First bytes of the file, after decompression.
    """
    for start, (what, remedy) in _STARTS:
        if head.startswith(start):
            return f"this is {what}. {remedy}"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return f"this is a pickle, which can run any code as it is read. Load it yourself. {_CONVERT}"
    if b"\0" in head:
        return f"this is binary data. {_CONVERT}"
    if _MARKUP.match(head.lstrip()):
        return "this is a web page or XML, perhaps in place of a download that failed. Get the file again."
    return None


def what_text(text: str, name: str) -> str:
    """Return the format and the remedy of a text that begins with no JSON object or array.

    Args:
        text: First lines of the file.
        name: Name of the file.
    """
    lines = [line for line in text.splitlines() if line.strip()][:2]
    fields = {each: [len(row) for row in csv.reader(lines, delimiter=each)] for each in _DELIMITERS}
    delimiter = max(fields, key=lambda each: min(fields[each], default=0))
    is_table = len(lines) == 2 and fields[delimiter][0] == fields[delimiter][-1] > 1
    if is_table or name.endswith((".csv", ".tsv")):
        separator = "" if delimiter == "," else f", sep={delimiter!r}"
        return f"this is {_DELIMITERS[delimiter]}. {_PANDAS.format('read_csv').replace('...', f'FILE{separator}')}"
    shown = lines[0][:40] if lines else ""
    return f"expected a JSON object, got {shown!r}: this is text, not JSON. {_ROWS}."


def what_wrapper(row: Mapping[str, Any]) -> str | None:
    """Say which key of an object holds the rows; return None unless exactly one key holds a list of objects."""
    lists = [
        key
        for key, value in row.items()
        if isinstance(value, list) and value and all(map(_may_be_row, value))
    ]
    if len(lists) != 1:
        return None
    return (
        f"the rows may be in its key {lists[0]!r}. Write them alone: jq -c '.{lists[0]}[]' FILE > rows.jsonl."
    )


def _may_be_row(value: Any) -> bool:
    """Return whether a value may be a row: an object that is no message and no turn."""
    return isinstance(value, Mapping) and not {"role", "from", "observation", "action"} & value.keys()


def keys_of(row: Mapping[str, Any]) -> str:
    """Return the keys of an object whose values are not None, as text for a message."""
    keys = [str(key)[:60] for key, value in row.items() if value is not None]
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"{', '.join(keys[:_SHOWN])}{more}" if keys else "no keys"


def what_folder(folder: Path) -> str | None:
    """Return why a folder holds no rows, and the remedy; None if it may hold rows."""
    if any((folder / f"{name}.json").is_file() for name in ("config", "tokenizer_config", "adapter_config")):
        return "this is the folder of a model or tokenizer. Give a file of rows; `--model` names the model."
    return None
