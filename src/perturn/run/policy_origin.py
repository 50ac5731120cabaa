"""Find the run that made a policy, the policy that it was trained from, and the episodes explored before.

A run that trains or explores makes its policies itself. If a run only evaluates, its model may be a checkpoint of
another run, which is then the model's maker.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from perturn.chat.model_names import adapters_in, base_of, resolve_model
from perturn.config.recipe import REWARD_MODEL, Recipe
from perturn.config.stages import Stage, explored_before, learned_from, stages
from perturn.data.file_seals import Seals, done_stages, file_digest, read_manifest, refuse_damage
from perturn.data.run_files import Stamp, read_note
from perturn.data.run_folder import Run, resolve_recipe
from perturn.data.run_paths import OPTIMIZER, RunPaths
from perturn.errors import ConfigError, RunError, check_none, within
from perturn.io.read_input import user_path
from perturn.table import locate

Needs = Collection[str]
"""Needs of a selector, as named in `perturn.select.SelectorTraits`. Only `start` and `explored` are used here."""


@dataclass(frozen=True)
class Maker:
    """A run that made a policy."""

    folder: Path
    recipe: Recipe
    policy: str
    """Name of the policy in that run."""

    @property
    def paths(self) -> RunPaths:
        """Paths of the run folder."""
        return RunPaths(self.folder)

    @property
    def start(self) -> str | None:
        """Name of the policy that this policy was trained from; None for the base."""
        return learned_from(self.recipe, self.policy)

    @property
    def explored(self) -> Path:
        """Path of the episodes of the last exploration before the policy's evaluation."""
        return self.paths.trajectories(explored_before(self.recipe, self.policy))

    @property
    def _training(self) -> list[Stage]:
        """Training stages of the run."""
        return [one for one in stages(self.recipe) if one.command == "train"]

    @property
    def episodes(self) -> int:
        """Number of episodes in `explored`."""
        stage = read_manifest(self.folder)["stages"].get(self.explored.stem, {"counts": {}})
        return int(stage["counts"].get("episodes") or 0)

    def lack(self, needs: Needs) -> str | None:
        """Return why the run cannot provide a need of a selector; None if it can."""
        acting = [one.policy for one in self._training if one.section != REWARD_MODEL]
        if self.policy not in acting:
            return f"{self.policy} is not a policy that {self.folder} trains to act; name one of {', '.join(acting)}."
        if "start" in needs and self.start is None:
            return f"policy {self.policy} of {self.folder} was trained from no other."
        if "explored" in needs and self.recipe.explore is None:
            return f"{self.folder} explores nothing to learn from; add the section explore there."
        if "explored" in needs and self.recipe.explore and "unfinished" in self.recipe.explore.traits.imposes:
            return (
                f"{self.folder} explores in windows, where first the short episodes are over, or none; leave the "
                "window out there."
            )
        return None

    def seals(self, needs: Needs) -> Seals:
        """Return the seals of a policy's files, and of its start policy or the explored episodes.

        Raises:
            PerturnError: If the stage is not done, or a file is missing or has changed.
        """
        check_none([self.lack(needs)])
        manifest = read_manifest(self.folder)
        seals, found = manifest["files"], Seals()
        for policy in self._read(needs):
            self._require_done(manifest, next(one.name for one in self._training if one.policy == policy))
            own = _within(seals, self.paths.name(self.paths.checkpoint(policy)))
            if not own:
                raise RunError(
                    f"policy {policy} of {self.folder} was deleted; name a policy that is still there."
                )
            found |= own
        if "explored" in needs:
            self._require_done(manifest, self.explored.stem)
            counts = manifest["stages"][self.explored.stem].get("counts") or {}
            if counts.get("episodes", 1) == counts.get("failed", 0):
                raise ConfigError(f"all episodes of {self.explored} FAILED.")
            names = (self.paths.name(self.explored), self.paths.name(self.paths.tasks))
            found |= {file: one for file, one in seals.items() if file in names}
            for file in (self.explored, self.paths.tasks):
                if not file.is_file() or names[0] not in found:
                    raise RunError(
                        f"{file} is gone or not sealed, so nobody can tell what was explored; restore it from a copy."
                    )
        refuse_damage(self.folder, found)
        bases = {base_of(self.paths.checkpoint(policy)) for policy in self._read(needs)} - {None}
        for base in bases:  # adapters need their base, which is a policy of the run
            found |= _within(seals, self.paths.name(self.paths.checkpoint(Path(str(base)).name)))
        if bases:
            refuse_damage(self.folder, found)
        if "start" in needs and self.start not in self._read(needs):
            locate("perturn.policy.models:empty_model")(self.recipe.model.name)
        return found

    def _read(self, needs: Needs) -> Collection[str]:
        """Return the policies of the run whose files are read. The model that the run began with is not among them."""
        start = self.start if "start" in needs else None
        is_own = start is not None and (start != "base" or self.recipe.base is not None)
        return [self.policy, *([start] if is_own and start else [])]

    def _require_done(self, manifest: Mapping[str, Any], stage: str) -> None:
        if stage not in done_stages(manifest):
            raise RunError(
                f"stage {stage} of {self.folder} is not done; run: perturn run {quote(str(self.folder))}."
            )

    def identity(self, needs: Needs) -> dict[str, str]:
        """Return the names and SHA-256 digests of all that is read from the run, as an evaluation records them."""
        seals = self.seals(needs)
        found = {"policy": self.policy, "policy_sha256": self._digest(seals, self.policy)}
        if "explored" in needs:
            digest = str(seals[self.paths.name(self.explored)]["sha256"])
            found |= {"explored": self.explored.stem, "explored_sha256": digest}
        start = self.start if "start" in needs else None
        if start in self._read(needs) and start is not None:
            found |= {"start": start, "start_sha256": self._digest(seals, start)}
        elif start is not None:
            found |= {"start": self.recipe.model.name, **_digest_of(self.recipe.model.name)}
        return found

    def _digest(self, seals: Seals, policy: str) -> str:
        """Return the digest of a policy's files without its optimizer, which may be deleted later."""
        own = _within(seals, self.paths.name(self.paths.checkpoint(policy)))
        return _digest(
            {file: str(one["sha256"]) for file, one in own.items() if Path(file).name not in OPTIMIZER}
        )


