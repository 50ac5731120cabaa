"""Trajectories and preference pairs on disk: JSON Lines, one object a line, read as strictly as written.

A trajectory file only grows. A line is written in one call and is durable before `append` returns, so a
killed run loses at most the line it was writing, and the next one drops what is left of that.
"""

from __future__ import annotations

import json
import logging
import os
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from perturn.data.content import flatten
from perturn.errors import DataError, StorageError, did_you_mean
from perturn.io.growing import GrowingFile
from perturn.io.plain import DEEPEST, fault, is_unicode
from perturn.io.reading import parse_json, read_lines, user_path
from perturn.io.writing import replacing
from perturn.types import Action, PreferencePair, Status, Task, Trajectory, Turn

VERSION = 1
"""Version of the line format, written in every trajectory."""

_log = logging.getLogger(__name__)
_MAX = sys.float_info.max
_T = TypeVar("_T")
_Reader = Callable[[Any, str], Any]


# What is on a line: one reader a field. A reader takes a value and the path it was found at.


def trajectory_to_dict(trajectory: Trajectory) -> dict[str, Any]:
    """The trajectory as JSON data, with the version of the format; refused if it could not be read back.

    Tuples become lists. What else JSON cannot hold exactly is a `DataError` with the path of the value.
    """
    record: dict[str, Any] = _plain(trajectory)
    _read_trajectory(record, "")
    return record


def trajectory_from_dict(record: Mapping[str, Any]) -> Trajectory:
    """The trajectory that `trajectory_to_dict` wrote.

    Keys whose field in `types` has a default may be left out. Anything else amiss is a `DataError` that opens
    with the path of the value, such as `turns[3].action.token_ids`.
    """
    return cast(Trajectory, _read_trajectory(record, ""))


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


def _fail(where: str, expected: str, value: object) -> NoReturn:
    got = f"{reprlib.repr(value)} ({type(value).__name__})"
    raise DataError(f"{where or 'record'}: expected {expected}, got {got}. Correct the value.")


def _join(where: str, name: object) -> str:
    return f"{where}.{name}" if where else str(name)


def _checked(expected: str, accept: Callable[[Any], bool]) -> _Reader:
    return lambda value, where: value if accept(value) else _fail(where, expected, value)


_flag = _checked("true or false", lambda value: isinstance(value, bool))
_whole = _checked("a whole number", lambda value: type(value) is int)
_count = _checked("a whole number >= 0", lambda value: type(value) is int and value >= 0)
_version = _checked("the version of the format, from 1 on", lambda value: type(value) is int and value >= 1)


