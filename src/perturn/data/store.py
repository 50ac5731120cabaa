"""Trajectories and preference pairs on disk: JSON Lines, one object a line, read as strictly as written.

A trajectory file only grows. A line is written in one call and is durable before `append` returns, so a
killed run loses at most the line it was writing, and the next one drops what is left of that.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from pydantic_core import CoreSchema, SchemaValidator, ValidationError, core_schema

from perturn.data.content import flatten
from perturn.errors import DataError, StorageError, did_you_mean
from perturn.io.growing import GrowingFile
from perturn.io.plain import DEEPEST, fault, mismatch
from perturn.io.reading import explain, parse_json, path_of, read_lines, user_path
from perturn.io.writing import replacing
from perturn.types import (
    Action,
    Message,
    PreferencePair,
    Remaining,
    Status,
    Task,
    Trajectory,
    Turn,
    WeightedTrajectory,
)

VERSION = 1
"""Version of the line format, written in every trajectory."""

LARGEST = 1e150
"""Of a reward and a log-probability, so that no sum and no square of them is too large for a float."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def trajectory_to_dict(trajectory: Trajectory) -> dict[str, Any]:
    """The trajectory as JSON data, with the version of the format; refused if it could not be read back.

    Tuples become lists. What else JSON cannot hold exactly is a `DataError` with the path of the value.
    """
    record: dict[str, Any] = _plain(trajectory)
    _validate(Trajectory, record)
    return record


def trajectory_from_dict(record: Mapping[str, Any]) -> Trajectory:
    """The trajectory that `trajectory_to_dict` wrote.

    Keys whose field in `types` has a default may be left out. Anything else amiss is a `DataError` that opens
    with the path of the value, such as `turns[3].action.token_ids`.
    """
    return _validate(Trajectory, record)


def pair_from_dict(record: Mapping[str, Any]) -> PreferencePair:
    """The pair of a line of `write_pairs`; anything amiss is a `DataError`, as for a trajectory."""
    return _validate(PreferencePair, record)


def _plain(value: Any, levels: int = 2 * DEEPEST) -> Any:
    """Dataclasses and mappings as dicts, tuples as lists, the rest untouched."""
    if not levels:
        raise DataError(f"record: expected at most {DEEPEST} levels of data, got {2 * DEEPEST}. Correct it.")
    if is_dataclass(value):
        version = {"version": VERSION} if isinstance(value, Trajectory) else {}
        return version | {each.name: _plain(getattr(value, each.name), levels - 1) for each in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item, levels - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, levels - 1) for item in value]
    return value.value if isinstance(value, Enum) else value


# What is on a line: a schema for each type of `types`. A check of ours says its fault as it goes on after the path.


def _check_version(value: Any) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f": {mismatch('the version of the format, from 1 on', value)}")
    if value > VERSION:
        raise ValueError(f": expected at most {VERSION}, got {value}. Upgrade Perturn to read it.")


def _check_status(value: Any) -> Status:
    if value not in list(Status):
        raise ValueError(f": {mismatch('one of ' + ', '.join(Status), value)}")
    return Status(value)


def _check_data(value: Any, halves: bool = True) -> Any:
    """Data of a world's own, which must come back from JSON as it went in."""
    if problem := fault(value, "", halves=halves):
        raise ValueError(problem)
    return value


def _check_shown(value: Any) -> Any:
    """Data that a policy is shown."""
    return _check_data(value, halves=False)


def _check_message(message: Any) -> Any:
    role, content = _check_shown(message).get("role"), message.get("content")
    if not role or not isinstance(role, str):
        raise ValueError(f".role: {mismatch('a role, such as user', role)}")
    if not isinstance(content, str | list | None):
        raise ValueError(f".content: {mismatch('text, or a list of content parts', content)}")
    try:
        return {**message, "content": flatten(content, ".content")} if isinstance(content, list) else message
    except DataError as error:
        raise ValueError(str(error)) from None


def _check_action(action: Action) -> Action:
    count = None if action.token_ids is None else len(action.token_ids)
    if count == 0:
        raise ValueError(".token_ids must hold at least one token or be None, got none")
    if action.logprobs is not None and len(action.logprobs) != count:
        expected = f"one for each of token_ids ({count})"
        raise ValueError(f".logprobs: {mismatch(expected, len(action.logprobs))}")
    return action


def _check_pair(pair: PreferencePair) -> PreferencePair:
    chosen, rejected = pair.chosen.task.id, pair.rejected.task.id
    if chosen != rejected:
        raise ValueError(f".rejected.task.id: {mismatch(f'the task of chosen ({chosen!r})', rejected)}")
    return pair


def _check_weighted(row: WeightedTrajectory) -> WeightedTrajectory:
    if len(row.weight) != (turns := len(row.trajectory.turns)):
        raise ValueError(f".weight: {mismatch(f'one for each of {turns} turns', len(row.weight))}")
    return row


