"""Open sources of rows: a file, a folder of files, or a data set of the Hugging Face Hub.

The format of a file is recognised by its content.

Every command that reads rows opens its source here. So all commands accept the same files and report the same errors.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from perturn.errors import DataError
from perturn.formats.hub_and_parquet import HubName, hub_name, hub_rows, read_columns
from perturn.formats.json_stream import Record, read_json_lines, read_json_values
from perturn.formats.unreadable_files import what_bytes, what_folder, what_text
from perturn.io.read_input import parse_json, read_text, user_path
from perturn.table import locate, require_library

Location = str | os.PathLike[str]
"""Path of a file or folder, or the name of a data set of the Hub."""

_HEAD = 1 << 16
"""Number of bytes at the beginning of a file that are examined to recognise its format."""
_LINES, _ARRAY, _OBJECTS = "JSON lines", "a JSON array", "JSON objects one after the other"
_COLUMNS = {b"PAR1": "Parquet", b"ARROW1": "Arrow", b"\xff\xff\xff\xff": "Arrow stream"}
"""First bytes of a columnar file, with its format."""
_NO_ROWS = re.compile(
    r"(README|LICENSE|NOTICE)(\..*)?|dataset_infos?\.json|state\.json|.*\.(md|txt|py|lock|log|png|ya?ml|toml)",
    re.I,
)
"""Pattern of the names of other files in a folder of rows."""
_SPLIT = re.compile(
    r"(?:^|[^a-z])(train|training|test|testing|valid|validation|val|dev|eval|evaluation)(?:[^a-z]|$)", re.I
)
"""Pattern of a split in the name of a file."""
_ROWS = re.compile(r"(?!\.|__).*\.(jsonl|ndjson|parquet|arrow|feather)(\.\w+)?", re.I)
"""Pattern of the usual names of row files. A `.json` file is more often a configuration or a result."""
_DAMAGE = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""Errors that a file or its decompression raises."""
_LOOKED_AT = 20
"""Number of lines that are examined to recognise JSON lines."""
_REMEDY = (
    "Correct the path, or give a file of rows, a folder of them, a run folder, or owner/name of the Hub."
)


@dataclass(frozen=True)
class Source:
    """Rows that can be read repeatedly, with one row in memory at a time."""

    name: str
    shape: str
    """Name of the recognised format, such as `JSON lines, gzip`."""
    by_line: bool
    """Whether each row is one line, so that the number of a row is its line number."""
    filled: bool
    """Whether the rows come from Arrow, which fills in None for keys that a row lacks."""
    read: Callable[[], Iterator[Record]]
    """Return an iterator over the rows, each with its location."""

    @property
    def unit(self) -> str:
        """Unit of the numbers in locations, `line` or `row`."""
        return "line" if self.by_line else "row"


def open_source(location: Location) -> Source:
    """Open the rows at a path, or a data set of the Hub.

    Args:
        location: A file, a folder, or a data set of the Hub (`owner/name`, `owner/name:split`).

    Raises:
        DataError: If nothing exists there, or if it holds no readable rows. The message names the files found and the
            remedy.
    """
    text = os.fspath(location)
    path = user_path(text, "the path of rows")
    if path.is_dir():
        return _open_folder(path)
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is a pipe or device, which can be read once. Write it to a file first.")
    if path.is_file():
        return _open_file(path)
    if "://" in text or re.match(r"(https?|s3|gs):/", text):
        raise DataError(f"{text} cannot be read: it is an address. Download the file, and give its path.")
    if (named := hub_name(text)) is not None:
        return _open_hub(named)
    raise DataError(f"{text} cannot be read: there is no such file or folder. {_REMEDY}")


def _open_hub(named: HubName) -> Source:
    rows, _ = hub_rows(named)

    def read() -> Iterator[Record]:
        for number, row in enumerate(rows, start=1):
            yield Record(number, f"{named}: row {number}", str(number), row)

    return Source(str(named), "a data set of the Hub", by_line=False, filled=True, read=read)


