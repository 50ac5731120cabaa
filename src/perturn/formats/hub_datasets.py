"""Data sets of the Hugging Face Hub, through `datasets`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from perturn.errors import DataError, did_you_mean
from perturn.io.plain_data import told
from perturn.table import locate, require

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
    """Return the name that a text is, if it can be one; a path whose folder exists is none."""
    found = _NAME.fullmatch(text)
    if found is None or _FILE.fullmatch(text) or os.path.isdir(found["id"].partition("/")[0]):
        return None
    return HubName(found["id"], found["revision"], found["config"], found["split"])


@cache
def hub_rows(name: HubName) -> tuple[Iterable[dict[str, Any]], tuple[Path, ...]]:
    """Return the rows of a data set, and the files of the local cache that hold them; asked once in a process.

    Raises:
        ConfigError: If `datasets` is not installed.
        DataError: If it cannot be loaded, or has several configurations or splits of which none is named.
    """
    require("datasets", f"{name} is no file or folder here, and reading it from the Hub", "datasets")
    try:
        found = locate("datasets:load_dataset")(name.id, name.config, revision=name.revision)
    except Exception as error:  # code of others, whose errors are of many kinds
        raise DataError(
            f"{name}: there is no such file or folder, and the Hub gave no data set of that name: "
            f"{type(error).__name__}: {told(error)}. Correct the path, or name {_FORM}. Without a network, "
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