def _checked(check: Callable[[Any], Any], schema: CoreSchema) -> CoreSchema:
    return core_schema.no_info_after_validator_function(check, schema)


_OBJECT = core_schema.dict_schema(strict=True)
_OF_TYPES: dict[Any, CoreSchema] = {
    str: core_schema.str_schema(strict=True, min_length=0),  # having a bound, its Unicode is checked too
    bool: core_schema.bool_schema(strict=True),
    int: core_schema.int_schema(strict=True, ge=0),
    float: core_schema.float_schema(strict=True, allow_inf_nan=False, ge=-LARGEST, le=LARGEST),
    Status: core_schema.no_info_plain_validator_function(_check_status),
    Message: _checked(_check_message, _OBJECT),
    Mapping[str, Any]: _checked(_check_shown, _OBJECT),
}
_OF_FIELDS = {
    (Task, "data"): _checked(_check_data, _OBJECT),
    (Trajectory, "seed"): core_schema.int_schema(strict=True),
}
"""Fields that take other than their type does elsewhere."""
_CHECKS: dict[Any, Callable[[Any], Any]] = {Action: _check_action, PreferencePair: _check_pair}
_CHECKS[WeightedTrajectory] = _check_weighted


def _schema(hint: Any) -> CoreSchema:
    if get_origin(hint) is tuple:
        items = [_schema(get_args(hint)[0])]
        return core_schema.tuple_schema(items, variadic_item_index=0, fail_fast=True)
    if NoneType in get_args(hint):
        return core_schema.nullable_schema(_schema(get_args(hint)[0]))
    return _record(hint) if is_dataclass(hint) else _OF_TYPES[hint]


def _record(kind: Any) -> CoreSchema:
    """A dataclass: fields without a default are required, and other keys refused.

    Its `__post_init__` is not called: the schemas check what that checks.
    """
    hints, keys = get_type_hints(kind), []
    if kind is Trajectory:  # before all others, since a newer one has other keys; checked, and not kept
        version = core_schema.no_info_plain_validator_function(_check_version)
        keys.append(core_schema.dataclass_field("version", version, init_only=True))
    for each in fields(kind):
        schema = _OF_FIELDS.get((kind, each.name)) or _schema(hints[each.name])
        if each.default is not MISSING:
            schema = core_schema.with_default_schema(schema, default=each.default)
        elif each.default_factory is not MISSING:
            schema = core_schema.with_default_schema(schema, default_factory=each.default_factory)
        keys.append(core_schema.dataclass_field(each.name, schema))
    names = [each.name for each in fields(kind)]
    inner = core_schema.dataclass_args_schema(
        kind.__name__, keys, collect_init_only=True, extra_behavior="forbid"
    )
    schema = core_schema.dataclass_schema(kind, inner, names)
    return _checked(_CHECKS[kind], schema) if kind in _CHECKS else schema


_VALIDATORS: dict[type, SchemaValidator] = {}
_KINDS = {"task": Task, "turns": Turn, "action": Action, "remaining": Remaining} | dict.fromkeys(
    ("chosen", "rejected", "trajectory"), Trajectory
)
"""Key -> the kind of what is under it."""


def _validator(kind: type) -> SchemaValidator:
    if kind not in _VALIDATORS:
        _VALIDATORS[kind] = SchemaValidator(_record(kind))
    return _VALIDATORS[kind]


def _validate(kind: type[_T], record: Any) -> _T:
    """JSON data -> its value, or a `DataError` that opens with the path of the first mistake."""
    try:
        return cast(
            _T, _validator(kind).validate_python(dict(record) if isinstance(record, Mapping) else record)
        )
    except ValidationError as error:
        raise DataError(_explain(error, kind)) from error


weighted_from_dict = partial(_validate, WeightedTrajectory)
"""The trajectory with weights of a line of `write_records`; anything amiss is a `DataError`."""


