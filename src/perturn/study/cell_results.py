"""Read results of cells from the folders of their runs, and choose the best point of a sweep."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Literal

from perturn.data.episode_outcomes import Outcome, read_outcomes
from perturn.data.file_seals import read_manifest, sealed_digests
from perturn.data.run_files import read_note
from perturn.data.run_paths import RunPaths
from perturn.io.atomic_write import write_whole
from perturn.run.policy_origin import Maker
from perturn.study.cells import Cell, Point
from perturn.study.stage_sharing import held_stages

TaskListName = Literal["tune", "test"]
_SCORED = "scored.json"
"""File in the folder of a score that records the digests of the scored weights."""
TASK_LISTS: tuple[TaskListName, ...] = ("tune", "test")


def is_done(cell: Cell, task_list: TaskListName) -> bool:
    """Return whether a cell's run is finished and, for the test tasks, whether its policy is scored too.

    A stage is not finished if one of its files was removed.
    """
    whole = held_stages(cell.folder) >= set(cell.stages)
    if not whole or task_list == "tune":
        return whole
    return "evaluate-base" in held_stages(cell.scored) and not _is_stale(cell)


def forget_stale(cell: Cell) -> None:
    """Remove the score of a cell whose policy has been trained again.

    The manifest goes first and the digests of the weights last, so a score that was removed in part is still stale.
    """
    if not _is_stale(cell):
        return
    RunPaths(cell.scored).manifest.unlink(missing_ok=True)
    for each in sorted(cell.scored.iterdir()):
        if each.is_dir():
            shutil.rmtree(each)
        elif each.name != _SCORED:
            each.unlink()
    shutil.rmtree(cell.scored)


def note_scored(cell: Cell) -> None:
    """Record the digests of the scored weights in the folder of a cell's score."""
    write_whole(cell.scored / _SCORED, json.dumps(_weights(cell)) + "\n")


def _is_stale(cell: Cell) -> bool:
    """Return whether a cell was scored with other weights, or other inputs of its selector, than it has now.

    A score without recorded digests counts as current.
    """
    noted = read_note(cell.scored / _SCORED, dict[str, str])
    return noted is not None and noted != _weights(cell)


def _weights(cell: Cell) -> dict[str, str]:
    """Return SHA-256 digests of a cell's policy and of its selector's inputs, by path in the run.

    The result is empty for a model that no run trains.
    """
    maker, scoring = Maker(cell.folder, cell.recipe, cell.policy), cell.scoring_recipe(cell.policy).evaluate
    needs = scoring.needs if scoring else frozenset()
    paths, read = maker.paths, [maker.paths.checkpoint(cell.policy)]
    read += [maker.explored] if "explored" in needs else []
    read += [paths.checkpoint(maker.start)] if "start" in needs and maker.start else []
    names = {paths.name(each) for each in read}
    return sealed_digests(read_manifest(cell.folder), names)


def seconds(cell: Cell, task_list: TaskListName) -> float:
    """Return the time of all stages of a cell in seconds, including stages that were copied from other runs."""
    folders = [cell.folder] if task_list == "tune" else [cell.folder, cell.scored]
    found = [
        float(note.get("seconds", 0.0))
        for folder in folders
        for note in read_manifest(folder)["stages"].values()
    ]
    return round(sum(found), 1)


def peak_gb(cell: Cell) -> float:
    """Return the peak memory of a cell's run, in GB."""
    return max(
        (float(note.get("peak_memory_gb", 0.0)) for note in read_manifest(cell.folder)["stages"].values()),
        default=0.0,
    )


def outcomes(cell: Cell, task_list: TaskListName) -> list[Outcome]:
    """Return the episodes of a cell's policy on a task list, sorted by task."""
    paths = RunPaths(cell.folder if task_list == "tune" else cell.scored)
    return sorted(
        read_outcomes(paths.evaluation(cell.policy if task_list == "tune" else "base")),
        key=lambda one: one.task,
    )


def choose(scores: Iterable[tuple[Point, Sequence[Outcome]]]) -> Point | None:
    """Return the point with the best mean success over its seeds and tasks; the first of several equal points.

    Args:
        scores: Points that were finished on every seed, each with its episodes.
    """
    means = [(fmean(one.success for one in episodes), point) for point, episodes in scores]
    return max(means, key=lambda each: each[0])[1] if means else None
