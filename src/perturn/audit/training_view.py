"""Encode data as training would."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perturn.chat.model_names import load_tokenizer
from perturn.chat.templates import chat_template as template_of
from perturn.chat.tokens import NO_TURN, Renderer
from perturn.config.recipe import Recipe, read_recipe
from perturn.config.stages import makes, stages
from perturn.data.recorded_code import code_files
from perturn.data.run_folder import model_beside
from perturn.data.run_paths import RunPaths
from perturn.errors import check_known, required
from perturn.formats.row_sources import open_source
from perturn.policy.examples import Example
from perturn.table import locate


@dataclass(frozen=True)
class View:
    """Rules for converting rows to tokens with weights."""

    renderer: Renderer
    max_length: int | None
    shared_prefix: str
    loss: dict[str, Any]
    """Name and settings of the loss whose weights are shown."""
    credit: dict[str, Any] | None
    """Name and settings of the credit. If None, the loss's own credit is used."""
    branches: Path | None = None
    """File of a run's branches, if they are training rows too."""
    own_turns: bool = False
    """Whether a branched episode carries loss only on the turns after its branching point."""

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the model, with the chat template."""
        return self.renderer.tokenizer


def view_of(
    data: Path,
    model: str,
    loss_name: str | None = None,
    max_length: int | None = None,
    chat_template: str | None = None,
) -> View:
    """Return the rules of a run's own training, or default rules for other data.

    Args:
        data: A source of rows, or a run folder.
        model: Model whose tokenizer is used.
        loss_name: Loss whose weights are shown. None: the loss of the run's stage `align`, or else tlm-dre.
        max_length: Length limit in tokens. None: the run's limit, or else no limit.
        chat_template: Name, file or Jinja text of a chat template. None: the run's chat template, or else the
            tokenizer's.

    Raises:
        PerturnError: If the model does not exist, or its chat template cannot be used.
    """
    recipe = recipe_of(data)
    align = recipe.align if recipe else None
    named = align is not None and loss_name in (None, align.loss["name"])
    section: dict[str, Any] = dict(align.loss) if align and named else {"name": loss_name or "tlm-dre"}
    template = chat_template or (template_of(recipe.model) if recipe else None)
    credit = recipe.credit if recipe and named else None
    of_groups = recipe is not None and makes(recipe, "groups")
    return View(
        renderer=Renderer(load_tokenizer(model), template),
        max_length=max_length or (recipe.model.max_length if recipe else None),
        shared_prefix=align.shared_prefix if align else "keep",
        loss=section,
        credit=credit,
        branches=_branches(RunPaths(data), section, credit) if of_groups else None,
        own_turns=of_groups and _trains_own_turns(section, credit),
    )


def credit_file(data: Path, view: View) -> Path | None:
    """Return the path of the turn weights of a run's groups, which may not exist yet; None for other data."""
    recipe, paths = recipe_of(data), RunPaths(data)
    if recipe is None or not makes(recipe, "groups"):
        return None
    name, _ = locate("perturn.training.credit_choice:named_credit")(view.loss, view.credit)
    return paths.credit(name, paths.mark)


def _branches(run: RunPaths, loss: dict[str, Any], section: dict[str, Any] | None) -> Path | None:
    """Return the newest branches of a run, if the run's credit trains on branches."""
    file = run.trajectories(f"branch{run.mark}")
    return file if file.is_file() and _credit(loss, section).traits.trains_branches else None


def _credit(loss: dict[str, Any], section: dict[str, Any] | None) -> Any:
    """Return the credit of a loss."""
    return locate("perturn.training.credit_choice:named_credit")(loss, section)[1]


def _trains_own_turns(loss: dict[str, Any], section: dict[str, Any] | None) -> bool:
    """Return whether the credit of a loss trains only the own turns of branches."""
    found: bool = locate("perturn.training.credit_choice:trains_own_turns")(_credit(loss, section))
    return found


def recipe_of(data: Path) -> Recipe | None:
    """Return the recipe of a run folder, which may have been moved or renamed; None for other data."""
    paths = RunPaths(data)
    if not paths.is_run:
        return None
    beside = model_beside(paths.recipe, data.resolve())
    own = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in beside.items()]
    return read_recipe(paths.recipe, own, code_files(data))


@dataclass(frozen=True)
class Drawn:
    """Episodes that a policy of a run played for best-of-n, and the rules of the run's training."""

    file: Path
    max_length: int | None
    chat_template: str | None


def drawn_by(run: Path, policy: str) -> Drawn:
    """Return all episodes that a policy played in its best-of-n evaluation, also the episodes that were not chosen.

    Raises:
        ConfigError: If the policy has no such episodes. The message names the policies that have.
    """
    paths, reader = RunPaths(run), "--drawn names a policy of a run"
    recipe = required(recipe_of(run), f"the recipe of {str(run)!r}", reader, "give a run folder")
    file = paths.drawn(policy)
    there = sorted(each.stem for each in file.parent.glob("*.jsonl"))
    remedy = "" if there else "Set evaluate.select in the recipe, for which a policy plays them."
    check_known(policy, there, f"policy {policy!r:.80} played no episodes for Best-of-N in {run}", remedy)
    return Drawn(file, recipe.model.max_length, template_of(recipe.model))


def model_of(data: Path, model: str | None) -> str:
    """Return the model for inspecting data: the given model, or else the reference of the run's newest iteration.

    If that policy was deleted, as policies of earlier iterations are, the policy that the iteration trained is used.

    Raises:
        ConfigError: If no model is given and the data is not a run.
        DataError: If the data do not exist, so that no model needs to be found.
    """
    recipe = recipe_of(data)
    if recipe is not None:
        paths = RunPaths(data)
        newest = [stage for stage in stages(recipe) if stage.name == f"align{paths.mark}"]
        policies = [policy for stage in newest for policy in (stage.reference, stage.policy)] or ["sft"]
        if makes(recipe, "single", "labelled"):  # the trained policy may have added tokens
            policies.reverse()
        folders = [folder for policy in policies if _is_there(folder := paths.checkpoint(policy))]
        begun = str(paths.checkpoint("base")) if recipe.base else recipe.model.name
        trained = str(folders[0]) if folders and "base" not in policies[:1] else begun
        return model or trained
    if not data.exists():
        open_source(data)
    return required(model, "--model", f"{str(data)!r} is no run", "name the model it is for")


def _is_there(policy: Path) -> bool:
    return (policy / "config.json").is_file()


def totals(examples: Sequence[Example]) -> dict[str, int]:
    """Return the counts of turns and tokens over all sides of all rows."""
    sides = [side for example in examples for side in example.sides]
    return {
        "trajectories": len(sides),
        "turns": sum(side.turns for side in sides),
        "tokens": sum(len(side.ids) for side in sides),
        "loss_tokens": sum(turn != NO_TURN for side in sides for turn in side.turn),
    }
