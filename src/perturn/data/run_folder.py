"""The run folder, with its lock, resolved recipe and manifest."""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from perturn.config.parsing import dotted, to_yaml
from perturn.config.recipe import Recipe, read_mapping, read_recipe
from perturn.config.recipe_difference import difference
from perturn.config.shipped_recipes import shipped_recipe
from perturn.config.stages import Stage, stages
from perturn.data.file_seals import (
    digests_of_stages,
    own_digest,
    read_manifest,
    refuse_damage,
    seal,
    without_removed,
)
from perturn.data.input_digests import Inputs, same_inputs
from perturn.data.recorded_code import code_files
from perturn.data.run_files import as_scored, commit, hardware, read_note, versions, with_lost_time
from perturn.data.run_lock import RunLock
from perturn.data.run_paths import RunPaths, begun, checkpoint_of, is_data
from perturn.errors import RunError, StorageError
from perturn.faults import plain_scalar
from perturn.free_memory import memory_in_use
from perturn.io.atomic_write import is_stray, link_whole, remove_strays, write_whole, writing
from perturn.io.plain_data import error_text
from perturn.io.read_input import user_path
from perturn.train_processes import holds_run

_log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
"""Seconds between two updates of `progress.json` while a stage runs."""


class Run:
    """A run folder, which this process locks until `close`.

    Opening a folder never overwrites the results of another recipe. Of processes that train together, only the first
    process holds the lock and reads the manifest. If a driver started them (the setting `launch`), the driver holds the
    lock.
    """

    def __init__(self, recipe: Recipe) -> None:
        """Open the recipe's run folder, which is created if missing.

        Raises:
            RunError: If the folder belongs to another recipe, or another process holds its lock.
        """
        self.recipe = recipe
        self.folder = run_folder(recipe)
        self.paths = RunPaths(self.folder)
        self.planned: list[str] = []
        """Stages that this call will run, for `perturn watch`."""
        self.manifest: dict[str, Any] = {"stages": {}, "files": {}}
        self._pulse: _Pulse | None = None
        refuse_other(recipe)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{self.folder} cannot be written: {error}; choose another output=...") from error
        self._lock = RunLock(self.folder)
        try:
            if holds_run():
                self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        """Create missing files, and read the manifest. This process holds the lock."""
        refuse_other(self.recipe)  # checked again, as another process may have made it
        remove_strays(self.folder)
        if not self.paths.is_run:
            write_whole(self.paths.recipe, to_yaml(self.recipe))
        with writing(self.folder):
            for folder in self.paths.folders:
                folder.mkdir(exist_ok=True)
        self.manifest = read_manifest(self.folder)
        if not self.paths.manifest.is_file():
            self.manifest = {
                "recipe": self.recipe.name,
                "seed": self.recipe.seed,
                "commit": commit(),
                "versions": versions(self.recipe),
                "hardware": hardware(),
                "data": {},
                **self.manifest,
            }
        self.manifest["files"], removed = without_removed(self.folder, self.manifest["files"])
        for stage in removed:
            self.reopen(stage)

    def close(self) -> None:
        """Release the lock of the folder."""
        self._lock.release()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_done(self, stage: str) -> bool:
        """Return whether a stage has run to its end."""
        return bool(self.manifest["stages"].get(stage, {}).get("done"))

    def reopen(self, stage: str) -> None:
        """Mark a stage as not done. It will continue from the episodes or rows that it has written."""
        if stage in self.manifest["stages"]:
            self.manifest["stages"][stage]["done"] = False
        files = self.manifest["files"].items()
        self.manifest["files"] = {file: one for file, one in files if one["stage"] != stage}

    def delete(self, paths: Sequence[Path]) -> None:
        """Delete files and folders that are no longer needed. Their stages stay done."""
        if not paths:
            return
        names = tuple(self.paths.name(path) for path in paths)
        within = tuple(f"{name}/" for name in names)
        files = self.manifest["files"].items()
        kept = {file: one for file, one in files if file not in names and not file.startswith(within)}
        # The manifest comes first. After a kill in between, missing files would look like damage.
        self._write_manifest({**self.manifest, "files": kept})
        for path in paths:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def take_over(self, stage: str, theirs: Path, equal: Collection[str] = ()) -> bool:
        """Link the files of a stage that another run has finished, and copy the stage's record and seals.

        Args:
            stage: Name of the stage, which is not done in this run.
            theirs: Folder of the other run, whose stage makes the same files.
            equal: Stages that this stage needs. Both runs must have finished them with equal files.

        Returns: Whether the files were linked: False if the other run has not finished the stage, lacks one of its
            files, has deleted one, or has other inputs.

        Raises:
            RunError: If a file has changed since the other run wrote it.
        """
        other = read_manifest(theirs)
        note, seals = other["stages"].get(stage, {}), other["files"]
        own = {file: one for file, one in seals.items() if one["stage"] == stage}
        if not note.get("done") or not own or not all((theirs / file).is_file() for file in own):
            return False
        if note.get("files", len(own)) != len(own):  # notes of earlier versions lack the number
            return False
        if digests_of_stages(seals, equal) != digests_of_stages(self.manifest["files"], equal):
            return False
        reads = next(each for each in stages(self.recipe) if each.name == stage).reads
        if not same_inputs(self.manifest.get("inputs") or {}, other.get("inputs") or {}, reads):
            return False
        refuse_damage(theirs, own)
        for file in own:
            link_whole(theirs / file, self.folder / file)
        self._take_shared(stage, RunPaths(theirs))
        self.manifest["files"] |= own
        taken_from = os.path.relpath(theirs, self.folder.parent)
        self._note(stage, {**note, "files": len(own), "taken_from": taken_from}, [])
        return True

    def _take_shared(self, name: str, theirs: RunPaths) -> None:
        """Copy what this stage needs from files that several stages of the other run share."""
        stage = next(each for each in stages(self.recipe) if each.name == name)
        if "model" in stage.reads:  # else the vocabularies may differ
            noted = [read_note(paths.tokens, dict[str, str]) or {} for paths in (theirs, self.paths)]
            if noted[0]:
                write_whole(self.paths.tokens, json.dumps(noted[0] | noted[1], ensure_ascii=False) + "\n")
        if stage.command == "evaluate" and theirs.stamp.is_file():
            link_whole(theirs.stamp, self.paths.stamp)

    def note_inputs(self, inputs: Inputs) -> None:
        """Record the digests of the run's inputs in its manifest."""
        self._write_manifest({**self.manifest, "inputs": inputs})

    @contextmanager
    def stage(self, name: str, *makes: Path) -> Iterator[dict[str, Any]]:
        """Run a stage in a `with` block: measure it, and record its end and its files in the manifest.

        If an earlier, interrupted call made its files from other results of earlier stages, they are removed first.

        Args:
            name: Name of the stage.
            makes: Files and folders that are finished when the stage ends.

        Yields:
            A dictionary for the stage's counts. The recorded time includes earlier, interrupted calls.
        """
        counts: dict[str, Any] = {}
        if not holds_run():
            yield counts
            return
        start = time.monotonic()
        before = self._begin_stage(name, makes)
        start -= before.get("seconds") or 0.0
        self._pulse = pulse = _Pulse(
            self.paths.progress, name, self.planned, [each.name for each in stages(self.recipe)], start
        )

        def end(ended: str, error: str = "") -> None:
            entry = {
                "seconds": round(time.monotonic() - start, 1),
                "peak_memory_gb": round(max(before.get("peak_memory_gb", 0.0), pulse.stop()), 2),
                "counts": {name: plain_scalar(count) for name, count in counts.items()},
                "sources": before["sources"],
                "done": ended == "done",
            }
            self._note(name, entry, makes)
            pulse.note(ended=ended, error=error)

        try:
            yield counts
        except BaseException as failure:
            stopped = not isinstance(failure, Exception)  # Ctrl-C
            error = "" if stopped else f"{type(failure).__name__}: {error_text(failure)}"
            try:
                end("stopped" if stopped else "failed", error)
            except StorageError as second:  # the first error matters more
                _log.warning("%s", second)
            raise
        end("done")

    def _begin_stage(self, name: str, makes: Sequence[Path]) -> dict[str, Any]:
        """Return the stage's record, with digests of the files that it is made from. Its files lose their seals.

        Nothing may rely on these files until the stage ends.
        """
        stage = next((each for each in stages(self.recipe) if each.name == name), Stage(name, "", ""))
        # With `staleness`, a background thread may write explored episodes before their stage begins.
        needs = () if self.recipe.staleness and stage.command == "collect" else stage.needs
        sources = digests_of_stages(self.manifest["files"], needs)
        before = {"counts": {}, **with_lost_time(self.manifest["stages"], name, self.paths.progress)}
        left = [path for path in (*makes, self.paths.partial(stage.policy)) if path.exists()]
        # The run may have deleted files that it no longer needs. They do not count as changed.
        recorded = (before.get("sources") or {}).items()
        changed = [file for file, digest in recorded if sources.get(file, digest) != digest]
        if left and changed:
            what = ", ".join(dict.fromkeys(checkpoint_of(file) or file for file in changed))
            names = ", ".join(map(self.paths.name, left))
            _log.warning("%s starts anew, since %s changed; removed: %s", name, what, names)
            self.delete(left)
        entry = {**before, "sources": sources, "done": False}
        sealed = self.paths.unchanged(self.manifest["files"])
        kept = {file: one for file, one in sealed.items() if one["stage"] != name}
        kept |= seal(self.folder, [self.paths.recipe], None, kept)
        begun = {**self.manifest["stages"], name: entry}
        self._write_manifest({**self.manifest, "files": kept, "stages": begun})
        return entry

    def _note(self, stage: str, entry: dict[str, Any], makes: Sequence[Path]) -> None:
        """Record how a stage ended, and seal its files if it is done."""
        files = dict(self.manifest["files"])
        if entry["done"]:
            own = seal(self.folder, makes, stage)
            files |= own | seal(self.folder, self.paths.shared, None, self.paths.unchanged(files))
            entry = {"files": len(own), **entry}
        data = {Path(file).name: one["sha256"] for file, one in files.items() if is_data(file)}
        stages = {**self.manifest["stages"], stage: entry}
        self._write_manifest({**self.manifest, "data": data, "stages": stages, "files": files})

    def _write_manifest(self, manifest: dict[str, Any]) -> None:
        whole = {**manifest, "sha256": own_digest(manifest)}
        write_whole(self.paths.manifest, json.dumps(whole, indent=2) + "\n")
        self.manifest = whole

    def follow(self, left: Callable[[], float | None]) -> None:
        """Record the remaining seconds, which `left` returns, with each update of the running stage's progress."""
        if self._pulse:
            self._pulse.left = left

    def expect(self, file: Path, total: int, done: int = 0, unit: str = "episodes") -> None:
        """Record the goal of the running stage: `total` lines in a file. `done` lines exist already."""
        if self._pulse:
            where = self.paths.name(file)
            self._pulse.note(file=where, total=total, done_before=done, unit=unit, counting_since=time.time())


