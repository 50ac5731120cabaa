"""Read and check the files of a run folder that hold no episodes, for `perturn report` and `perturn watch`.

A run folder may come from another version, machine or person. Unknown keys are kept unchanged.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, NotRequired

import psutil
from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from perturn.config.parsing import build, parse
from perturn.config.recipe import Recipe
from perturn.errors import RunError
from perturn.io.atomic_write import write_whole
from perturn.io.plain_data import is_unicode
from perturn.io.read_input import check_shape, complete_lines, parse_json, parse_yaml, read_text
from perturn.table import package_of
from perturn.table_index import entry_named, table
from perturn.traits import traits_of
from perturn.types import Sampling

REMEDY = "Restore it, or run the stage that writes it again."

Amount = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
"""A number of seconds or gigabytes, or a time in Unix seconds."""
Count = Annotated[int, Field(ge=0, le=10**12)]
Number = Annotated[float, Field(ge=-1e300, le=1e300)] | None
"""A number in JSON, or null."""


def _inside(path: str) -> str:
    parts = PurePath(path)
    if not parts.parts or parts.is_absolute() or ".." in parts.parts or "\0" in path or len(path) > 1000:
        raise ValueError("must be a path inside the run folder")
    return path


Inside = Annotated[str, AfterValidator(_inside)]
"""Path of a file, relative to the run folder."""


class StageNote(TypedDict):
    """Record of a stage in the manifest."""

    seconds: NotRequired[Amount | None]
    peak_memory_gb: NotRequired[Amount | None]
    counts: NotRequired[dict[str, Any] | None]
    done: NotRequired[bool]
    sources: NotRequired[dict[str, str] | None]
    """Short digests of all files of the stages that the stage needs. Earlier versions did not record them."""
    files: NotRequired[Count | None]
    """Number of files that were sealed when the stage ended. Earlier versions did not record it."""


class Seal(TypedDict):
    """State of a file when the stage that made it ended."""

    stage: str | None
    bytes: Count
    modified_ns: int
    sha256: str | None
    """None: a file of an optimizer."""


class InputFile(TypedDict):
    """State of a file from outside the run folder when the run was made."""

    bytes: Count
    modified_ns: int
    changed_ns: NotRequired[int]
    """Time of the last change of content or status, in nanoseconds. No program can set it back. Files of earlier
    versions lack it."""
    sha256: str


class Input(TypedDict):
    """Files from outside the run folder that a setting names."""

    given: str
    kind: str
    folder: str
    files: dict[str, InputFile]
    revision: NotRequired[str | None]


class Manifest(TypedDict):
    """`manifest.json`."""

    recipe: NotRequired[str | None]
    seed: NotRequired[int | None]
    commit: NotRequired[str | None]
    versions: NotRequired[dict[str, str] | None]
    hardware: NotRequired[dict[str, Any] | None]
    data: NotRequired[dict[str, str] | None]
    sha256: NotRequired[str | None]
    files: NotRequired[dict[Inside, Seal]]
    inputs: NotRequired[dict[str, Input]]
    stages: NotRequired[dict[str, StageNote]]


class Progress(TypedDict):
    """`progress.json`."""

    stage: str
    began: Amount
    host: NotRequired[str]
    pid: NotRequired[Annotated[int, Field(ge=0, lt=2**31)]]
    process_started: NotRequired[Amount]
    steps: NotRequired[list[str]]
    of_recipe: NotRequired[list[str]]
    file: NotRequired[Inside]
    total: NotRequired[Count | None]
    done_before: NotRequired[Count]
    unit: NotRequired[str]
    counting_since: NotRequired[Amount]
    seconds_left: NotRequired[Amount]
    measured: NotRequired[Amount]
    spent: NotRequired[Amount]
    """Seconds spent on the stage by all calls. Files of earlier versions lack it."""
    ended: NotRequired[Literal["done", "failed", "stopped"]]
    error: NotRequired[str]


class Holder(TypedDict):
    """`.holder`: the process that holds the run's lock. The file is removed when the lock is released."""

    host: str
    pid: Annotated[int, Field(ge=0, lt=2**31)]
    since: Amount


class Departure(TypedDict):
    """A setting in which a run departs from its named protocol."""

    here: Any
    protocol: Any


