"""Convert trajectories and pairs to lines of JSON and back. Both directions make the same checks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import partial
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from pydantic_core import CoreSchema, SchemaValidator, ValidationError, core_schema

from perturn.data.content_parts import flatten, tool_text
from perturn.errors import DataError, did_you_mean
from perturn.io.plain_data import DEEPEST, fault, mismatch
from perturn.io.read_input import explain, parse_json, path_of
from perturn.turns import misplaced
from perturn.types import (
    OPENS,
    Action,
    Message,
    Opening,
    PreferencePair,
    Remaining,
    Status,
    Task,
    Trajectory,
    Turn,
    WeightedTrajectory,
    are_factors,
)

VERSION = 1
"""Version of the line format, written in every trajectory."""

LARGEST = 1e150
"""Largest absolute value of a reward or log-probability, so that sums and squares fit in a float."""

_T = TypeVar("_T")


def trajectory_to_dict(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as JSON data, with the version of the format.

    Tuples become lists. Raises a `DataError` with the path of the value if JSON cannot represent a value exactly.
    """
    return _to_dict(trajectory)


def trajectory_from_dict(record: Mapping[str, Any]) -> Trajectory:
    """Return the trajectory that `trajectory_to_dict` wrote.

    Keys whose field in `perturn.types` has a default may be missing. Any other fault is a `DataError`, whose message
    begins with the path of the value, such as `turns[3].action.token_ids`.
    """
    return _validate(Trajectory, record)


def pair_from_dict(record: Mapping[str, Any]) -> PreferencePair:
    """Return the pair from the JSON data of a line of `write_pairs`. Faults raise a `DataError`."""
    return _validate(PreferencePair, record)


