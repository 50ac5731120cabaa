"""Read training rows from any source and in any supported format, all of them or one at a time."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

from perturn.data.records import pair_from_dict, trajectory_from_dict, weighted_from_dict
from perturn.data.run_paths import RunPaths
from perturn.errors import MOST_REFUSED, DataError, ModelError, refusal
from perturn.formats.column_names import LABELS
from perturn.formats.json_stream import Record
from perturn.formats.logs.read_logs import FORMATS
from perturn.formats.row_shapes import AS_CHAT
from perturn.formats.row_sources import Location, Source, open_source
from perturn.formats.trl_rows import ONLY_KTO, describe_unread, from_trl, label_of
from perturn.io.read_input import user_path
from perturn.types import PreferencePair, Trajectory, WeightedTrajectory, failed, has_outcome

_logger = logging.getLogger(__name__)

_TRAJECTORY, _PAIR, _WEIGHTED = "Perturn trajectory", "Perturn pair", "Perturn trajectory with weights"

_WEIGHTS = (
    "expected a trajectory, got one with weights. Give such rows to TurnTrainer, or leave the weights out."
)

_NUMBER = "number the episodes of a task in the key `sample`: 0, 1, ..."
_IMPORT_TOGETHER = "import both logs in one command: perturn import-logs A B."
_IMPORTED = re.compile(rf"log(-({'|'.join(FORMATS)}))+")
"""Pattern of the environments of episodes that `import-logs` writes. A log may have several formats."""

Row = Trajectory | WeightedTrajectory | PreferencePair
"""A training row."""

T = TypeVar("T", bound=Trajectory | PreferencePair | WeightedTrajectory)


@dataclass
class Tally:
    """Formats and ignored columns that were found while rows were read."""

    unread: Counter[str] = field(default_factory=Counter)
    """Counts of the ignored keys and columns; see `from_trl`."""
    shapes: Counter[str] = field(default_factory=Counter)
    """Counts of the rows, by recognised format."""


def read_row(
    row: Mapping[str, Any],
    number: int,
    tally: Tally | None = None,
    *,
    index: int | None = None,
    filled: bool = False,
) -> Row:
    """Convert a JSON object in any supported format to a training row.

    The turns of a labelled row get weights of 1 or -1, which the loss `kto` reads.

    Args:
        row: The object.
        number: Number of the row, for the id of its task.
        tally: Counters of formats and ignored columns, which are increased.
        index: Number of the row for error messages. If None, they say `row`.
        filled: Whether the row comes from Arrow; see `from_trl`.

    Raises:
        DataError: If the row is malformed.
    """
    found = Tally() if tally is None else tally
    if (ours := own_row(row, found)) is not None:
        return ours
    label = label_of(row) if isinstance(row, Mapping) else None
    plain = row if label is None else {key: value for key, value in row.items() if key not in LABELS}
    shapes = Counter[str]()
    read = from_trl(
        plain, task_id=f"row-{number}", index=index, counts=found.unread, shapes=shapes, filled=filled
    )
    labelled = label is not None and isinstance(read, Trajectory)
    found.shapes.update(f"{shape}, with a label" if labelled else shape for shape in shapes)
    if label is None or isinstance(read, PreferencePair):
        return read
    return WeightedTrajectory(read, (1.0 if label else -1.0,) * len(read.turns))


def own_row(row: Any, tally: Tally | None = None) -> Row | None:
    """Convert an object in Perturn's own format to a row; return None if it has another format.

    Raises:
        DataError: If the row is malformed.
    """
    for shape, is_ours, read in _OURS if isinstance(row, Mapping) else ():
        if is_ours(row):
            ours = read(row)
            if tally is not None:
                tally.shapes[shape] += 1
            return ours
    return None


_SAID: Mapping[Any, str] = {
    PreferencePair: "chosen and rejected",
    Trajectory: "one conversation",
    WeightedTrajectory: "a conversation and a label, true or false",
}
"""Classes of rows, each with its source in words."""

_PUBLIC = {"messages", "conversations", "conversation", "completion", "chosen", "text"}
"""Columns of public formats that no trajectory of Perturn has. A column `turns` may occur in rows of both kinds."""


def is_trajectory(row: Any) -> bool:
    """Return whether an object is a trajectory in Perturn's format, perhaps with a damaged task."""
    if not isinstance(row, Mapping) or "turns" not in row or row.keys() & _PUBLIC:
        return False
    return "version" in row or isinstance(row.get("task"), Mapping)


