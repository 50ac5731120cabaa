"""Check that no sealed file of a run folder has changed, and name the remedies for changed files (`perturn verify`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console

from perturn.data.file_seals import Damage, find_damage, own_digest, read_manifest
from perturn.data.run_folder import resolve_recipe
from perturn.data.run_paths import RunPaths, begun
from perturn.errors import ConfigError, RunError
from perturn.io.user_code import user_code
from perturn.run.checkpoint_retention import first_missing
from perturn.run.execute import made_from
from perturn.run.recorded_inputs import changes


@dataclass(frozen=True)
class Verified:
    """Result of a verification."""

    run: str
    sealed: int
    """Number of checked files."""
    damaged: list[Damage]
    unsealed: list[str]
    """Files that are not checked: files of unfinished stages, reports, and files of other programs."""
    remedies: list[str]
    """Remedies for the damage, one sentence each."""
    changed_inputs: list[str]
    """Changes of inputs from outside the run folder, one sentence each. They do not count as damage."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON data."""
        return asdict(self)


def verify(folder: Path) -> Verified:
    """Check every sealed file of a run folder and all inputs that exist on this machine, by size and SHA-256.

    Nothing is written, and no code of the run is imported. The run may be working at the same time.

    Raises:
        RunError: If the folder is not a run folder, or has no sealed file.
    """
    own = begun(folder).manifest
    manifest = read_manifest(folder)
    if not manifest["files"]:
        raise RunError(
            f"{folder} has no sealed file to verify: no stage is done, or an older version made it."
        )
    seals = manifest["files"]
    damaged = find_damage(folder, seals, thorough=True)
    with user_code(False, "Restore it from a copy."):
        remedies = [_remedy(folder, seals, one) for one in damaged]
    if manifest.get("sha256") != own_digest(manifest):
        damaged.insert(0, Damage(own.name, None, "has other content than was written"))
        remedies.insert(0, f"restore {own} from a copy; its counts and times cannot be relied on.")
    files = (str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file())
    unsealed = [file for file in files if file not in seals and file != own.name]
    inputs = [str(each) for each in changes(manifest.get("inputs") or {}, thorough=True) if not each.gone]
    return Verified(str(folder), len(seals), damaged, unsealed, list(dict.fromkeys(remedies)), inputs)


def _remedy(folder: Path, seals: dict[str, Any], one: Damage) -> str:
    if one.file == RunPaths(folder).recipe.name:
        return f"restore {folder / one.file} from a copy; without its recipe nothing of the run can be relied on."
    if one.stage is None:
        return f"restore {folder / one.file} from a copy, or remove it; reports then lack what it says."
    try:
        recipe = resolve_recipe(folder)
    except ConfigError:
        return (
            f"restore what {one.stage} made from a copy; the recipe names code or is wrong, so no command to make it "
            "again is known."
        )
    if missing := first_missing(RunPaths(folder), recipe, one.stage):
        return (
            f"restore what {one.stage} made from a copy; it cannot be made again with what follows from it, since "
            f"{missing} was not kept."
        )
    paths = " ".join(made_from(folder, recipe, seals, one.stage))
    removal = f"rm -r {paths} && " if paths else ""
    return (
        f"restore what {one.stage} made from a copy; or have it made again, with all that follows from it: "
        f"{removal}perturn run {quote(str(folder))}"
    )


def print_verified(found: Verified, console: Console) -> None:
    """Print the result of a verification."""
    for one in found.damaged:
        console.print(f"damaged: {one.file} {one.problem}", style="red", markup=False, soft_wrap=True)
    for remedy in found.remedies:
        console.print(f"- {remedy}", markup=False, soft_wrap=True)
    manifest = RunPaths(Path(found.run)).manifest.name
    whole = found.sealed - sum(one.file != manifest for one in found.damaged)
    console.print(
        f"{found.run}: {whole} of {found.sealed} finished files are undamaged", markup=False, soft_wrap=True
    )
    for change in found.changed_inputs:
        console.print(f"changed input: {change}", style="yellow", markup=False, soft_wrap=True)
    if found.unsealed:
        console.print(f"not checked: {', '.join(found.unsealed)}", style="dim", markup=False, soft_wrap=True)