def line_of(value: Any) -> bytes:
    """Return a dataclass as one line of ASCII JSON, so that no character of a text can end the line.

    Raises:
        DataError: If the line could not be read back; names the path of the value.
    """
    text = json.dumps(_to_dict(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.encode("ascii") + b"\n"


def parse_line(kind: type[_T], raw: bytes, where: str) -> _T:
    """Return the dataclass from a line of `line_of`.

    Raises:
        DataError: If the line is wrong. The message begins with `where`, such as the file and the line's number.
    """
    try:
        return cast(_T, _validator(kind).validate_json(raw))
    except ValidationError:  # wrong, or an environment's data has half a surrogate pair, which Python reads
        data = parse_json(raw, where, DataError, "Correct or delete the line.")
    try:
        return _validate(kind, data)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def _to_dict(value: Any) -> dict[str, Any]:
    record: dict[str, Any] = _plain(value)
    _validate(type(value), record)
    return record


def _plain(value: Any, levels: int = 2 * DEEPEST) -> Any:
    """Return a value with dataclasses and mappings as dicts, and tuples as lists."""
    if not levels:
        raise DataError(f"record: expected at most {DEEPEST} levels of data, got {2 * DEEPEST}. Correct it.")
    if is_dataclass(value):
        version = {"version": VERSION} if isinstance(value, Trajectory) else {}
        held = {
            each.name: getattr(value, each.name) for each in fields(value) if not _is_left_out(value, each)
        }
        return version | {name: _plain(each, levels - 1) for name, each in held.items()}
    if isinstance(value, Mapping):
        return {key: _plain(item, levels - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, levels - 1) for item in value]
    return value.value if isinstance(value, Enum) else value


def _is_left_out(value: Any, each: Field[Any]) -> bool:
    """Return whether a sparse field holds its default."""
    if not each.metadata.get("sparse"):
        return False
    default = each.default if each.default_factory is MISSING else each.default_factory()
    return bool(getattr(value, each.name) == default)


# The schema of a line: a schema for each type of `perturn.types`. The messages of the checks here continue the path.


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
    """Check that a round trip through JSON does not change an environment's data, and return the data."""
    if problem := fault(value, "", halves=halves):
        raise ValueError(problem)
    return value


def _check_shown(value: Any) -> Any:
    """Check that data that a policy reads are plain data, and return them; see `perturn.io.plain_data`."""
    return _check_data(value, halves=False)


def _check_message(message: Any) -> Any:
    role, content = _check_shown(message).get("role"), message.get("content")
    if not role or not isinstance(role, str):
        raise ValueError(f".role: {mismatch('a role, such as user', role)}")
    of_tool = role == "tool"
    if not (of_tool or isinstance(content, str | list | None)):
        raise ValueError(f".content: {mismatch('text, or a list of content parts', content)}")
    if isinstance(content, str | None):
        return message
    try:
        return {**message, "content": (tool_text if of_tool else flatten)(content, ".content")}
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


def _check_trajectory(trajectory: Trajectory) -> Trajectory:
    if problem := misplaced(trajectory.turns, trajectory.history):
        raise ValueError(f".{problem}")
    return trajectory


def _check_pair(pair: PreferencePair) -> PreferencePair:
    chosen, rejected = pair.chosen.task.id, pair.rejected.task.id
    if chosen != rejected:
        raise ValueError(f".rejected.task.id: {mismatch(f'the task of chosen ({chosen!r})', rejected)}")
    return pair


def _check_weighted(row: WeightedTrajectory) -> WeightedTrajectory:
    if len(row.weight) != (turns := len(row.trajectory.turns)):
        raise ValueError(f".weight: {mismatch(f'one for each of {turns} turns', len(row.weight))}")
    if row.clip is not None and not are_factors(row.clip, turns):
        raise ValueError(f".clip: {mismatch(f'a number > 0 for each of {turns} turns', row.clip)}")
    if row.has_spread is False and any(row.weight):
        raise ValueError(f".weight: {mismatch('weights of 0 where has_spread is false', row.weight)}")
    return row


def _checked(check: Callable[[Any], Any], schema: CoreSchema) -> CoreSchema:
    return core_schema.no_info_after_validator_function(check, schema)


_OBJECT = core_schema.dict_schema(strict=True)
_OF_TYPES: dict[Any, CoreSchema] = {
    str: core_schema.str_schema(strict=True, min_length=0),  # pydantic checks Unicode only with a bound
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
    (Turn, "follows"): core_schema.nullable_schema(core_schema.int_schema(strict=True, ge=OPENS)),
}
"""Fields whose values have another schema than other values of their type."""
_CHECKS: dict[Any, Callable[[Any], Any]] = {Action: _check_action, PreferencePair: _check_pair}
_CHECKS[Trajectory] = _check_trajectory
_CHECKS[WeightedTrajectory] = _check_weighted


def _schema(hint: Any) -> CoreSchema:
    if get_origin(hint) is tuple:
        items = [_schema(get_args(hint)[0])]
        return core_schema.tuple_schema(items, variadic_item_index=0, fail_fast=True)
    if NoneType in get_args(hint):
        return core_schema.nullable_schema(_schema(get_args(hint)[0]))
    return _record(hint) if is_dataclass(hint) else _OF_TYPES[hint]


def _record(kind: Any) -> CoreSchema:
    """Return the schema of a dataclass. Fields without a default are required, and other keys are rejected.

    `__post_init__` is not called, since the schemas make the same checks.
    """
    hints, keys = get_type_hints(kind), []
    if kind is Trajectory:  # checked first, since a newer version has other keys; not kept
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
_KINDS = {
    "task": Task,
    "turns": Turn,
    "action": Action,
    "remaining": Remaining,
    "opening": Opening,
} | dict.fromkeys(("chosen", "rejected", "trajectory"), Trajectory)
"""Classes of the values of a record, by key."""


def _validator(kind: type) -> SchemaValidator:
    if kind not in _VALIDATORS:
        _VALIDATORS[kind] = SchemaValidator(_record(kind))
    return _VALIDATORS[kind]


def _validate(kind: type[_T], record: Any) -> _T:
    """Return JSON data as a dataclass, or raise a `DataError` that begins with the path of the first fault."""
    try:
        return cast(
            _T, _validator(kind).validate_python(dict(record) if isinstance(record, Mapping) else record)
        )
    except ValidationError as error:
        raise DataError(_explain(error, kind)) from error


weighted_from_dict = partial(_validate, WeightedTrajectory)
"""Return the weighted trajectory from the JSON data of a line of `write_records`. Faults raise a `DataError`."""


def _explain(error: ValidationError, kind: type) -> str:
    """Return a message about the first fault."""
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
