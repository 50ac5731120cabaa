"""Contents of a study's folder, read once for its verdicts: settings, cells, and the outcome of every episode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from perturn.data.run_files import REMEDY, Amount, Inside, Stamp, parse_settings, read_note
from perturn.data.run_paths import RunPaths
from perturn.errors import RunError
from perturn.io.read_input import check_shape, parse_json, read_text
from perturn.study.settings import Side, side_name
from perturn.study.tables.episode_table import EPISODES, read_episodes

Pair = tuple[str, str]
"""A method, and the method that it is compared with."""
PROTOCOLS = "protocols.json"
"""The note, in a study's folder, of the conditions of its scores."""
_OF_ONE_SEED = ("seed", "maker")
"""Keys of a stamp that are one seed's alone."""
BASE, SFT = "base", "sft"
"""Policies that no method made; they are scored on the test tasks as methods are."""


_TwoSides = Annotated[list[Side], Field(min_length=2, max_length=2)]


class CellRow(TypedDict):
    """An entry of `cells.json`."""

    environment: str
    method: str
    point: dict[str, Any]
    seed: int
    panel: Literal["tune", "test"]
    state: Literal["done", "failed", "to do"]
    error: NotRequired[str | None]
    seconds: NotRequired[Amount | None]
    runs: NotRequired[list[Inside]]
    makes_base: NotRequired[bool]


Episodes = Sequence[Mapping[str, Any]]
"""Rows of `episodes.parquet`."""
Scores = Mapping[int, Mapping[str, float]]
"""A number of each episode, by seed and task."""


@dataclass(frozen=True)
class RecordedStudy:
    """One study's folder in memory."""

    folder: Path
    name: str
    baseline: str
    settings: Mapping[str, Any]
    """The study file, with its defaults."""
    primary: list[Pair]
    """Comparisons that the study is made for."""
    further: list[Pair]
    """All comparisons of the study file except a method's with the baseline; primary ones come first."""
    means: Mapping[str, Sequence[str]]
    """Methods of each mean that is compared, by its name."""
    cells: list[dict[str, Any]]
    episodes: list[dict[str, Any]]
    protocols: Mapping[str, Mapping[str, Mapping[str, Any]]]
    """Conditions of the scores on the test tasks, by environment and method, without conditions of single seeds. A
    method without runs has none."""

    @cached_property
    def bases(self) -> Bases:
        """The base that each seed begins with."""
        return bases_of(self.settings)

    @property
    def planned(self) -> list[str]:
        """Methods of the study file."""
        return list(self.settings.get("methods") or {})

    @property
    def environments(self) -> list[str]:
        """Methods that any cell or episode names."""
        return list(dict.fromkeys(row["environment"] for row in (*self.cells, *self.episodes)))

    def methods(self, environment: str) -> list[str]:
        """Return methods of an environment: base and SFT first, then as the study names them."""
        rows = (*self.cells, *self.episodes)
        found = dict.fromkeys(row["method"] for row in rows if row["environment"] == environment)
        order = [BASE, SFT, *self.planned, *found]
        return [name for name in dict.fromkeys(order) if name in found]

    def played(self, panel: str, environment: str, method: str) -> list[dict[str, Any]]:
        """Return episodes of a method on a task list."""
        return self._by_method.get((panel, environment, method), [])

    @cached_property
    def _by_method(self) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
        found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
        for row in self.episodes:
            found.setdefault((row["panel"], row["environment"], row["method"]), []).append(row)
        return found


def read_recorded(folder: Path) -> RecordedStudy:
    """Read a study's folder, finished or not.

    Raises:
        RunError: If the folder holds no study, or a file of it is malformed.
    """
    if not (folder / "study.yaml").is_file():
        raise RunError(
            f"{folder} holds no study.yaml, so it is not a folder of a study; name what perturn study wrote."
        )
    settings = parse_settings(read_text(folder / "study.yaml", RunError, REMEDY), str(folder / "study.yaml"))
    cells = read_cells(folder / "cells.json")
    named = {row["method"] for row in cells}
    baseline = str(settings.get("baseline") or (SFT if SFT in named else BASE))
    primary, compared = (_pairs(settings, key, folder / "study.yaml") for key in ("primary", "compare"))
    sides = [side for pair in (*primary, *compared) for side in pair]
    means = {side_name(side): side for side in sides if not isinstance(side, str)}
    first = [(side_name(one), side_name(other)) for one, other in primary]
    pairs = [*first, *((side_name(one), side_name(other)) for one, other in compared)]
    return RecordedStudy(
        folder,
        name=str(settings.get("name") or folder.resolve().name),
        baseline=baseline,
        settings=settings,
        primary=first,
        further=[pair for pair in pairs if pair[1] != baseline or pair[0] in means],
        means=means,
        cells=cells,
        episodes=read_episodes(folder / EPISODES),
        protocols=protocols_of(folder, cells),
    )


