"""Read and write the episodes of a study, in one Parquet file compressed with zstd.

A study has tens of thousands of rows with repeated texts. Parquet needs less than a hundredth of the space of JSON
lines for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from perturn.data.run_files import REMEDY, Count
from perturn.errors import RunError
from perturn.io.atomic_write import replacing
from perturn.io.plain_data import error_text
from perturn.io.read_input import check_shape
from perturn.table import require_library

EPISODES = "episodes.parquet"
"""Name of the file with the rows, in a study's folder."""


class EpisodeRow(TypedDict):
    """A row of `episodes.parquet`."""

    environment: str
    method: str
    point: str
    seed: int
    panel: Literal["tune", "test"]
    task: str
    kind: str
    success: bool
    score: Annotated[float, Field(allow_inf_nan=False)]
    turns: Count
    invalid: Count
    failed: NotRequired[bool]
    """Whether the environment or the engine raised an error. Such an episode has score 0 and no success."""


_MAY_BE_ABSENT = {"failed"}


def write_episodes(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the episodes of a study, replacing the file atomically.

    Raises:
        StorageError: If the file cannot be written.
    """
    pa, pq = _parquet()
    schema = pa.schema(
        [
            *((name, pa.string()) for name in ("environment", "method", "point")),
            ("seed", pa.int64()),
            *((name, pa.string()) for name in ("panel", "task", "kind")),
            ("success", pa.bool_()),
            ("score", pa.float64()),
            *((name, pa.int64()) for name in ("turns", "invalid")),
            ("failed", pa.bool_()),
        ]
    )
    table = pa.Table.from_pylist(list(rows), schema=schema)
    with replacing(file, (pa.ArrowException,)) as fresh:
        pq.write_table(table, fresh, compression="zstd", compression_level=19)


def read_episodes(file: Path) -> list[dict[str, Any]]:
    """Return the episodes of a study; empty if the file does not exist.

    Raises:
        RunError: If the file is not Parquet, or a row lacks a value.
    """
    if not file.is_file():
        return []
    pa, pq = _parquet()
    try:
        rows = pq.read_table(file).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise RunError(f"{file} is not a readable Parquet file: {error_text(error)}. {REMEDY}") from error
    rows = [
        {name: value for name, value in row.items() if value is not None or name not in _MAY_BE_ABSENT}
        for row in rows
    ]
    found: list[dict[str, Any]] = check_shape(rows, list[EpisodeRow], str(file), RunError, REMEDY)
    return found


def check_parquet() -> None:
    """Raise an error before a study starts, if pyarrow is missing and episodes could not be written.

    Raises:
        ConfigError: If pyarrow is not installed.
    """
    require_library("pyarrow", "a study", "datasets")


def _parquet() -> tuple[Any, Any]:
    """Import pyarrow, an optional dependency, and return it with its Parquet module."""
    check_parquet()
    return import_module("pyarrow"), import_module("pyarrow.parquet")
