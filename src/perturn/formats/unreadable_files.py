"""Names of the files that hold no rows of training, each with the way to rows, so that nobody sees a decoding error."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROWS = "Give JSON lines, a JSON array or Parquet"
_CONVERT = f"{_ROWS} instead."
_UNPACK = "Unpack it, and give the file of rows."
_WEIGHTS = "It holds weights. Give the file of rows that they are to learn from."
_PANDAS = "Convert it: pandas.{}(...).to_json('rows.jsonl', orient='records', lines=True)."

_STARTS: tuple[tuple[bytes, str, str], ...] = (
    (b"7z\xbc\xaf'\x1c", "a 7-Zip archive", _UNPACK),
    (b"Rar!\x1a\x07", "a RAR archive", _UNPACK),
    (b"\x89HDF\r\n\x1a\n", "HDF5", _CONVERT),
    (b"\x93NUMPY", "an array of NumPy", _CONVERT),
    (b"SQLite format 3\0", "an SQLite database", _CONVERT),
    (b"GGUF", "a model in GGUF", _WEIGHTS),
    (b"%PDF", "a PDF document", _CONVERT),
    (b"ORC", "ORC", _PANDAS.format("read_orc")),
    (b"Obj\x01", "Avro", _CONVERT),
    (b"FEA1", "Feather of version 1", _PANDAS.format("read_feather")),
    (b"\xd0\xcf\x11\xe0", "an Office document", _PANDAS.format("read_excel")),
    (b"\x89PNG", "an image", _CONVERT),
    (b"\xff\xd8\xff", "an image", _CONVERT),
    (b"\xff\xfe", "text in UTF-16", "Convert it: iconv -f UTF-16 -t UTF-8 FILE > rows.jsonl."),
    (b"\xfe\xff", "text in UTF-16", "Convert it: iconv -f UTF-16 -t UTF-8 FILE > rows.jsonl."),
    (
        b"version https://git-lfs",
        "a pointer of Git LFS, not the file itself",
        "Fetch the file: git lfs pull.",
    ),
    (b"#version:", "the merges of a tokenizer", "Give the file of rows."),
)
"""First bytes of a file, what it is, and what to do."""
_MARKUP = re.compile(rb"<!doctype html|<html|<\?xml", re.IGNORECASE)
_DELIMITERS = {",": "CSV", "\t": "TSV, a table with tabs", ";": "CSV with semicolons"}
_YAML = re.compile(r"(---|%YAML|- )?\s*[\w.-]+:(\s|$)")
_TOKENIZER = "Give the file of rows. `--model` names the folder of a tokenizer."
_OBJECTS: tuple[tuple[set[str], str, str], ...] = (
    ({"added_tokens", "model", "pre_tokenizer"}, "a tokenizer's file (tokenizer.json)", _TOKENIZER),
    ({"tokenizer_class"}, "the settings of a tokenizer (tokenizer_config.json)", _TOKENIZER),
    ({"model_type", "architectures"}, "the settings of a model (config.json)", "Give the file of rows."),
    ({"weight_map", "metadata"}, "the index of a model's weights", "Give the file of rows."),
    ({"_data_files", "_fingerprint"}, "the state of a `datasets` folder", "Give the folder itself."),
    ({"features", "splits"}, "the description of a data set", "Give the folder or the file of its rows."),
    ({"features", "citation"}, "the description of a data set", "Give the folder or the file of its rows."),
    ({"cells", "nbformat"}, "a Jupyter notebook", _CONVERT),
    ({"custom_id", "method", "body"}, "a file of requests of OpenAI's batch API", "Give rows with messages."),
    ({"custom_id", "response"}, "a file of answers of OpenAI's batch API", "Give rows with messages."),
)
"""Keys of an object, what holds such an object, and what to do."""
_SHOWN = 12


def what_bytes(head: bytes, name: str) -> str | None:
    """Return what a file is that is neither JSON nor columns of Arrow, and what to do; None if it may be text.

    Args:
        head: Its first bytes, unpacked.
        name: Its name.
    """
    for start, what, remedy in _STARTS:
        if head.startswith(start):
            return f"this is {what}. {remedy}"
    if head.startswith(b"PK\x03\x04") or head.startswith(b"PK\x05\x06"):
        return f"this is {_zip(head)}"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return f"this is a pickle, which can run any code as it is read. Load it yourself. {_CONVERT}"
    if head[257:262] == b"ustar":
        return f"this is a tar archive. {_UNPACK}"
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < 1 << 27:
        return f"this is a file of safetensors. {_WEIGHTS}"
    if b"\0" in head:
        what = "the model of a SentencePiece tokenizer" if name.endswith(".model") else "binary data"
        return f"this is {what}. {_CONVERT}"
    if _MARKUP.match(head.lstrip()):
        return "this is a web page or XML, perhaps in place of a download that failed. Get the file again."
    return None


def _zip(head: bytes) -> str:
    """Return what a zip archive is, and what to do."""
    if b"data.pkl" in head:
        return f"a file of torch.save, a zip archive with a pickle. {_CONVERT}"
    if b"[Content_Types].xml" in head or b"xl/" in head:
        return f"an Excel sheet. {_PANDAS.format('read_excel')}"
    if b".npy" in head:
        return f"a file of arrays of NumPy. {_CONVERT}"
    return f"a zip archive. {_UNPACK}"


def what_text(text: str, name: str) -> str:
    """Return what a text is that begins with no JSON object or array, and what to do.

    Args:
        text: Its first lines.
        name: Its name.
    """
    lines = [line for line in text.splitlines() if line.strip()][:2]
    fields = {each: [len(row) for row in csv.reader(lines, delimiter=each)] for each in _DELIMITERS}
    delimiter = max(fields, key=lambda each: min(fields[each], default=0))
    is_table = len(lines) == 2 and fields[delimiter][0] == fields[delimiter][-1] > 1
    if is_table or name.endswith((".csv", ".tsv")):
        separator = "" if delimiter == "," else f", sep={delimiter!r}"
        return f"this is {_DELIMITERS[delimiter]}. {_PANDAS.format('read_csv').replace('...', f'FILE{separator}')}"
    if name.endswith((".yaml", ".yml")) or _YAML.match(lines[0] if lines else ""):
        return f"this is YAML. {_CONVERT}"
    shown = lines[0][:40] if lines else ""
    return f"expected a JSON object, got {shown!r}: this is text that is no JSON. {_ROWS}."


def what_object(row: Mapping[str, Any]) -> str | None:
    """Return what a file is whose first object is no row, and what to do; None if the object may be a row."""
    for keys, what, remedy in _OBJECTS:
        if keys <= row.keys():
            return f"this is {what}. {remedy}"
    if len(row) > 100 and all(isinstance(value, int) for value in row.values()):
        return f"this is the vocabulary of a tokenizer. {_TOKENIZER}"
    values = list(row.values())
    if values and all(isinstance(value, Mapping) and "0" in value for value in values):
        return "these are columns of pandas. Write rows: to_json('rows.jsonl', orient='records', lines=True)."
    return None


def what_wrapper(row: Mapping[str, Any]) -> str | None:
    """Return where the rows are in an object that holds a list of them; None if it holds none."""
    lists = [
        key
        for key, value in row.items()
        if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value)
    ]
    if len(lists) != 1:
        return None
    return (
        f"the rows may be in its key {lists[0]!r}. Write them alone: jq -c '.{lists[0]}[]' FILE > rows.jsonl."
    )


def keys_of(row: Mapping[str, Any]) -> str:
    """Return the keys of an object that hold something, for a message."""
    keys = [str(key)[:60] for key, value in row.items() if value is not None]
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"{', '.join(keys[:_SHOWN])}{more}" if keys else "no keys"


def what_folder(folder: Path) -> str | None:
    """Return what a folder is that holds no rows, and what to do; None if it may hold some."""
    if (folder / "adapter_config.json").is_file():
        return "this is a folder of adapters. Give a file of rows."
    if (folder / "config.json").is_file() or (folder / "tokenizer_config.json").is_file():
        return "this is the folder of a model or tokenizer. Give a file of rows; `--model` names the model."
    return None