def _open_file(file: Path) -> Source:
    """Open a file, and recognise its packing and its format by its first bytes."""
    try:
        with file.open("rb") as opened:
            packed = opened.read(_HEAD)
        packing, stream_of = next(
            ((name, opener) for start, name, opener in _PACKINGS if packed.startswith(start)), ("", _plain)
        )
        with stream_of(file) as stream:
            head = stream.read(_HEAD)
    except _DAMAGE as error:
        raise DataError(f"{file} cannot be read: {error}. Correct the path or the file.") from error
    shape = next((shape for start, shape in _COLUMNS.items() if head.startswith(start)), None)
    if shape and packing:
        raise DataError(
            f"{file}: this is {shape} within {packing}. Unpack it: Parquet and Arrow pack their columns."
        )
    if shape:
        read = partial(read_columns, file, shape)
        return Source(str(file), shape, by_line=False, filled=True, read=read)
    if reason := what_bytes(head):
        raise DataError(f"{file}: {reason}")
    shape = _json_shape(head.removeprefix(codecs.BOM_UTF8), file.stem if packing else file.name, str(file))
    parse = read_json_lines if shape == _LINES else read_json_values
    read = partial(_read_text, file, stream_of, parse)
    said = f"{shape}, {packing}" if packing else shape
    return Source(str(file), said, by_line=shape == _LINES, filled=False, read=read)


def _json_shape(head: bytes, name: str, where: str) -> str:
    """Tell JSON lines from an array and from objects over several lines, by the first lines of a file."""
    text = head.decode(errors="replace")
    lines = text.split("\n")
    if len(head) == _HEAD and len(lines) > 1:
        lines.pop()  # the last line may be cut
    lines = [line for line in lines if line.strip()][:_LOOKED_AT]
    first = lines[0].lstrip() if lines else "{"
    if first.startswith("["):
        if len(lines) > 1 and all(line.startswith("[") and _is_json(line) for line in lines):
            raise DataError(
                f'{where}:1: expected a JSON object, got a list. Write {{"messages": [...]}} in each line.'
            )
        return _ARRAY
    later = any(line.startswith("{") and _is_json(line) for line in lines[1:])
    if not first.startswith("{"):
        if later:
            return _LINES
        raise DataError(f"{where}:1: {what_text(text, name)}")
    return _OBJECTS if lines and _spans(text.lstrip(), first, later) else _LINES


def _spans(text: str, first: str, later: bool) -> bool:
    """Return whether the first object of a text spans several lines or shares its line with another object."""
    if _is_json(first):
        return False
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return not later and "\n" in text
    return end > len(first) or text[end : end + 1] in "{,\r"


def _is_json(line: str) -> bool:
    try:
        parse_json(line, "", DataError)
    except DataError:
        return False
    return True


def _read_text(
    file: Path, stream_of: Callable[[Path], Any], parse: Callable[[IO[bytes], str], Generator[Record]]
) -> Iterator[Record]:
    """Yield the rows of a JSON file."""
    try:
        with stream_of(file) as stream, closing(parse(stream, str(file))) as records:
            yield from records
    except _DAMAGE as error:
        raise DataError(f"{file} cannot be read to its end: {error}. Get the file again.") from error


def _plain(file: Path) -> IO[bytes]:
    return file.open("rb")


def _unpacked(kind: str) -> Callable[[Path], IO[bytes]]:
    """Return a function that opens a file with the decompression of pyarrow."""

    def opened(file: Path) -> IO[bytes]:
        require_library("pyarrow", f"{file} is packed with {kind}, which", "datasets")
        return io.BufferedReader(cast(Any, locate("pyarrow:input_stream")(str(file), compression=kind)))

    return opened


_PACKINGS: tuple[tuple[bytes, str, Callable[[Path], Any]], ...] = (
    (b"\x1f\x8b", "gzip", gzip.open),
    (b"BZh", "bzip2", bz2.open),
    (b"\xfd7zXZ\x00", "xz", lzma.open),
    (b"(\xb5/\xfd", "Zstandard", _unpacked("zstd")),
    (b"\x04\x22\x4d\x18", "LZ4", _unpacked("lz4")),
)
"""First bytes of a compressed file, its compression, and the function that opens it."""