class Stamp(TypedDict):
    """`evaluation/protocol.json`."""

    panel_sha256: NotRequired[str]
    n: NotRequired[Count]
    samples: NotRequired[Count]
    max_turns: NotRequired[dict[str, Count] | None]
    departures: NotRequired[dict[str, Departure] | None]
    decoding: NotRequired[dict[str, Any] | None]


class Loss(TypedDict):
    """`metrics/loss.json`."""

    pivot: NotRequired[Number]


class Ranked(TypedDict):
    """`metrics/ranking.json`."""

    pairs: Count
    before: Number
    after: Number


class Metrics(TypedDict):
    """A line of `metrics/sft.jsonl` or `metrics/align.jsonl`."""

    step: NotRequired[Amount]


class Confidences(TypedDict):
    """One side of a pair in a line of `metrics/confidence.jsonl`."""

    confidence: list[Number]
    weight: list[Number]
    turn: NotRequired[list[Count]]


class Reference(TypedDict):
    """One side of a pair in a line of `metrics/reference.jsonl`."""

    ids: list[Count]
    turn: list[Count]
    logprobs: list[Number]


def read_note(file: Path, shape: Any) -> dict[str, Any] | None:
    """Return the JSON object of a file; None without the file. Values that JSON lacks, NaN and 1e999, become null.

    Raises:
        RunError: If the file cannot be read or does not match the shape.
    """
    if not file.is_file():
        return None
    text = read_text(file, RunError, REMEDY)
    data = parse_json(text, str(file), RunError, REMEDY, nan_as_null=True)
    found: dict[str, Any] = check_shape(_unicode(data, text, str(file)), shape, str(file), RunError, REMEDY)
    return found


def _unicode(data: Any, text: str | bytes, where: str) -> Any:
    """Return the data unchanged if its texts are valid Unicode, so that they can be printed and name files."""
    half = b"\\ud" in text.lower() if isinstance(text, bytes) else "\\ud" in text.lower()
    if half and not is_unicode(json.dumps(data, ensure_ascii=False)):
        raise RunError(f"{where}: expected valid Unicode, got half of a surrogate pair. {REMEDY}")
    return data


def with_lost_time(stages: Mapping[str, Mapping[str, Any]], stage: str, progress: Path) -> dict[str, Any]:
    """Return the record of a stage. Its seconds include the time of a process that was killed in this stage.

    This time is lost if another stage has begun since, or if an earlier version of Perturn wrote the progress.

    Args:
        stages: Stages in the manifest.
        stage: Name of the stage.
        progress: `progress.json` of the last process.
    """
    record, noted = stages.get(stage, {}), None
    with suppress(RunError):  # a damaged file costs only the time that it records
        noted = read_note(progress, Progress)
    if noted is None or noted["stage"] != stage:
        return {**record}
    return {**record, "seconds": max(record.get("seconds") or 0.0, noted.get("spent", 0.0))}


def read_notes(file: Path, shape: Any, only: Container[int] | None = None) -> list[dict[str, Any]]:
    """Return the JSON objects of a file, one per line, without a last line that is still being written.

    Without the file, return an empty list. If `only` is given, a row whose index it lacks is empty and is not parsed.

    Raises:
        RunError: If the file cannot be read or a line does not match the shape.
    """
    rows: list[dict[str, Any]] = []
    for number, line in complete_lines(file, RunError, REMEDY) if file.is_file() else ():
        if only is not None and number - 1 not in only:
            rows.append({})
            continue
        where = f"{file}:{number}"
        data = _unicode(parse_json(line, where, RunError, REMEDY), line, where)
        rows.append(check_shape(data, shape, where, RunError, REMEDY))
    return rows


def as_scored(theirs: Recipe, ours: Recipe, stamp: Path) -> Recipe:
    """Return a run's recorded recipe; if it leaves the decoding to the protocol, with the decoding of its scores.

    The protocol of an earlier version may have had another decoding. Only a recipe that sets the decoding is compared.

    Args:
        theirs: The recorded recipe.
        ours: The recipe that would continue the run.
        stamp: The run's `evaluation/protocol.json`.
    """
    if not (theirs.evaluate and ours.evaluate and ours.evaluate.sampling) or theirs.evaluate.sampling:
        return theirs
    decoding = (read_note(stamp, Stamp) or {}).get("decoding")
    if decoding is None:
        return theirs
    sampling = parse(Sampling, decoding, f"{stamp}: decoding")
    return replace(theirs, evaluate=replace(theirs.evaluate, sampling=sampling))


