"""Stages that several cells of a study share: one cell runs each, and the others copy it.

What runs of other studies have finished is taken over too.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from perturn.chat.model_names import is_local
from perturn.config.outside_files import named_inputs
from perturn.config.recipe import Recipe, read_recipe
from perturn.config.stages import Stage, is_read, stages
from perturn.data.file_seals import read_manifest
from perturn.data.run_folder import Run, counted_settings
from perturn.data.run_paths import RunPaths
from perturn.errors import ConfigError, check_known
from perturn.run.recorded_inputs import changes
from perturn.study.cells import Cell
from perturn.study.settings import Study


@dataclass(frozen=True)
class Source:
    """A run that makes a stage too."""

    folder: Path
    alike: tuple[str, ...]
    """Stages it needs that are the same in both runs."""


Sources = dict[str, list[Source]]
"""Stages, each with the other runs that make the same."""


def identities(recipe: Recipe) -> dict[str, str]:
    """Return a digest for each stage, of its name and of all settings that it and the stages before it read.

    Stages of two recipes with equal digests make equal files, apart from effects of timing. Stages without
    settings to read are left out.
    """
    counted = counted_settings(recipe)
    found = {}
    for stage in stages(recipe):
        read = {key: value for key, value in counted.items() if is_read(key, stage.reads)}
        if stage.reads:
            text = json.dumps([stage.name, stage.policy, read], sort_keys=True, default=str)
            found[stage.name] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return found


def unsure_inputs(folder: Path, recipe: Recipe) -> list[str]:
    """Return settings that may name something else than when a run was made.

    They are the inputs that have changed. Where an earlier version recorded none, they are all data and models of the
    user's; what an environment reads counts as unchanged then.
    """
    recorded = (read_manifest(folder) or {}).get("inputs")
    if recorded is not None:
        return [each.setting for each in changes(recorded)]
    named = [each for each in named_inputs(recipe) if not is_read(each.setting, ["environment"])]
    return [
        each.setting
        for each in named
        if each.kind in ("path", "rows") or (each.kind == "model" and is_local(each.text))
    ]


class Sharing:
    """Stages that the cells of a study share, and the finished ones among them."""

    def __init__(self) -> None:
        self._identities: dict[Path, dict[str, str]] = {}
        self._makers: dict[str, list[Path]] = defaultdict(list)
        self._done: set[str] = set()
        self._lent: set[str] = set()

    def lend(self, folder: Path, recipe: Recipe) -> None:
        """Note the stages that a run of another study has finished; unfinished ones are not waited for.

        Stages are left out if an input has changed since, or may have changed.
        """
        self._identities[folder] = theirs = identities(recipe)
        files = unsure_inputs(folder, recipe)
        unsure = {stage.name for stage in stages(recipe) if any(is_read(key, stage.reads) for key in files)}
        held = held_stages(folder) - unsure
        for identity in (identity for name, identity in theirs.items() if name in held):
            self._makers[identity].append(folder)
            self._done.add(identity)
            self._lent.add(identity)

    def add(self, cell: Cell) -> None:
        """Take a cell into account."""
        if cell.folder in self._identities:
            return
        self._identities[cell.folder] = own = identities(cell.recipe)
        for identity in own.values():
            self._makers[identity].append(cell.folder)
        self.look(cell)

    def look(self, cell: Cell) -> None:
        """See which stages the run of a cell has finished by now."""
        own = self._identities[cell.folder]
        self._done.update(own[name] for name in done_stages(cell.folder) if name in own)

    def to_make(self, cell: Cell) -> set[str]:
        """Return identities of a cell's stages that no run has finished."""
        return set(self._identities[cell.folder].values()) - self._done

    def counts(self, cells: Collection[Cell]) -> tuple[int, int, int]:
        """Return stages of all runs; the distinct ones among them, which other studies have or this study makes.

        Returns:
            How many there are, how many are made, and how many other studies have.
        """
        own = [self._identities[cell.folder] for cell in cells]
        different = {identity for each in own for identity in each.values()}
        total, lent = sum(len(cell.stages) for cell in cells), len(different & self._lent)
        return total, total - sum(map(len, own)) + len(different) - lent, lent

    def sources(self, cell: Cell) -> Sources:
        """Return the other runs that make a cell's stages."""
        own, found = self._identities[cell.folder], {}
        for stage in stages(cell.recipe):
            others = [
                folder for folder in self._makers.get(own.get(stage.name, ""), ()) if folder != cell.folder
            ]
            found[stage.name] = [Source(folder, self._alike(own, folder, stage)) for folder in others]
        return found

    def _alike(self, own: Mapping[str, str], folder: Path, stage: Stage) -> tuple[str, ...]:
        theirs = self._identities[folder]
        return tuple(need for need in stage.needs if need in own and own[need] == theirs.get(need))


def done_stages(folder: Path) -> set[str]:
    """Return the stages that a run has finished; none where there is no run."""
    manifest = read_manifest(folder) if folder.is_dir() else None
    return {name for name, note in (manifest or {"stages": {}})["stages"].items() if note.get("done")}


def held_stages(folder: Path) -> set[str]:
    """Return the stages that a run has finished and whose files are there, every one."""
    files = (read_manifest(folder) or {}).get("files", {})
    gone = {one["stage"] for file, one in files.items() if not (folder / file).is_file()}
    return done_stages(folder) & {one["stage"] for one in files.values()} - gone


def take_over(run: Run, stage: Stage, sources: Sources) -> bool:
    """Take a stage over from the first run that has finished it; whether one has."""
    return any(run.take_over(stage.name, each.folder, each.alike) for each in sources.get(stage.name, ()))


_log = logging.getLogger(__name__)


def lent_runs(study: Study) -> Iterator[tuple[Path, Recipe]]:
    """Yield runs of the studies that a study shares with, with their recipes.

    A run whose recipe this version cannot read is left out, and a warning names it.

    Raises:
        ConfigError: If one of these studies is not there.
    """
    for name in study.share:
        for folder in _runs(study, name):
            if not RunPaths(folder).is_run:
                continue
            try:
                recipe = read_recipe(RunPaths(folder).recipe)
            except ConfigError as error:
                _log.warning(
                    "share: nothing is taken over from %s, whose recipe cannot be read: %s", folder, error
                )
                continue
            yield folder, recipe


def _runs(study: Study, name: str) -> list[Path]:
    """Return the folders of the runs of another study; none where its results alone are left."""
    other = study.folder.parent / name
    if (other / "cells.json").is_file() and not (other / "runs").is_dir():
        _log.warning("share: the runs of study %s are gone, so nothing is taken over from it", name)
        return []
    known = {each.parent.name for each in study.folder.parent.glob("*/runs")} - {study.name}
    check_known(name, known, f"share: study {name!r} has no runs in {other / 'runs'}")
    return sorted((other / "runs").iterdir())
