"""Rows of training data from a file, in any of the forms that training takes: all or none, or one by one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from perturn.data.paths import RunPaths
from perturn.data.records import pair_from_dict, trajectory_from_dict, weighted_from_dict
from perturn.data.store import read_pairs, read_trajectories
from perturn.data.trl import from_trl, told_unread
from perturn.errors import MOST_REFUSED, DataError, ModelError, refusal
from perturn.io.reading import parse_object, read_lines
from perturn.types import PreferencePair, Trajectory, WeightedTrajectory, failed

_logger = logging.getLogger(__name__)

_REMEDY = "Give a JSONL file or a run folder."
_CONVERSATIONS = "trajectories, or of TRL's messages"

Row = Trajectory | WeightedTrajectory | PreferencePair
"""A row that training takes."""

T = TypeVar("T", bound=Trajectory | PreferencePair)


def read_rows(data: Path) -> Iterator[Trajectory | PreferencePair]:
    """Rows of a JSONL file: Perturn trajectories or pairs, or TRL's conversational formats.

    After the last conversation, what nothing reads of them is said in the log.

    Raises:
        DataError: Naming file and line; of conversations, all bad ones, after the good ones.
    """
    return (row for _, row in _numbered(data))


def _numbered(data: Path) -> Iterator[tuple[int, Trajectory | PreferencePair]]:
    """Rows with their numbers, of conversations the numbers of their lines."""
    if data.is_dir():
        data = RunPaths(data).pairs(RunPaths(data).mark)
    first = next(_objects(data), (0, {}))[1]
    if "turns" in first:
        yield from enumerate(read_trajectories(data), start=1)
    elif _is_pair(first):
        yield from enumerate(read_pairs(data), start=1)
    else:
        yield from _conversations(data)


def _conversations(data: Path) -> Iterator[tuple[int, Trajectory | PreferencePair]]:
    """Rows in the public formats, with their lines."""
    counts = Counter[str]()
    refused: list[tuple[int, str]] = []
    for number, row in _objects(data):
        try:
            yield number, from_trl(row, task_id=f"row-{number}", counts=counts)
        except DataError as error:
            refused.append((number, str(error)))
            if len(refused) == MOST_REFUSED:
                break
    _refuse(data, refused)
    if unread := told_unread(counts):
        _say_unread(data, unread)


def _refuse(data: Path, refused: Sequence[tuple[int, str]]) -> None:
    """Refuse a file with bad rows, if there are any."""
    if len(refused) == 1:
        raise DataError(f"{data}:{refused[0][0]}: {refused[0][1]}")
    if refused:
        raise DataError(refusal(f"{data}:", refused))


@cache
def _say_unread(data: Path, unread: str) -> None:
    """Say once what nothing reads of a file; a run reads its rows several times."""
    _logger.warning("%s: %s", data, unread)


def _is_pair(record: dict[str, Any]) -> bool:
    """Whether an object is a pair of ours, whose sides are trajectories."""
    chosen = record.get("chosen")
    return isinstance(chosen, dict) and "role" not in chosen and "from" not in chosen


def rows_of(data: Path, kind: type[T], check: Callable[[T], None] | None = None) -> Iterator[T]:
    """Rows of a JSONL file that are all of one kind, a trajectory or a pair; at least one.

    Args:
        data: The file.
        kind: Of its rows.
        check: Raises a DataError or a ModelError for a row that cannot be used.

    Raises:
        DataError: Naming file and row; of rows that `check` refuses, all of them, after the good ones.
    """
    number = 0
    refused: list[tuple[int, str]] = []
    for number, row in _numbered(data):
        if not isinstance(row, kind):
            said = "chosen and rejected" if kind is PreferencePair else "one conversation"
            got = "a pair; see pair.file" if kind is Trajectory else "one conversation"
            raise DataError(f"{data}: row {number}: expected {said}, got {got}.")
        try:
            if check is not None:
                check(row)
        except (DataError, ModelError) as error:
            refused.append((number, str(error)))
            if len(refused) == MOST_REFUSED:
                break
        else:
            yield row
    _refuse(data, refused)
    if not number:
        wanted = "pairs, or of TRL's chosen and rejected" if kind is PreferencePair else _CONVERSATIONS
        raise DataError(f"{data} holds no row; give JSON lines of {wanted}.")


def _objects(data: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The numbered JSON objects of a file."""
    for number, line in read_lines(data, DataError, _REMEDY):
        yield number, parse_object(line, f"{data}:{number}", DataError)


def read_each(data: Path, counts: Counter[str] | None = None) -> Iterator[tuple[int, Row | DataError]]:
    """Each line's number, and its row or what is wrong with it; a bad row does not end the reading.

    Args:
        data: JSONL file.
        counts: Grows by what nothing reads of conversations; see `from_trl`.

    Raises:
        DataError: If the file cannot be read.
    """
    seen: dict[tuple[str, int], int] = {}
    for number, line in read_lines(data, DataError, _REMEDY):
        try:
            record = parse_object(line, "row", DataError)
            row = _parse(record, number, counts)
            if isinstance(row, Trajectory) and "turns" in record:
                first = seen.setdefault(row.key, number)
                if first != number:
                    raise DataError(f"has the task and sample of line {first}; delete one of the two lines.")
            yield number, row
        except DataError as error:
            yield number, error


def read_branches(data: Path, counts: Counter[str] | None = None) -> Iterator[tuple[int, Row | DataError]]:
    """As `read_each`, but for branches that FAILED, which nobody trains on: they may have no turn of their own."""
    return (
        each for each in read_each(data, counts) if not (isinstance(each[1], Trajectory) and failed(each[1]))
    )


def _parse(record: dict[str, Any], number: int, counts: Counter[str] | None) -> Row:
    """One line's object -> a row."""
    if "turns" in record:
        return trajectory_from_dict(record)
    if _is_pair(record):
        return pair_from_dict(record)
    if isinstance(record.get("trajectory"), dict):
        return weighted_from_dict(record)
    return from_trl(record, task_id=f"row-{number}", counts=counts)