def _is_pair(record: Mapping[str, Any]) -> bool:
    """Return whether an object is a pair in Perturn's format, whose sides are trajectories."""
    chosen = record.get("chosen")
    return isinstance(chosen, Mapping) and "role" not in chosen and "from" not in chosen


def _read_trajectory(record: Mapping[str, Any]) -> Trajectory:
    """Return a trajectory. Without `total_reward`, the total is the sum of the rewards of its turns."""
    found = trajectory_from_dict(record)
    if "total_reward" in record:
        return found
    return replace(found, total_reward=sum((turn.reward for turn in found.turns), 0.0))


_OURS: tuple[tuple[str, Callable[[Mapping[str, Any]], bool], Callable[[Mapping[str, Any]], Row]], ...] = (
    (_TRAJECTORY, is_trajectory, _read_trajectory),
    (_PAIR, _is_pair, pair_from_dict),
    (_WEIGHTED, lambda row: isinstance(row.get("trajectory"), Mapping), weighted_from_dict),
)
"""Names of Perturn's own formats, each with a test of a row and a reader."""


def open_rows(data: Location) -> Source:
    """Open a source of rows. If the source is a run folder, open its newest pairs.

    Raises:
        DataError: If the source holds no readable rows.
    """
    path = user_path(data, "the path of rows")
    if path.is_dir() and RunPaths(path).is_run:
        return open_source(RunPaths(path).pairs(RunPaths(path).mark))
    return open_source(data)


def whole_records(source: Source) -> Iterator[Record]:
    """Yield the records of a source. Drop a torn last line with a warning, if all records before it are trajectories.

    An interrupted write leaves such a line. Each file of a folder may have one.
    """
    found: set[bool] = set()
    for record in source.read():
        if record.is_torn and found == {True}:
            _logger.warning("%s: dropped the last line, whose write was cut short.", record.where)
            continue
        found.add(is_trajectory(record.value))
        yield record


def read_each(source: Source, tally: Tally | None = None) -> Iterator[tuple[Record, Row | DataError]]:
    """Yield each record with its row, or with an error if the row is bad. Continue after a bad row.

    Args:
        source: Source returned by `open_rows`.
        tally: Counters of formats and ignored columns, which are increased.

    Raises:
        DataError: If the source cannot be read to its end.
    """
    seen: dict[tuple[str, int], tuple[str, int]] = {}
    for record in whole_records(source):
        try:
            if isinstance(record.value, DataError):
                raise record.value
            row = read_row(record.value, record.number, tally, filled=source.filled)
            if isinstance(row, Trajectory) and is_trajectory(record.value):
                digest = hash(record.text or str(record.value))
                first, known = seen.setdefault(row.key, (record.label, digest))
                if first != record.label:
                    remedy = "delete one of the two."
                    if known != digest:
                        remedy = _IMPORT_TOGETHER if _IMPORTED.fullmatch(row.environment) else _NUMBER
                    raise DataError(f"has the task and sample of {source.unit} {first}; {remedy}")
            yield record, row
        except DataError as error:
            yield record, error


def read_branches(source: Source, tally: Tally | None = None) -> Iterator[tuple[Record, Row | DataError]]:
    """Yield rows as `read_each` does, but leave out FAILED branches, which may have no turn of their own."""
    return (
        each for each in read_each(source, tally) if not (isinstance(each[1], Trajectory) and failed(each[1]))
    )