def _explain(error: ValidationError, kind: type) -> str:
    """The first mistake, in our words."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "unexpected_keyword_argument":
        *inside, key = first["loc"]
        kind = next((_KINDS[step] for step in reversed(inside) if isinstance(step, str)), kind)
        known = [each.name for each in fields(kind)]
        return f"{path_of(first['loc'])}: unknown key.{did_you_mean(str(key), known)}"
    if first["type"] == "missing":
        return f"{path_of(first['loc'])}: expected a value, got no such key. Add it."
    said = explain(first)
    return said if said.endswith(".") else f"{said}. Correct the value."


def read_trajectories(path: str | os.PathLike[str]) -> Iterator[Trajectory]:
    """The trajectories of a file in the order they were written, one in memory at a time.

    The file is left as it is and may be growing meanwhile: a last line without its newline is left out, with
    a warning. Any other malformed line, or a second one with the same key, is a `DataError`.
    """
    lines: dict[tuple[str, int], int] = {}
    for number, raw in _lines(path):
        if not raw.endswith(b"\n"):
            _log.warning("%s:%d: dropped the last line, whose write was cut short.", path, number)
            return
        trajectory = _parse(Trajectory, raw, f"{path}:{number}")
        if trajectory.key in lines:
            raise DataError(
                f"{path}:{number}: task.id: expected a task and sample not seen before, "
                f"got those of line {lines[trajectory.key]}. Delete one of the two lines."
            )
        lines[trajectory.key] = number
        yield trajectory


class TrajectoryStore:
    """A file of trajectories open for appending, at most one trajectory for each key (task id, sample).

    Opening creates the file if need be, takes a lock on it, checks every line, and cuts off a last line that
    a kill left without its newline. To read a file that another process may be writing, there is
    `read_trajectories`, which neither locks nor changes it.

    Args:
        path: The file; its folder is created too.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._open()

    def _open(self) -> None:
        self._keys: set[tuple[str, int]] = set()
        self._file: GrowingFile | None = GrowingFile(self.path, DataError, self._read_keys)

    def _read_keys(self) -> None:
        self._keys.update(trajectory.key for trajectory in self)

    def append(self, trajectory: Trajectory) -> None:
        """Write one trajectory; on return it is on the disk.

        Raises `DataError` if its key is taken or JSON cannot hold it; `StorageError`, and closes, if the write fails.
        """
        if self._file is None:
            raise DataError(f"{self.path}: the store is closed. Open it again with TrajectoryStore(path).")
        if trajectory.key in self._keys:
            task, sample = trajectory.key
            raise DataError(
                f"{self.path}: expected a new task and sample, got task {task!r}, sample {sample}, which is "
                "already recorded. Skip what is in keys(), or count sample up."
            )
        line = _line(trajectory_to_dict(trajectory))
        self._keys.add(trajectory.key)
        try:
            self._file.append(line)
        except StorageError:
            self.close()
            raise

    def drop(self, unwanted: Callable[[Trajectory], bool]) -> int:
        """Take trajectories out of the file, whole or not at all, so that others can be recorded in their place.

        Returns:
            How many were taken out.
        """
        kept = [trajectory for trajectory in self if not unwanted(trajectory)]
        dropped = len(self) - len(kept)
        if dropped:
            with replacing(self.path) as fresh, fresh.open("wb") as file:
                file.writelines(_line(trajectory_to_dict(trajectory)) for trajectory in kept)
            self.close()
            self._open()
        return dropped

    def keys(self) -> set[tuple[str, int]]:
        """The (task id, sample) of every trajectory."""
        return set(self._keys)

    def read(self) -> Iterator[Trajectory]:
        """The trajectories in the order they were written, one in memory at a time."""
        return read_trajectories(self.path)

    __iter__ = read

    def close(self) -> None:
        """Release the lock and the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __len__(self) -> int:
        return len(self._keys)

    def __enter__(self) -> TrajectoryStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_pairs(path: str | os.PathLike[str], pairs: Iterable[PreferencePair]) -> int:
    """Write a file of preference pairs whole or not at all, in place of what was there; returns how many."""
    return write_records(path, pairs)


def read_pairs(path: str | os.PathLike[str]) -> list[PreferencePair]:
    """The pairs of a file in order; it is written whole, so a torn line is damage, and an error."""
    return list(read_records(path, PreferencePair))


def write_records(path: str | os.PathLike[str], records: Iterable[Any]) -> int:
    """Write a file of dataclasses, one a line, whole or not at all, in place of what was there; returns how many."""
    count = 0
    with replacing(path) as fresh, fresh.open("wb") as file:
        for each in records:
            record = _plain(each)
            _validate(type(each), record)
            file.write(_line(record))
            count += 1
    return count


def read_records(path: str | os.PathLike[str], kind: type[_T]) -> Iterator[_T]:
    """The dataclasses of a file that `write_records` wrote, in order; a torn line is damage, and an error."""
    return (_parse(kind, raw, f"{path}:{number}") for number, raw in _lines(path))


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes]]:
    """The numbered lines of a file, split at newlines alone."""
    file = user_path(path, "file of trajectories")
    if not file.is_file():
        raise DataError(f"{path}: expected a file, got none. Write it first, or correct the path.")
    yield from read_lines(file, DataError)


def _line(record: Mapping[str, Any]) -> bytes:
    """One line of ASCII: no character of a text can end it early, in any reader's opinion."""
    return (
        json.dumps(record, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"
    )


def _parse(kind: type[_T], raw: bytes, where: str) -> _T:
    try:
        return cast(_T, _validator(kind).validate_json(raw))
    except ValidationError:  # it is wrong; or a world's data has half a surrogate pair, which Python reads
        data = parse_json(raw, where, DataError, "Correct or delete the line.")
    try:
        return _validate(kind, data)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