def _text(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        _fail(where, "text", value)
    return value if is_unicode(value) else _fail(where, "valid Unicode", value)


def _number(value: Any, where: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and -_MAX <= value <= _MAX:
        return float(value)
    _fail(where, "a finite number", value)


def _status(value: Any, where: str) -> Status:
    return Status(value) if value in list(Status) else _fail(where, f"one of {', '.join(Status)}", value)


def _data(value: Any, where: str, halves: bool = True) -> Any:
    """Data of a world's own, which must come back from JSON as it went in."""
    if not isinstance(value, dict):
        _fail(where, "an object", value)
    if problem := fault(value, where, halves=halves):
        raise DataError(f"{problem}. Correct the value.")
    return value


def _object(value: Any, where: str) -> Any:
    """Data that a policy is shown."""
    return _data(value, where, halves=False)


def _message(value: Any, where: str) -> Any:
    role, content = _object(value, where).get("role"), value.get("content")
    if not role or not isinstance(role, str):
        _fail(f"{where}.role", "a role, such as user", role)
    if not isinstance(content, str | list | None):
        _fail(f"{where}.content", "text, or a list of content parts", content)
    return {**value, "content": flatten(content, f"{where}.content")} if isinstance(content, list) else value


def _or_none(read: _Reader) -> _Reader:
    return lambda value, where: None if value is None else read(value, where)


def _tuple_of(read: _Reader) -> _Reader:
    def read_list(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            _fail(where, "a list", value)
        try:
            return tuple([read(item, where) for item in value])
        except DataError:  # Only an error needs the path of each item, which costs more than reading it.
            return tuple(read(item, f"{where}[{index}]") for index, item in enumerate(value))

    return read_list


def _record_of(kind: type, readers: Mapping[str, _Reader]) -> _Reader:
    """A reader of a dataclass. Fields without a default are required; keys without a reader are refused."""
    required = [each.name for each in fields(kind) if each.default is each.default_factory is MISSING]

    def read_record(value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            _fail(where, f"a {kind.__name__} object", value)
        for key in value:
            if key not in readers:
                raise DataError(f"{_join(where, key)}: unknown key.{did_you_mean(str(key), readers)}")
        for name in required:
            if name not in value:
                raise DataError(f"{_join(where, name)}: expected a value, got no such key. Add it.")
        return kind(**{key: readers[key](item, _join(where, key)) for key, item in value.items()})

    return read_record


def _read_action(value: Any, where: str) -> Action:
    action: Action = _read_action_fields(value, where)
    if action.logprobs is not None:
        count = None if action.token_ids is None else len(action.token_ids)
        if len(action.logprobs) != count:
            _fail(f"{where}.logprobs", f"one for each of token_ids ({count})", len(action.logprobs))
    return action


def _read_trajectory(value: Any, where: str) -> Any:
    rest = dict(value) if isinstance(value, Mapping) else _fail(where, "a Trajectory object", value)
    path = _join(where, "version")
    version = _version(rest.pop("version", None), path)
    if version > VERSION:
        raise DataError(f"{path}: expected at most {VERSION}, got {version}. Upgrade Perturn to read it.")
    return _read_trajectory_fields(rest, where)


_TASK = {"id": _text, "kind": _text, "split": _text, "data": _data}
_ACTION = {
    "text": _text,
    "token_ids": _or_none(_tuple_of(_count)),
    "logprobs": _or_none(_tuple_of(_number)),
    "ended": _flag,
    "tool_calls": _tuple_of(_object),
}
_TURN = {
    "observation": _tuple_of(_message),
    "action": _read_action,
    "reward": _number,
    "valid": _flag,
    "state_key": _or_none(_text),
}
_TRAJECTORY = {
    "task": _record_of(Task, _TASK),
    "turns": _tuple_of(_record_of(Turn, _TURN)),
    "environment": _text,
    "protocol": _text,
    "prompt": _tuple_of(_message),
    "tools": _tuple_of(_object),
    "total_reward": _number,
    "success": _flag,
    "terminated": _flag,
    "truncated": _flag,
    "status": _status,
    "error": _or_none(_text),
    "sample": _count,
    "seed": _whole,
    "policy": _text,
    "history": _or_none(_count),
}
_read_action_fields = _record_of(Action, _ACTION)
_read_trajectory_fields = _record_of(Trajectory, _TRAJECTORY)
_read_pair_fields = _record_of(PreferencePair, {"chosen": _read_trajectory, "rejected": _read_trajectory})


def _read_pair(value: Any, where: str) -> PreferencePair:
    pair: PreferencePair = _read_pair_fields(value, where)
    if pair.chosen.task.id != pair.rejected.task.id:
        expected = f"the task of chosen ({pair.chosen.task.id!r})"
        _fail(_join(where, "rejected.task.id"), expected, pair.rejected.task.id)
    return pair


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
        trajectory: Trajectory = _parse(raw, f"{path}:{number}", _read_trajectory)
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
        self._file: GrowingFile | None = None
        self._open()

    def _open(self) -> None:
        self._file = GrowingFile(self.path, DataError)
        try:
            self._keys = {trajectory.key for trajectory in self}
            self._file.cut_torn_line()
        except BaseException:
            self.close()
            raise

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
    count = 0
    with replacing(path) as fresh, fresh.open("wb") as file:
        for pair in pairs:
            record = _plain(pair)
            _read_pair(record, "")
            file.write(_line(record))
            count += 1
    return count


def read_pairs(path: str | os.PathLike[str]) -> list[PreferencePair]:
    """The pairs of a file in order; it is written whole, so a torn line is damage, and an error."""
    return [_parse(raw, f"{path}:{number}", _read_pair) for number, raw in _lines(path)]


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes]]:
    """The numbered lines of a file, split at newlines alone."""
    file = user_path(path, "file of trajectories")
    if not file.is_file():
        raise DataError(f"{path}: expected a file, got none. Write it first, or correct the path.")
    yield from read_lines(file, DataError)


def _line(record: Mapping[str, Any]) -> bytes:
    """One line of ASCII: no character of a text can end it early, in any reader's opinion."""
    text = json.dumps(record, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.encode("ascii") + b"\n"


def _parse(raw: bytes, where: str, read: Callable[[Any, str], _T]) -> _T:
    data = parse_json(raw, where, DataError, "Correct or delete the line.")
    try:
        return read(data, "")
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