def _open_folder(folder: Path) -> Source:
    """Open a folder that `datasets` saved, or a folder of files with one format and one split."""
    if (folder / "dataset_dict.json").is_file():
        splits = [each.name for each in _visible(folder) if (each / "state.json").is_file()]
        if len(splits) == 1:
            return _open_saved(folder / splits[0])
        raise DataError(
            f"{folder} is a `datasets` folder with the splits {', '.join(splits) or 'none'}. Give one of them, such as "
            f"{folder / (splits or ['train'])[0]}."
        )
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return _open_saved(folder)
    if reason := what_folder(folder):
        raise DataError(f"{folder}: {reason}")
    files = [each for each in _visible(folder) if each.is_file() and not _NO_ROWS.fullmatch(each.name)]
    folders = [each for each in _visible(folder) if each.is_dir()]
    if not files and len(folders) == 1:
        return _open_folder(folders[0])
    if not files:
        below = f"; the folders in it are {', '.join(each.name for each in folders[:8])}" if folders else ""
        raise DataError(f"{folder} holds no file of rows{below}. {_REMEDY}")
    if nested := next((each for each in folders if any(map(_is_named_rows, each.glob("*")))), None):
        raise DataError(
            f"{folder} holds files of rows, and so does its folder {nested.name}. Put all files into one folder, or "
            "give one file."
        )
    splits = sorted({found[1].lower() for each in files if (found := _SPLIT.search(each.name))})
    if len(splits) > 1:
        raise DataError(
            f"{folder} holds files of several splits ({', '.join(splits)}). Give one file, such as {files[0]}, or put "
            "the files of one split into a folder of their own."
        )
    return _joined(folder, [_open_file(file) for file in files])


def _is_named_rows(file: Path) -> bool:
    named = _ROWS.fullmatch(file.name) is not None and not _NO_ROWS.fullmatch(file.name)
    return named and file.is_file()


def _visible(folder: Path) -> list[Path]:
    try:
        return sorted(each for each in folder.iterdir() if not each.name.startswith((".", "__")))
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}. Correct its permissions.") from error


def _open_saved(folder: Path) -> Source:
    """Open the files that `save_to_disk` of `datasets` wrote, in the order of `state.json`."""
    where = folder / "state.json"
    state = parse_json(read_text(where, DataError), str(where), DataError, "Save the data set again.")
    listed = state.get("_data_files") if isinstance(state, dict) else None
    names = [each.get("filename") for each in listed or () if isinstance(each, dict)]
    files = [folder / name for name in names if isinstance(name, str)]
    missing = [file for file in files if not file.is_file()]
    if not files or missing:
        lost = missing[0] if missing else f"{where}: a list of files"
        raise DataError(f"{folder} is a `datasets` folder, and {lost} is missing. Save the data set again.")
    return _joined(folder, [_open_file(file) for file in files], "a `datasets` folder")


def _joined(folder: Path, parts: Sequence[Source], shape: str | None = None) -> Source:
    """Return the rows of several files as one source, with consecutive numbers."""
    shapes = sorted({part.shape for part in parts})
    if len(shapes) > 1:
        raise DataError(
            f"{folder} holds files of several kinds ({'; '.join(shapes)}), which may be the same rows twice. Give one "
            f"file, such as {parts[0].name}."
        )
    if len(parts) == 1 and shape is None:
        return parts[0]

    def read() -> Iterator[Record]:
        number = 0
        for part in parts:
            for record in part.read():
                number += 1
                label = (
                    f"{number} ({Path(part.name).name}, {'line' if part.by_line else 'row'} {record.label})"
                )
                yield Record(number, record.where, label, record.value, record.text, record.is_torn)

    said = shape or f"a folder of {len(parts)} files of {shapes[0]}"
    return Source(str(folder), said, by_line=False, filled=parts[0].filled, read=read)
