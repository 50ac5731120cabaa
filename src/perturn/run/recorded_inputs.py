"""A run's input files from outside its folder: recorded when the run is made, and compared before any later work.

A mark on a setting's field declares that the setting names files (`perturn.config.outside_files`). An environment lists
further inputs in its trait `reads`. Files that a run makes itself are sealed instead (`perturn.data.file_seals`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from perturn.chat.model_names import BUNDLED, CONVERTED, PACKAGED, base_of
from perturn.chat.template_variants import TEMPLATES
from perturn.config.outside_files import Named, named_inputs, written
from perturn.config.recipe import Recipe
from perturn.config.sections import Section
from perturn.config.stages import stages
from perturn.data.code_inputs import files_beside
from perturn.data.file_seals import done_stages, read_manifest, without_removed
from perturn.data.input_digests import (
    Change,
    Files,
    Inputs,
    compare,
    files_below,
    gather,
    record,
    recorded_files,
)
from perturn.data.run_folder import Run, run_folder
from perturn.data.run_paths import OPTIMIZER
from perturn.display.progress_bars import console
from perturn.errors import ConfigError, DataError, RunError
from perturn.formats.hub_and_parquet import HubName, hub_name, hub_rows
from perturn.io.user_code import load_object, module_files
from perturn.table import guarded, locate
from perturn.table_index import table
from perturn.traits import traits_of

_READERS = {
    "expert": ("collect",),
    "rows": ("pair",),
    "environment": ("collect", "pair", "credit", "evaluate"),
    "evaluate": ("evaluate",),
    "credit": ("credit", "train"),
}
"""Commands whose stages read the files that a section names. Files of other sections are read by all commands."""
_NO_WEIGHTS = ("md", "lock", "log")
"""Suffixes of files in a model's folder that do not affect the policy."""
_BESIDE = " (files that its code names)"
"""Suffix of a setting's key, for the data files that its code names."""
_SAID_FROM = 1 << 30
"""Total size of inputs, in bytes, from which a message says that they are hashed."""


def refuse_changed(recipe: Recipe, command: str | None = None) -> None:
    """Raise an error if an input of a run has changed, or is missing and still needed.

    Nothing is written.

    Args:
        recipe: Recipe of the run.
        command: The single command, such as `train`. None: all stages.
    """
    folder = run_folder(recipe)
    manifest = read_manifest(folder)
    _, removed = without_removed(folder, manifest["files"])
    done = done_stages(manifest) - removed
    for change in changes(manifest.get("inputs") or {}):
        waits = _reader(recipe, change.setting, command, done) if change.gone else None
        if change.gone and waits is None:
            continue
        needed = f", and stage {waits} is still to read it" if waits else ""
        remedy = f"restore {'it' if change.gone else 'the file'}, or "
        if change.elsewhere:
            remedy = f"run the command from where {change.given!r} is a path to {change.was}, or {remedy}"
        raise RunError(
            f"{change}{needed}: {remedy}give the run another name (name=...), or remove {folder} to make it anew."
        )


def changes(recorded: Inputs, thorough: bool = False) -> list[Change]:
    """Return the changes of recorded inputs.

    Args:
        recorded: Recorded inputs from the manifest.
        thorough: Whether to hash every file, whatever its time.
    """
    found = (_change(key, noted, thorough) for key, noted in recorded.items())
    return [each for each in found if each is not None]


def _change(setting: str, noted: Mapping[str, Any], thorough: bool) -> Change | None:
    """Return the change of an input, if any. An input that is missing now is looked up at its recorded path."""
    change = compare(setting, noted, _again(noted, thorough))
    if change is None or not (change.gone and change.elsewhere):
        return change
    left = record(noted["given"], noted["kind"], recorded_files(noted), noted, thorough=thorough)
    there = compare(setting, noted, left)
    return change if there is None or there.gone else there


def _again(noted: Mapping[str, Any], thorough: bool = False) -> dict[str, Any]:
    """Return a new record of an input's current files."""
    given, kind = noted["given"], noted["kind"]
    found = _expand(given, kind) if given else recorded_files(noted)
    return {**noted, **record(given, kind, found, noted, thorough=thorough)}


def _reader(recipe: Recipe, setting: str, command: str | None, done: Collection[str]) -> str | None:
    """Return the first unfinished stage that reads the files of a setting; None if there is none."""
    commands = _READERS.get(re.split(r"\W", setting)[0])
    for stage in stages(recipe):
        asked = command in (None, stage.command) and (commands is None or stage.command in commands)
        if asked and stage.name not in done:
            return stage.name
    return None


def tell_changed(folder: Path) -> None:
    """Print which inputs have changed since the run was made, for readers of its results."""
    for change in changes(read_manifest(folder).get("inputs") or {}):
        if not change.gone:
            console.print(f"{folder}: {change}", style="yellow", markup=False, soft_wrap=True)


def note_inputs(run: Run) -> None:
    """Record the digests of a new run's inputs; for an existing run, update the times of unchanged files.

    Raises:
        PerturnError: If an input cannot be read.
    """
    known = run.manifest.get("inputs")
    if known is None:
        now = _record_all(run.recipe)
    else:
        again = {key: _again(noted) for key, noted in known.items()}
        now = {key: again[key] if again[key]["files"] else noted for key, noted in known.items()}
        _tell_revisions(known)
    if now != known:
        run.note_inputs(now)


