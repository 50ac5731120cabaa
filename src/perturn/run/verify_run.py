"""Check that no sealed file of a run folder has changed, and name the remedies for changed files (`perturn verify`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from perturn.config.recipe import Recipe
from perturn.config.stages import Stage, average_of, mark, reward_model_of, stages
from perturn.data.file_seals import Damage, find_damage, own_digest, read_manifest
from perturn.data.run_folder import resolve_recipe
from perturn.data.run_paths import OPTIMIZER, RunPaths, begun
from perturn.errors import RunError
from perturn.run.checkpoint_retention import goes_on, keeps_average
from perturn.run.execute import made_from
from perturn.run.recorded_inputs import changes
from perturn.table import locate


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
    """Hash every sealed file of a run folder, and all inputs that exist on this machine.

    Nothing is written, and the run may be working at the same time.

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
    recipe = resolve_recipe(folder)
    if missing := _missing(RunPaths(folder), recipe, one.stage):
        return (
            f"restore what {one.stage} made from a copy; it cannot be made again with what follows from it, since "
            f"{missing} was not kept."
        )
    paths = " ".join(made_from(folder, recipe, seals, one.stage))
    removal = f"rm -r {paths} && " if paths else ""
    return (
        f"restore what {one.stage} made from a copy; or have it made again, with all that follows from it: "
        f"{removal}perturn run {folder}"
    )


def _missing(paths: RunPaths, recipe: Recipe, name: str) -> Path | None:
    """Return the first missing file that a stage, or a stage that depends on it, would read."""
    again, made = {name}, set[Path]()
    for stage in stages(recipe):
        if stage.name != name and not again.intersection(stage.needs):
            continue
        again.add(stage.name)
        for path in _read_by(paths, recipe, stage):
            if path not in made and not path.exists():
                return path
        made |= _made_by(paths, recipe, stage)
    return None


def _read_by(paths: RunPaths, recipe: Recipe, stage: Stage) -> list[Path]:
    """Return the policies, optimizers and learned quantities that a stage reads and that a run may have deleted."""
    trains = stage.command == "train"
    policies = [stage.start, stage.reference] if trains else [stage.policy]
    found = [paths.checkpoint(policy) for policy in policies if policy not in ("", "base")]
    if stage.command == "credit" and recipe.reward_model is not None:
        found.append(paths.checkpoint(reward_model_of(recipe, stage.iteration)))
    if stage.iteration == 1:
        return found
    if stage.command == "credit":
        found += [paths.carried(name, mark(recipe, stage.iteration - 1)) for name in _carried(recipe)]
    if stage.section == "align" and goes_on(recipe):
        found.append(paths.checkpoint(stage.start) / OPTIMIZER[0])
    return found


def _made_by(paths: RunPaths, recipe: Recipe, stage: Stage) -> set[Path]:
    """Return the policies, optimizers and learned quantities that a stage makes."""
    if stage.command == "credit":
        return {paths.carried(name, stage.mark) for name in _carried(recipe)}
    if stage.command != "train":
        return set()
    made = paths.checkpoint(stage.policy)
    average = {paths.checkpoint(average_of(recipe, stage.iteration))} if keeps_average(recipe) else set()
    return {made, made / OPTIMIZER[0], *average}


def _carried(recipe: Recipe) -> list[str]:
    """Return the names of the credit's quantities that are learned across iterations."""
    assert recipe.align is not None
    _, credit = locate("perturn.training.credit_choice:named_credit")(recipe.align.loss, recipe.credit)
    found: list[str] = locate("perturn.quantities:carried_by")(credit.needs)
    return found


def print_verified(found: Verified, console: Console) -> None:
    """Print the result of a verification."""
    for one in found.damaged:
        console.print(f"damaged: {one.file} {one.problem}", style="red", markup=False, soft_wrap=True)
    for remedy in found.remedies:
        console.print(f"- {remedy}", markup=False, soft_wrap=True)
    manifest = RunPaths(Path(found.run)).manifest.name
    whole = found.sealed - sum(one.file != manifest for one in found.damaged)
    console.print(f"{found.run}: {whole} of {found.sealed} finished files are undamaged", soft_wrap=True)
    for change in found.changed_inputs:
        console.print(f"changed input: {change}", style="yellow", markup=False, soft_wrap=True)
    if found.unsealed:
        console.print(f"not checked: {', '.join(found.unsealed)}", style="dim", markup=False, soft_wrap=True)