def _within(seals: Seals, folder: str) -> Seals:
    return {file: one for file, one in seals.items() if file.startswith(f"{folder}/")}


def _digest_of(model: str) -> dict[str, str]:
    """Return the digest of a model in a local folder; empty for a model of the Hub."""
    adapters = adapters_in(model)
    folder = Path(resolve_model(model)) if adapters is None else adapters.folder
    if not folder.is_dir():
        return {}
    files = {file.name: file_digest(file) for file in sorted(folder.iterdir()) if file.is_file()}
    files |= {} if adapters is None else _digest_of(adapters.base)
    return {"start_sha256": _digest(files)}


def _digest(files: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def is_made_elsewhere(recipe: Recipe, needs: Needs) -> bool:
    """Return whether a run must get the needs of its selector from another run, since it does not train or explore."""
    own = (recipe.base, recipe.sft, recipe.align, recipe.explore if "explored" in needs else None)
    return all(section is None for section in own)


def find_maker(recipe: Recipe) -> Maker | None:
    """Return the run that has a recipe's model among its checkpoints; None if no run has it.

    Raises:
        ConfigError: If this version of Perturn cannot read that run's recipe.
    """
    return made_by(recipe.model.name)


def made_by(name: str) -> Maker | None:
    """Return the run that has a model among its checkpoints, by the model's name; None if no run has it.

    Raises:
        ConfigError: If this version of Perturn cannot read that run's recipe.
    """
    model = Path(os.path.abspath(user_path(name, "model.name")))
    paths = RunPaths(model.parent.parent)
    if model != paths.checkpoint(model.name) or not paths.is_run:
        return None
    with within(f"the run that made {model} cannot be read: {paths.recipe}: "):
        return Maker(paths.folder, resolve_recipe(paths.folder), model.name)


def maker_of(run: Run, policy: str, needs: Needs) -> Maker:
    """Return the run that made a policy: the given run, or another one.

    Args:
        run: The run that evaluates the policy.
        policy: Name of the policy in this run.
        needs: Needs of the evaluation's selector.

    Raises:
        PerturnError: If no run is found that made the policy.
    """
    if not is_made_elsewhere(run.recipe, needs):
        return Maker(run.folder, run.recipe, policy)
    found = find_maker(run.recipe)
    if found is None:
        raise RunError(
            f"{run.recipe.model.name} lies in the checkpoints of no run any more; restore that run."
        )
    return found


def noted_maker(run: Run, policy: str) -> dict[str, dict[str, str]]:
    """Return the part of an evaluation's record that names the files of another run; empty without such files.

    Raises:
        PerturnError: If these files are missing, or have changed since the evaluation began.
    """
    needs = run.recipe.evaluate.needs if run.recipe.evaluate else frozenset()
    if needs.isdisjoint(("start", "explored")) or not is_made_elsewhere(run.recipe, needs):
        return {}
    maker = maker_of(run, policy, needs)
    now = maker.identity(needs)
    before = (read_note(run.paths.stamp, Stamp) or {}).get("maker")
    if before is not None and before != now:
        changed = [key for key in now if now[key] != before.get(key)]
        raise RunError(
            f"{run.folder} was begun with other {' and '.join(changed)} of {maker.folder} than are there now; restore "
            "these from a copy, or score anew under another name (name=...)."
        )
    return {"maker": now}