def read_rows(data: Location) -> Iterator[Trajectory | PreferencePair]:
    """Yield the rows of a source, in Perturn's own format or in any public format.

    After the last row, ignored columns are reported in the log.

    Raises:
        DataError: After the good rows, if the source has bad rows. The error names each bad row.
    """
    return (row for _, row in _strict(data, lambda row: None))


def is_numbered(row: Trajectory) -> bool:
    """Return whether a row is a conversation, which has no task and no outcome, so that its number is its task."""
    return re.fullmatch(r"row-\d+", row.task.id) is not None and not has_outcome(row)


def sides_of(row: Row) -> tuple[Trajectory, ...]:
    """Return the two sides of a pair, or the one trajectory of another row."""
    if isinstance(row, PreferencePair):
        return row.chosen, row.rejected
    return (row.trajectory if isinstance(row, WeightedTrajectory) else row,)


def rows_of(data: Location, kind: type[T], check: Callable[[T], None] | None = None) -> Iterator[T]:
    """Yield the rows of a source, all of one kind; see `recorded_rows_of`."""
    return (row for _, row in recorded_rows_of(data, kind, check))


def recorded_rows_of(
    data: Location, kind: type[T], check: Callable[[T], None] | None = None
) -> Iterator[tuple[Record, T]]:
    """Yield the records of a source with their rows, all of one kind: trajectories, pairs or labelled rows.

    Args:
        data: Location of the source.
        kind: Class of the rows.
        check: Raises a DataError or a ModelError for a row that cannot be used.

    Raises:
        DataError: If there is no row; or, after the good rows, if a row is bad or of another kind.
    """

    def checked(row: Any) -> None:
        if not isinstance(row, kind):
            said = _SAID[kind]
            got = "a pair; see rows.name=file" if kind is Trajectory else "one conversation"
            raise DataError(f"expected {said}, got {got}.")
        if check is not None:
            check(row)

    is_empty = True
    for record, row in _strict(data, checked, labelled=kind is WeightedTrajectory):
        is_empty = False
        yield record, row
    if is_empty:
        raise DataError(f"{data} holds no row; give rows with {_SAID[kind]}.")


def _strict(
    data: Location, check: Callable[[Any], None], *, labelled: bool = False
) -> Iterator[tuple[Record, Any]]:
    """Yield the rows that pass a check. After them, raise an error if other rows failed."""
    source, tally = open_rows(data), Tally()
    refused: list[tuple[Record, str]] = []
    for record, row in read_each(source, tally):
        try:
            if isinstance(row, DataError):
                raise row
            if isinstance(row, WeightedTrajectory) and not labelled:
                raise DataError(_WEIGHTS if own_row(record.value) else ONLY_KTO)
            check(row)
        except (DataError, ModelError) as error:
            refused.append((record, str(error).removeprefix("row: ")))
            if len(refused) == MOST_REFUSED:
                break
        else:
            yield record, row
    refuse_rows(source, refused)
    for said in notes_on(tally):
        _say(source.name, said)


def refuse_rows(source: Source, refused: list[tuple[Record, str]]) -> None:
    """Raise a DataError that names the bad rows of a source, if it has any."""
    if len(refused) == 1:
        record, reason = refused[0]
        raise DataError(f"{record.where}: {reason}")
    if refused:
        found = [(record.label, reason) for record, reason in refused]
        raise DataError(refusal(f"{source.name}:", found, source.unit))


def notes_on(tally: Tally) -> list[str]:
    """Return notes for the user on the formats that were guessed and the columns that were ignored."""
    found = [f"{rows} rows of {shape}" for shape, rows in tally.shapes.items() if AS_CHAT in shape]
    said = [f"{', '.join(found)}: plain text is read as a user message and an answer of the chat template"]
    unread = describe_unread(tally.unread)
    return [*(said if found else []), *([unread] if unread else [])]


@cache
def _say(name: str, said: str) -> None:
    """Log the notes on a source once, although a run reads the source several times."""
    _logger.warning("%s: %s", name, said)