def resolve_recipe(path: Path | Recipe, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a file or of a run folder, or the given recipe itself. Nothing is written.

    Raises:
        ConfigError: If the recipe is wrong.
        RunError: If the folder is not a run folder.
    """
    if isinstance(path, Recipe):
        return path
    path = user_path(path, "recipe or run folder")
    if not path.is_dir() or (not RunPaths(path).is_run and shipped_recipe(str(path))):
        return read_recipe(path, overrides)
    folder = path if path.name not in ("", "..") else path.resolve()  # `perturn report .`
    file = begun(path).recipe
    where = {"name": folder.name, "output": str(folder.parent), **model_beside(file, folder)}
    own = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in where.items()]
    return read_recipe(file, [*own, *overrides], code_files(path))


def model_beside(file: Path, folder: Path) -> dict[str, str]:
    """Return the setting `model.name` of a recorded recipe whose model is in another run beside the run's folder."""
    flat = dotted(read_mapping(file, "recipe"))
    model, output = (Path(str(flat.get(key))) for key in ("model.name", "output"))
    run, *inside = model.relative_to(output).parts if model.is_relative_to(output) else ("",)
    # With `output: .`, a Hub id is no folder.
    is_there = bool(inside) and RunPaths(folder.parent / run).is_run
    return {"model.name": str(folder.parent.joinpath(run, *inside))} if is_there else {}


def run_folder(recipe: Recipe) -> Path:
    """Return the path of a recipe's run folder."""
    return Path(recipe.output) / recipe.name


def base_of(recipe: Recipe) -> str:
    """Return the name or folder of the model that a run begins with. A run with `base` makes this model itself."""
    return str(RunPaths(run_folder(recipe)).checkpoint("base")) if recipe.base else recipe.model.name


def refuse_other(recipe: Recipe) -> None:
    """Reject a run folder that belongs to another recipe or holds other files."""
    folder, paths = run_folder(recipe), RunPaths(run_folder(recipe))
    if paths.is_run:
        theirs = read_recipe(paths.recipe, moved=code_files(folder))
        found = difference(as_scored(theirs, recipe, paths.stamp), recipe)
        if found is not None:
            raise RunError(
                f"{folder} was made by another recipe: {found}; choose another name (name=...) or remove the folder."
            )
        return
    left = (paths.lock, paths.holder)  # left by a run that was killed before it wrote its recipe
    if folder.is_dir() and not all(each in left or is_stray(each) for each in folder.iterdir()):
        raise RunError(f"{folder} holds files but no {paths.recipe.name}; choose another name (name=...).")


class _Pulse:
    """Thread that updates `progress.json` while a stage runs, as a heartbeat, and measures the peak memory."""

    def __init__(
        self, file: Path, stage: str, steps: Sequence[str], of_recipe: Sequence[str], start: float
    ) -> None:
        self._file, self._start = file, start
        self._facts: dict[str, Any] = {
            "host": platform.node(),
            "pid": os.getpid(),
            "process_started": psutil.Process().create_time(),
            "steps": list(steps),
            "of_recipe": list(of_recipe),
            "stage": stage,
            "began": time.time(),
        }
        self.left: Callable[[], float | None] = lambda: None
        self._lock = threading.Lock()
        self.note()
        self._peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def note(self, **facts: Any) -> None:
        """Add facts, and write all facts to the file."""
        with self._lock:
            self._facts |= {**facts, "spent": round(time.monotonic() - self._start, 1)}
            write_whole(self._file, json.dumps(self._facts) + "\n")
            self._last = time.monotonic()

    def _beat(self) -> None:
        while True:
            self._peak = max(self._peak, memory_in_use())
            if time.monotonic() - self._last > HEARTBEAT_SECONDS:
                self._last = time.monotonic()
                left = self.left()
                timed = {} if left is None else {"seconds_left": left, "measured": time.time()}
                with suppress(StorageError):  # a missing disk does not stop the stage
                    self.note(**timed)
            if self._stop.wait(0.5):
                return

    def stop(self) -> float:
        """Stop the thread, and return the peak memory of this process and its children, in GB."""
        self._stop.set()
        self._thread.join()
        return self._peak / 1e9