def table(episodes: Iterable[Mapping[str, Any]], key: str) -> dict[int, dict[str, float]]:
    """Return a number of each episode by seed and task, samples of a task averaged.

    Args:
        episodes: Of one method on one task list.
        key: `success`, `score`, `turns` or `invalid`.
    """
    found: dict[int, dict[str, list[float]]] = {}
    for row in episodes:
        found.setdefault(row["seed"], {}).setdefault(row["task"], []).append(float(row[key]))
    return {
        seed: {task: fmean(values) for task, values in tasks.items()} for seed, tasks in sorted(found.items())
    }


def shared(*tables: Scores) -> tuple[list[int], list[str]]:
    """Return seeds that all tables have, and tasks that all of them have under each of these seeds."""
    first, *others = tables
    seeds = [seed for seed in first if all(seed in other for other in others)]
    panels = [each[seed].keys() for each in tables for seed in seeds]
    tasks = (
        [task for task in sorted(first[seeds[0]]) if all(task in panel for panel in panels)] if seeds else []
    )
    return seeds, tasks


def rows_of(values: Scores, together: Sequence[Sequence[int]], tasks: Sequence[str]) -> list[list[float]]:
    """Return a row for seeds that count together, which is their mean; a column per task."""
    return [[fmean(values[seed][task] for seed in seeds) for task in tasks] for seeds in together]


def with_means(tables: Mapping[str, Scores], means: Mapping[str, Sequence[str]]) -> dict[str, Scores]:
    """Return scores of each method, and of each mean of methods on the seeds and tasks that all of them have."""
    found = dict(tables)
    for name, methods in means.items():
        members = [tables.get(method, {}) for method in methods]
        seeds, tasks = shared(*members) if all(members) else ([], [])
        found[name] = {
            seed: {task: fmean(member[seed][task] for member in members) for task in tasks} for seed in seeds
        }
    return found


def _pairs(settings: Mapping[str, Any], key: str, file: Path) -> list[list[Side]]:
    """Return comparisons under a key of a study file."""
    named = settings.get(key) or []
    found: list[list[Side]] = check_shape(named, list[_TwoSides], f"{file}: {key}", RunError, REMEDY)
    return found


def read_cells(file: Path) -> list[dict[str, Any]]:
    """Return rows of `cells.json`.

    Raises:
        RunError: If it is malformed.
    """
    text = read_text(file, RunError, REMEDY)
    found: list[dict[str, Any]] = check_shape(
        parse_json(text, str(file), RunError, REMEDY), list[CellRow], str(file), RunError, REMEDY
    )
    return found


def protocols_of(folder: Path, cells: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the stamp of the last run of the first finished cell of each method on the test tasks.

    If that run is deleted, the record in `protocols.json`.
    """
    noted = read_note(folder / PROTOCOLS, dict[str, dict[str, dict[str, Any]]]) or {}
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in cells:
        environment, method = row["environment"], row["method"]
        of = found.setdefault(environment, {})
        is_new = row["panel"] == "test" and row["state"] == "done" and method not in of
        if is_new and (runs := row.get("runs")):
            stamp = read_note(RunPaths(folder / runs[-1]).stamp, Stamp)
            known = noted.get(environment, {}).get(method, {}) if stamp is None else stamp
            of[method] = {key: value for key, value in known.items() if key not in _OF_ONE_SEED}
    return found


_OF_THE_BASE = ("base", "model")
"""Sections of a recipe that decide what a run begins with."""

Bases = Mapping[int, str]
"""The base that each seed begins with; a seed that is not listed has its own base."""


def bases_of(settings: Mapping[str, Any]) -> dict[int, str]:
    """Return seeds with their bases; seeds with equal `by_seed` values of `base` and `model` share one.

    Where `by_seed` has neither section, all of its values count, since seeds share what they stand for as well.

    Args:
        settings: The study file, with its defaults.

    Returns:
        None where all seeds share one: the study has then no other sample than its seeds.
    """
    keys = _keys(settings) or list(settings.get("by_seed") or {})
    found = _values(settings, keys)
    return found if len(set(found.values())) > 1 else {}


def has_one_base(settings: Mapping[str, Any], cells: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether all seeds begin with one base that the study makes or names for them.

    Args:
        settings: The study file, with its defaults.
        cells: Of one environment.
    """
    keys = _keys(settings)
    is_own = bool(keys) or any(row.get("makes_base") for row in cells)
    return is_own and len(set(_values(settings, keys).values())) <= 1


def seeds_by_base(seeds: Sequence[int], bases: Bases) -> list[list[int]]:
    """Return seeds by base, in the order of their first ones."""
    found: dict[str, list[int]] = {}
    for seed in seeds:
        found.setdefault(bases.get(seed, f"seed {seed}"), []).append(seed)
    return list(found.values())


def _keys(settings: Mapping[str, Any]) -> list[str]:
    return [key for key in settings.get("by_seed") or {} if key.partition(".")[0] in _OF_THE_BASE]


def _values(settings: Mapping[str, Any], keys: Sequence[str]) -> dict[int, str]:
    """Return values that go with each seed at these keys, repeated where there are fewer values than seeds."""
    given = settings.get("by_seed") or {}
    return {
        seed: repr([given[key][index % len(given[key])] for key in keys])
        for index, seed in enumerate(settings.get("seeds") or [])
    }