def read_sides(path: Path, shape: Any, only: Container[int] | None = None) -> list[dict[str, Any]]:
    """Return the rows of a file in which each side of a pair has lists of equal length. For `only`, see `read_notes`.

    Raises:
        RunError: If the file cannot be read, or a side does not match the shape.
    """
    rows = read_notes(path, dict[str, Any], only)
    for number, row in enumerate(rows, start=1):
        if only is not None and number - 1 not in only:
            continue
        for side in ("chosen", "rejected"):
            where = f"{path}:{number}: {side}"
            found = check_shape(row.get(side), shape, where, RunError, REMEDY)
            if len({len(each) for each in found.values() if isinstance(each, list)}) > 1:
                raise RunError(f"{where}: expected lists of one length, got several. {REMEDY}")
    return rows


def parse_settings(text: str, where: str) -> Mapping[str, Any]:
    """Return the settings of a recorded recipe of any version; empty if the text is not a mapping.

    Raises:
        RunError: If the text is not YAML.
    """
    settings = parse_yaml(text, where, RunError)
    return settings if isinstance(settings, Mapping) else {}


def note_tokens(file: Path, ids: Iterable[int], tokenizer: Any) -> None:
    """Store the text of each token id that occurs in a run, so that readers need no tokenizer.

    Args:
        file: File of the texts, by token id.
        ids: Token ids. The stored texts of known ids are not changed.
        tokenizer: Tokenizer of the run's policies.
    """
    noted: dict[str, str] = read_note(file, dict[str, str]) or {}
    missing = sorted(set(map(str, ids)) - noted.keys(), key=int)
    if not missing:
        return
    anchor = tokenizer.encode("a", add_special_tokens=False)[-1]  # alone, a token may lose its leading space
    before = tokenizer.decode([anchor])
    for token in missing:
        noted[token] = tokenizer.decode([anchor, int(token)]).removeprefix(before)
    write_whole(file, json.dumps(noted, ensure_ascii=False) + "\n")


_ALWAYS = ("perturn", "torch", "transformers", "accelerate")
"""Distributions that every result depends on."""


def versions(recipe: Recipe) -> dict[str, str]:
    """Return the versions of Python and of the installed packages that a run's results depend on."""
    names = dict.fromkeys((*_ALWAYS, *_distributions(recipe)))
    found = {name: _version(name, tuple(sys.path)) for name in names}
    return {"python": platform.python_version()} | {name: each for name, each in found.items() if each}


@cache
def _version(distribution: str, path: tuple[str, ...]) -> str | None:
    """Return the version of a distribution; None if it is not installed. `path` (`sys.path`) is a cache key."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _distributions(recipe: Recipe) -> Iterator[str]:
    """Yield the distributions that the parts of a recipe declare, and the packages of entries from other packages."""
    stages = [stage for stage in (recipe.base, recipe.sft, recipe.align) if stage is not None]
    worlds = {
        "environments": recipe.environment or {},
        "engines": recipe.engine,
        "backends": recipe.backend,
    }
    yield from traits_of(entry_named("environments", str(worlds["environments"].get("name")))).distributions
    for name in ("engine", "backend"):
        yield from build(table(f"{name}s"), getattr(recipe, name), name).traits.distributions
    for part in (recipe.cluster, *(stage.lora for stage in stages)):
        yield from part.distributions if part else ()
    numbers = [("losses", stage.loss) for stage in stages] + [("credits", recipe.credit or {})]
    selector = recipe.evaluate.select if recipe.evaluate else None
    for kind, section in (*worlds.items(), *numbers, ("selectors", selector or {})):
        if package := package_of(f"perturn.{kind}", str(section.get("name"))):
            yield package


def hardware() -> dict[str, Any]:
    """Return a short description of the machine."""
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
    }


@cache
def commit() -> str | None:
    """Return the commit of the running source code, with `-dirty` if files differ from it; None outside a checkout."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip() or None
