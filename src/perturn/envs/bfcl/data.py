"""Read BFCL's multi-turn files, as the package `bfcl-eval` ships them: tasks, gold calls and tool schemas."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import fsum
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from perturn.envs.json_rows import whole
from perturn.episodes.tool_calls import ToolCall, call_similarity
from perturn.errors import DataError, EnvironmentFailure
from perturn.io.read_input import check_shape, parse_object, read_lines
from perturn.stats.matching import hard_matches

INSTALL = 'run: pip install "perturn[bfcl]" && pip install --no-deps bfcl-eval==2026.3.23'
CATEGORIES = ("base", "miss_param", "long_context")
"""Supported categories. `miss_func` is not supported, since its tools change in the middle of a task."""

_DOCS = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
"""Class of a simulator -> name of its module, and of its file of tool descriptions."""
CLASSES = tuple(sorted(_DOCS))
"""Classes of the simulators, in alphabetical order."""
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "list": "array", "any": "string"}
_LONGEST_CALL = 20_000
_REMEDY = (
    "Correct it; environment.data must be a folder as bfcl_eval/data, with BFCL_v4_multi_turn_*.json and "
    "possible_answer/."
)


class _Gold(TypedDict):
    """Keys of a line in a file of possible answers."""

    id: str
    ground_truth: list[list[str]]


class _Said(TypedDict):
    content: Any


class _Task(TypedDict):
    """Keys of a line in a file of tasks."""

    id: str
    question: list[list[_Said]]
    initial_config: dict[str, Any]
    involved_classes: list[str]
    excluded_function: NotRequired[list[str]]


class _Doc(TypedDict):
    """Keys of a line in a file of tool descriptions."""

    name: str
    description: str
    parameters: dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One task of BFCL."""

    id: str
    requests: tuple[str, ...]
    """Requests of the user, one text per user turn."""
    config: Mapping[str, Any]
    """Class of a simulator -> its initial state."""
    classes: tuple[str, ...]
    """Classes of the simulators that the task needs."""
    excluded: frozenset[str]
    """Names of tools that are not offered."""
    gold: tuple[tuple[str, ...], ...]
    """Gold calls of each user turn, in Python syntax."""


def package_data() -> Path:
    """Return the data folder of the installed package `bfcl-eval`.

    Raises:
        EnvironmentFailure: If the package is not installed.
    """
    found = find_spec("bfcl_eval")
    if found is None or not found.submodule_search_locations:
        raise EnvironmentFailure(
            f"bfcl needs the simulators of bfcl-eval; {INSTALL} (without --no-deps it wants another numpy)."
        )
    return Path(found.submodule_search_locations[0]) / "data"


def read_entries(folder: Path, category: str) -> dict[str, Entry]:
    """Return the tasks of a category by id, with their gold calls, in the order of the file.

    Raises:
        DataError: If a file is missing or malformed.
    """
    name = f"BFCL_v4_multi_turn_{category}.json"
    gold = {row["id"]: row["ground_truth"] for _, row in _rows(folder / "possible_answer" / name, _Gold)}
    return {row["id"]: _entry(row, gold.get(row["id"]), where) for where, row in _rows(folder / name, _Task)}


def _rows(file: Path, shape: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the position `file:line` and the object of each line of a JSON-lines file."""
    for number, line in read_lines(file, DataError, _REMEDY):
        where = f"{file}:{number}"
        row = check_shape(parse_object(line, where, DataError, _REMEDY), shape, where, DataError, _REMEDY)
        yield where, whole(row, line.decode(), where)


def _entry(row: dict[str, Any], gold: list[list[str]] | None, where: str) -> Entry:
    if gold is None:
        raise DataError(f"{where}: task {row['id']!r} has no answer in possible_answer/. {_REMEDY}")
    unknown = [name for name in row["involved_classes"] if name not in _DOCS]
    if unknown:
        raise DataError(f"{where}: unknown simulator {unknown[0]!r}; known: {', '.join(_DOCS)}.")
    requests = tuple("\n".join(str(message["content"]) for message in turn) for turn in row["question"])
    if len(requests) != len(gold) or not requests or not all(requests):
        raise DataError(
            f"{where}: expected a request for each of the {len(gold)} gold turns, got {requests!r:.80}."
        )
    return Entry(
        id=row["id"],
        requests=requests,
        config=row["initial_config"],
        classes=tuple(row["involved_classes"]),
        excluded=frozenset(row.get("excluded_function", ())),
        gold=tuple(map(tuple, gold)),
    )


def module_of(class_name: str) -> str:
    """Return the dotted module name of a simulator class."""
    return f"bfcl_eval.eval_checker.multi_turn_eval.func_source_code.{_DOCS[class_name]}"


def schemas(folder: Path, entry: Entry) -> tuple[dict[str, Any], ...]:
    """Return the tool schemas of a task for chat templates: BFCL's descriptions, with the type names of JSON Schema."""
    found = []
    for class_name in entry.classes:
        file = folder / "multi_turn_func_doc" / f"{_DOCS[class_name]}.json"
        for _, row in _rows(file, _Doc):
            if row["name"] not in entry.excluded:
                function = {key: _json_schema(row[key]) for key in ("name", "description", "parameters")}
                found.append({"type": "function", "function": function})
    return tuple(found)


def _json_schema(value: Any) -> Any:
    if isinstance(value, dict):
        named = {key: _json_schema(item) for key, item in value.items()}
        kind = named.get("type")
        return named | {"type": _TYPES.get(kind, kind)} if isinstance(kind, str) else named
    return [_json_schema(item) for item in value] if isinstance(value, list) else value


def read_call(text: str, methods: Mapping[str, Any]) -> ToolCall:
    """Parse a gold call in Python syntax into a call with named arguments, without evaluating it.

    Args:
        text: Call, such as `sort('report.txt')`.
        methods: Name of a tool -> its method, whose signature names the arguments.

    Raises:
        DataError: If the text is not a call of a tool with literal arguments.
    """
    if len(text) > _LONGEST_CALL:
        raise DataError(f"gold call {text[:40]!r}… has more than {_LONGEST_CALL} characters. {_REMEDY}")
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("no call")
        positional = [ast.literal_eval(each) for each in call.args]
        named = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        bound = inspect.signature(methods[call.func.id]).bind(*positional, **named)
    except (SyntaxError, ValueError, KeyError, TypeError, RecursionError, MemoryError) as error:
        raise DataError(f"gold call {text!r:.200} cannot be read: {type(error).__name__}: {error}") from error
    return ToolCall(call.func.id, bound.arguments)


class Matched:
    """Calls of an episode so far, and their F1 score against the gold calls.

        F1 = 2 S / (P + G)

    P is the number of calls and G the number of gold calls. S is the largest sum of similarities (`call_similarity`)
    over one-to-one matchings of calls and gold calls, in any order.
    """

    def __init__(self, gold: Sequence[ToolCall]) -> None:
        """Start without calls.

        Args:
            gold: Gold calls, at least one.
        """
        self._gold = gold
        self._similarity: list[list[float]] = []
        self.f1 = 0.0
        """Current F1 score, in [0, 1]."""

    def add(self, calls: Sequence[ToolCall]) -> float:
        """Add calls and return the change of the F1 score, which may be negative."""
        before = self.f1
        self._similarity += [[call_similarity(call, wanted) for wanted in self._gold] for call in calls]
        matched = fsum(hard_matches(self._similarity))
        self.f1 = 2 * matched / (len(self._similarity) + len(self._gold))
        return self.f1 - before
