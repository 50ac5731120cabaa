"""Read a study's folder for its verdicts: settings, cells, and the outcome of every episode."""

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
"""A method, and the method with which it is compared."""
PROTOCOLS = "protocols.json"
"""Name of the file in a study's folder that records the conditions of its scores."""
_OF_ONE_SEED = ("seed", "maker")
"""Keys of a stamp that differ between seeds."""
BASE, SFT = "base", "sft"
"""Methods that only score the model or stop after SFT. They are scored on the test tasks like other methods."""


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
    weights: NotRequired[dict[str, str]]
    """Digests of the weights that the stages of the cell's run have written, by stage."""


Episodes = Sequence[Mapping[str, Any]]
"""Rows of `episodes.parquet`."""
Scores = Mapping[int, Mapping[str, float]]
"""One number for each episode, by seed and task."""


@dataclass(frozen=True)
class RecordedStudy:
    """Contents of a study's folder."""

    folder: Path
    name: str
    baseline: str
    settings: Mapping[str, Any]
    """Settings of the study file, including defaults."""
    primary: list[Pair]
    """Main comparisons of the study."""
    further: list[Pair]
    """All comparisons of the study file except the comparisons with the baseline. Primary comparisons come first."""
    means: Mapping[str, Sequence[str]]
    """Methods of each mean that is compared, by the name of the mean."""
    cells: list[dict[str, Any]]
    episodes: list[dict[str, Any]]
    protocols: Mapping[str, Mapping[str, Mapping[str, Any]]]
    """Conditions of the scores on the test tasks, by environment and method. Conditions that differ between seeds are
    left out. A method without runs has no entry."""

    @cached_property
    def bases(self) -> Bases:
        """Base model that each seed starts from."""
        return bases_of(self.settings)

    @property
    def planned(self) -> list[str]:
        """Methods in the study file."""
        return list(self.settings.get("methods") or {})

    @property
    def environments(self) -> list[str]:
        """Environments that occur in a cell or an episode."""
        return list(dict.fromkeys(row["environment"] for row in (*self.cells, *self.episodes)))

    def methods(self, environment: str) -> list[str]:
        """Return the methods of an environment: first `base` and `sft`, then the others in the study's order."""
        rows = (*self.cells, *self.episodes)
        found = dict.fromkeys(row["method"] for row in rows if row["environment"] == environment)
        order = [BASE, SFT, *self.planned, *found]
        return [name for name in dict.fromkeys(order) if name in found]

    def played(self, task_list: str, environment: str, method: str) -> list[dict[str, Any]]:
        """Return the episodes of a method on a task list."""
        return self._by_method.get((task_list, environment, method), [])

    @cached_property
    def _by_method(self) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
        found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
        for row in self.episodes:
            found.setdefault((row["panel"], row["environment"], row["method"]), []).append(row)
        return found


def read_recorded(folder: Path) -> RecordedStudy:
    """Read a study's folder. The study may be unfinished.

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
    """Return a number of each episode by seed and task, averaged over the samples of a task.

    Args:
        episodes: Episodes of one method on one task list.
        key: `success`, `score`, `turns` or `invalid`.
    """
    found: dict[int, dict[str, list[float]]] = {}
    for row in episodes:
        found.setdefault(row["seed"], {}).setdefault(row["task"], []).append(float(row[key]))
    return {
        seed: {task: fmean(values) for task, values in tasks.items()} for seed, tasks in sorted(found.items())
    }


def shared(*tables: Scores) -> tuple[list[int], list[str]]:
    """Return the seeds that all tables have, and the tasks that all tables have under each of these seeds."""
    first, *others = tables
    seeds = [seed for seed in first if all(seed in other for other in others)]
    scored = [each[seed].keys() for each in tables for seed in seeds]
    tasks = [task for task in sorted(first[seeds[0]]) if all(task in one for one in scored)] if seeds else []
    return seeds, tasks


def rows_of(values: Scores, together: Sequence[Sequence[int]], tasks: Sequence[str]) -> list[list[float]]:
    """Average scores over groups of seeds. The result has a row for each group and a column for each task."""
    return [[fmean(values[seed][task] for seed in seeds) for task in tasks] for seeds in together]


def with_means(tables: Mapping[str, Scores], means: Mapping[str, Sequence[str]]) -> dict[str, Scores]:
    """Return the scores of each method and of each mean. A mean uses the seeds and tasks that its methods share."""
    found = dict(tables)
    for name, methods in means.items():
        members = [tables.get(method, {}) for method in methods]
        seeds, tasks = shared(*members) if all(members) else ([], [])
        found[name] = {
            seed: {task: fmean(member[seed][task] for member in members) for task in tasks} for seed in seeds
        }
    return found


def _pairs(settings: Mapping[str, Any], key: str, file: Path) -> list[list[Side]]:
    """Return the comparisons under a key of a study file."""
    named = settings.get(key) or []
    found: list[list[Side]] = check_shape(named, list[_TwoSides], f"{file}: {key}", RunError, REMEDY)
    return found


def read_cells(file: Path) -> list[dict[str, Any]]:
    """Return the rows of `cells.json`.

    Raises:
        RunError: If the file is malformed.
    """
    text = read_text(file, RunError, REMEDY)
    found: list[dict[str, Any]] = check_shape(
        parse_json(text, str(file), RunError, REMEDY), list[CellRow], str(file), RunError, REMEDY
    )
    return found


def protocols_of(folder: Path, cells: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the stamp of each method's scores, from the scoring run of its first finished test cell.

    If that run is deleted, the record in `protocols.json` is used.
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
"""Sections of a recipe that decide from which model a run starts."""

Bases = Mapping[int, str]
"""Base model that each seed starts from. A seed that is not listed has a base model of its own."""


def bases_of(settings: Mapping[str, Any]) -> dict[int, str]:
    """Return the base model of each seed. Seeds with equal `by_seed` values of `base` and `model` share a base model.

    If `by_seed` has neither section, seeds with equal values of all its settings share a base model.

    Args:
        settings: Settings of the study file, including defaults.

    Returns:
        Base model of each seed. The result is empty if all seeds share one base model, since the seeds are then the
        only sample.
    """
    keys = _keys(settings) or list(settings.get("by_seed") or {})
    found = _values(settings, keys)
    return found if len(set(found.values())) > 1 else {}


def has_one_base(settings: Mapping[str, Any], cells: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether all seeds start from one base model that the study trains or names.

    Args:
        settings: Settings of the study file, including defaults.
        cells: Cells of one environment.
    """
    keys = _keys(settings)
    is_own = bool(keys) or any(row.get("makes_base") for row in cells)
    return is_own and len(set(_values(settings, keys).values())) <= 1


def seeds_by_base(seeds: Sequence[int], bases: Bases) -> list[list[int]]:
    """Return the seeds grouped by base model, in the order of each group's first seed."""
    found: dict[str, list[int]] = {}
    for seed in seeds:
        found.setdefault(bases.get(seed, f"seed {seed}"), []).append(seed)
    return list(found.values())


def _keys(settings: Mapping[str, Any]) -> list[str]:
    return [key for key in settings.get("by_seed") or {} if key.partition(".")[0] in _OF_THE_BASE]


def _values(settings: Mapping[str, Any], keys: Sequence[str]) -> dict[int, str]:
    """Return the values of these keys for each seed, as text; if there are more seeds than values, values repeat."""
    given = settings.get("by_seed") or {}
    return {
        seed: repr([given[key][index % len(given[key])] for key in keys])
        for index, seed in enumerate(settings.get("seeds") or [])
    }