def _record_all(recipe: Recipe) -> Inputs:
    """Return the records of all inputs that a recipe names."""
    inside = Path(os.path.abspath(run_folder(recipe)))
    listed = [each for named in named_inputs(recipe) for each in _with_base(named)]
    found = {each.setting: (each.text, each.kind, _expand(each.text, each.kind)) for each in listed}
    found |= {
        f"{each.setting}{_BESIDE}": ("", "reads", _beside(each.text))
        for each in listed
        if each.kind == "code" and each.setting not in ("environment.name", "credit.name")
    }
    for section, kind in (("environment", "environments"), ("credit", "credits")):
        found |= {
            key: ("", "reads", files) for key, files in _read_by(getattr(recipe, section), section, kind)
        }
    kept = {key: (text, kind, files.outside(inside)) for key, (text, kind, files) in found.items()}
    size = sum(file.stat().st_size for *_, files in kept.values() for file in files.files.values())
    if size >= _SAID_FROM:
        console.print(f"hashing {size / 1e9:.1f} GB of inputs, once", style="dim")
    noted = {key: record(text, kind, files) for key, (text, kind, files) in kept.items() if files.files}
    revisions = {each.setting: (each, _revision(each.text)) for each in listed if each.kind == "model"}
    for key, (named, revision) in revisions.items():
        if revision is not None and key not in noted:
            noted[key] = {**record(named.text, "model", Files(Path(), {})), "revision": revision}
    return noted


def _with_base(named: Named) -> Iterator[Named]:
    """Yield an input and, for a folder of adapters, also the base model of the adapters."""
    yield named
    base = base_of(Path(named.text).expanduser()) if named.kind == "model" else None
    if base is not None:
        yield Named(f"{named.setting} (base of the adapters)", base, "model")


def _expand(text: str, kind: str) -> Files:
    """Return the files that the value of a setting names, if any."""
    path = Path(os.path.abspath(os.path.expanduser(text)))
    if kind == "model":
        path = PACKAGED.get(text, path)
        is_folder = text not in CONVERTED and os.path.isdir(path)
        files = [file for file in sorted(path.iterdir()) if _is_of_model(file)] if is_folder else []
        return gather(path, files)
    if kind == "code":
        return gather(*module_files(text)) if ":" in text else gather(path, [])
    if kind == "template" and (text in TEMPLATES or "{{" in text or "{%" in text):
        return gather(path, [])
    if kind == "rows" and not path.exists() and (named := hub_name(text)) is not None:
        return gather(None, _cached(named))
    if text and os.path.isfile(path):
        return gather(path.parent, [path])
    return gather(path, files_below(path) if text and os.path.isdir(path) else [])


def _cached(named: HubName) -> Iterable[Path]:
    """Return the files of a Hub data set in the local cache; none if the data set cannot be loaded now."""
    try:
        return [file for file in hub_rows(named)[1] if file.is_file()]
    except (ConfigError, DataError) as error:
        console.print(str(error), style="yellow", markup=False, soft_wrap=True)
        return ()


def _is_of_model(file: Path) -> bool:
    """Return whether a policy may depend on this file in its model's folder."""
    hidden = (
        file.name.startswith(".") or file.name in OPTIMIZER or file.suffix.removeprefix(".") in _NO_WEIGHTS
    )
    return file.is_file() and not hidden


def _read_by(section: Section | None, key: str, kind: str) -> Iterator[tuple[str, Files]]:
    """Yield the files that a section's class reads besides its settings: files that it declares, or its code names."""
    if section is None:
        return
    name = str(section.get("name"))
    beside = _beside(name)
    entry = load_object(name) if ":" in name else table(kind).get(name)
    reads = traits_of(entry).reads if kind == "environments" else None
    if reads is not None:
        settings = {each: value for each, value in section.items() if each != "name"}
        yield key, gather(None, _all_files(_paths_of(reads, settings, name)))
    else:
        yield f"{key}.name{_BESIDE}", beside


def _paths_of(reads: Any, settings: Mapping[str, Any], name: str) -> list[str | os.PathLike[str]]:
    """Return the paths in the trait `reads` of a class."""
    remedy = "; make it a list of paths, or a function from the settings to one."
    with guarded(f"reads of {name} gives no paths", remedy):
        paths = reads(settings) if callable(reads) else reads
        return [os.fspath(paths)] if isinstance(paths, str | os.PathLike) else list(map(os.fspath, paths))


def _beside(name: str) -> Files:
    """Return the data files that the code of `module:object` names, without files that look like outputs."""
    root, modules = module_files(name) if ":" in name else (Path(), [])
    named = ((file, Path(os.path.relpath(file, root)).parts) for file in files_beside(modules))
    return gather(None, [file for file, parts in named if not any(map(written, parts))])


def _all_files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[Path]:
    """Yield the absolute paths of files, and of all files in folders."""
    for each in paths:
        path = Path(os.path.abspath(os.path.expanduser(each)))
        if path.is_dir():
            yield from files_below(path)
        elif path.is_file():
            yield path


def _revision(name: str) -> str | None:
    """Return the commit of a Hub model in the local cache; None if it is not known."""
    if name in BUNDLED or os.path.exists(name) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return None
    found = locate("huggingface_hub:try_to_load_from_cache")(name, "config.json")
    return Path(found).parent.name if isinstance(found, str) else None


def _tell_revisions(known: Inputs) -> None:
    """Print which Hub models have another commit than when the run was made."""
    for key, noted in known.items():
        before = noted.get("revision")
        now = _revision(noted["given"]) if before else None
        if now is not None and now != before:
            console.print(
                f"{key}: {noted['given']} is at revision {now} in the cache; this run was made with {before}",
                style="yellow",
                markup=False,
                soft_wrap=True,
            )
