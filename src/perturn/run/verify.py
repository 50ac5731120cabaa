"""Whether every byte of a run folder is what was written, and what to do where it is not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from perturn.data.paths import RunPaths, begun
from perturn.data.run_folder import resolve_recipe
from perturn.data.seals import Damage, find_damage, own_digest, read_manifest
from perturn.errors import RunError
from perturn.run.loop import made_from
from perturn.settings.stages import Stage, stages


@dataclass(frozen=True)
class Verified:
    """Result of a verification."""

    run: str
    sealed: int
    """Files that were compared with what was written."""
    damaged: list[Damage]
    unsealed: list[str]
    """Files of which nothing is known: of stages that are not done, reports, and what others put there."""
    remedies: list[str]
    """Remedies for the damage, a sentence each."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)


def verify(folder: Path) -> Verified:
    """Hash every finished file of a run folder; nothing is written, and the run may be at work.

    Raises:
        RunError: If it is no run folder, or nothing in it is finished.
    """
    own = begun(folder).manifest
    manifest = read_manifest(folder)
    if not manifest or not manifest.get("files"):
        raise RunError(
            f"{folder} has no sealed file to verify: no stage is done, or an older version made it."
        )
    seals = manifest["files"]
    damaged = find_damage(folder, seals, thorough=True)
    remedies = [_remedy(folder, seals, one) for one in damaged]
    if manifest.get("sha256") != own_digest(manifest):
        damaged.insert(0, Damage(own.name, None, "has other content than was written"))
        remedies.insert(0, f"restore {own} from a copy; its counts and times cannot be relied on.")
    files = (str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file())
    unsealed = [file for file in files if file not in seals and file != own.name]
    return Verified(str(folder), len(seals), damaged, unsealed, list(dict.fromkeys(remedies)))


def _remedy(folder: Path, seals: dict[str, Any], one: Damage) -> str:
    if one.file == RunPaths(folder).recipe.name:
        return f"restore {folder / one.file} from a copy; without its recipe nothing of the run can be relied on."
    if one.stage is None:
        return f"restore {folder / one.file} from a copy, or remove it; reports then lack what it says."
    recipe = resolve_recipe(folder)
    if not _can_be_redone(RunPaths(folder), stages(recipe), one.stage):
        return (
            f"restore what {one.stage} made from a copy; it cannot be made again, since the policy that it starts from "
            "was not kept."
        )
    paths = " ".join(made_from(folder, recipe, seals, one.stage))
    removal = f"rm -r {paths} && " if paths else ""
    return (
        f"restore what {one.stage} made from a copy; or have it made again, with all that follows from it: "
        f"{removal}perturn run {folder}"
    )


def _can_be_redone(paths: RunPaths, planned: Iterable[Stage], name: str) -> bool:
    """Whether the policy that a stage begins with, or that acts in it, is still there."""
    for stage in planned:
        if stage.name == name:
            policy = stage.start if stage.command == "train" else stage.policy
            return policy in ("", "base") or paths.checkpoint(policy).is_dir()
    return True


def print_verified(found: Verified, console: Console) -> None:
    """Print what was found."""
    for one in found.damaged:
        console.print(f"damaged: {one.file} {one.problem}", style="red", markup=False, soft_wrap=True)
    for remedy in found.remedies:
        console.print(f"- {remedy}", markup=False, soft_wrap=True)
    manifest = RunPaths(Path(found.run)).manifest.name
    whole = found.sealed - sum(one.file != manifest for one in found.damaged)
    console.print(
        f"{found.run}: {whole} of {found.sealed} finished files are what was written", soft_wrap=True
    )
    if found.unsealed:
        console.print(f"not covered: {', '.join(found.unsealed)}", style="dim", markup=False, soft_wrap=True)
