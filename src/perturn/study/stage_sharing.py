"""Find the stages that cells of a study share. One cell runs a shared stage, and the others copy its files.

Finished stages of other studies are copied too.
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
from perturn.config.recipe_difference import counted_settings
from perturn.config.stages import Stage, is_read, stages
from perturn.data.file_seals import done_stages, read_manifest
from perturn.data.run_folder import Run
from perturn.data.run_paths import RunPaths
from perturn.errors import ConfigError, check_known
from perturn.run.recorded_inputs import changes
from perturn.study.cells import Cell
from perturn.study.settings import Study


@dataclass(frozen=True)
class Source:
    """A run with the same stage."""

    folder: Path
    equal: tuple[str, ...]
    """Stages needed by the shared stage that are the same in both runs."""


Sources = dict[str, list[Source]]
"""Names of stages, each with the other runs that have the same stage."""


def identities(recipe: Recipe) -> dict[str, str]:
    """Return a digest of each stage: of its name, and of all settings that affect it or a stage before it.

    Stages with equal digests write equal files, apart from effects of timing. Stages that read no settings are left
    out.
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
    """Return the settings whose files, data or models may have changed since a run was made.

    If the run recorded its inputs, these are the inputs that have changed. Runs of earlier versions recorded none. Then
    all local data and models may have changed, except files that the environment reads.
    """
    recorded = read_manifest(folder).get("inputs")
    if recorded is not None:
        return [each.setting for each in changes(recorded)]
    named = [each for each in named_inputs(recipe) if not is_read(each.setting, ["environment"])]
    return [
        each.setting
        for each in named
        if each.kind in ("path", "rows") or (each.kind == "model" and is_local(each.text))
    ]


class Sharing:
    """Registry of the stages that cells share, and of the stages that are finished."""

    def __init__(self) -> None:
        self._identities: dict[Path, dict[str, str]] = {}
        self._makers: dict[str, list[Path]] = defaultdict(list)
        self._done: set[str] = set()
        self._lent: set[str] = set()

    def lend(self, folder: Path, recipe: Recipe) -> None:
        """Register the finished stages of a run of another study. Its unfinished stages are ignored.

        A stage is left out if one of its inputs has changed or may have changed.
        """
        self._identities[folder] = theirs = identities(recipe)
        files = unsure_inputs(folder, recipe)
        unsure = {stage.name for stage in stages(recipe) if any(is_read(key, stage.reads) for key in files)}
        written = {one["stage"] for one in read_manifest(folder)["files"].values()}
        held = (held_stages(folder) & written) - unsure
        for identity in (identity for name, identity in theirs.items() if name in held):
            self._makers[identity].append(folder)
            self._done.add(identity)
            self._lent.add(identity)

    def add(self, cell: Cell) -> None:
        """Register the stages of a cell."""
        if cell.folder in self._identities:
            return
        self._identities[cell.folder] = own = identities(cell.recipe)
        for identity in own.values():
            self._makers[identity].append(cell.folder)
        self.look(cell)

    def look(self, cell: Cell) -> None:
        """Register the stages that the run of a cell has finished by now."""
        own = self._identities[cell.folder]
        self._done.update(own[name] for name in held_stages(cell.folder) if name in own)

    def to_make(self, cell: Cell) -> set[str]:
        """Return the digests of a cell's stages that no run has finished."""
        return set(self._identities[cell.folder].values()) - self._done

    def weights(self, cell: Cell) -> dict[str, str]:
        """Return digests of the weights that the stages of a cell's run have written.

        Returns:
            SHA-256 digests, by the name of the stage and a digest of its settings. Equal keys with unequal values are
            two trainings of one stage, for example on unequal hardware. Of iterations there are none.
        """
        manifest = read_manifest(cell.folder)
        found = {}
        for name, identity in self._identities[cell.folder].items():
            sealed = sorted(
                (file, one["sha256"])
                for file, one in manifest["files"].items()
                if one["stage"] == name and file.endswith(".safetensors")
            )
            if sealed:
                found[f"{name}-{identity[:8]}"] = hashlib.sha256(json.dumps(sealed).encode()).hexdigest()
        return found

    def counts(self, cells: Collection[Cell]) -> tuple[int, int, int]:
        """Count the stages of all cells, the distinct stages to run, and the stages copied from other studies.

        Returns:
            Number of stages of all cells, number of distinct stages that this study runs, and number of distinct stages
            that are copied from other studies.
        """
        own = [self._identities[cell.folder] for cell in cells]
        different = {identity for each in own for identity in each.values()}
        total, lent = sum(len(cell.stages) for cell in cells), len(different & self._lent)
        return total, total - sum(map(len, own)) + len(different) - lent, lent

    def sources(self, cell: Cell) -> Sources:
        """Return the other runs that have stages in common with a cell, by stage."""
        own, found = self._identities[cell.folder], {}
        for stage in stages(cell.recipe):
            others = [
                folder for folder in self._makers.get(own.get(stage.name, ""), ()) if folder != cell.folder
            ]
            found[stage.name] = [Source(folder, self._equal(own, folder, stage)) for folder in others]
        return found

    def _equal(self, own: Mapping[str, str], folder: Path, stage: Stage) -> tuple[str, ...]:
        theirs = self._identities[folder]
        return tuple(need for need in stage.needs if need in own and own[need] == theirs.get(need))


def held_stages(folder: Path) -> set[str]:
    """Return the names of the finished stages of a run whose files all exist, and of those without files."""
    manifest = read_manifest(folder)
    gone = {one["stage"] for file, one in manifest["files"].items() if not (folder / file).is_file()}
    return done_stages(manifest) - gone


def take_over(run: Run, stage: Stage, sources: Sources) -> bool:
    """Copy a stage from the first run that has finished it. Return whether such a run was found."""
    return any(run.take_over(stage.name, each.folder, each.equal) for each in sources.get(stage.name, ()))


_log = logging.getLogger(__name__)


def lent_runs(study: Study) -> Iterator[tuple[Path, Recipe]]:
    """Yield the runs of the studies named in `share`, each with its recipe.

    A run whose recipe this version cannot read is left out, and a warning names it.

    Raises:
        ConfigError: If one of these studies does not exist.
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
    """Return the folders of the runs of another study; empty if only the results of that study are left."""
    other = study.folder.parent / name
    if (other / "cells.json").is_file() and not (other / "runs").is_dir():
        _log.warning("share: the runs of study %s are gone, so nothing is taken over from it", name)
        return []
    known = {each.parent.name for each in study.folder.parent.glob("*/runs")} - {study.name}
    check_known(name, known, f"share: study {name!r} has no runs in {other / 'runs'}")
    return sorted((other / "runs").iterdir())
