"""Whether the losses and credits of a recipe can train, and a stage's settings as the trainer takes them."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from perturn.data.run_folder import run_folder
from perturn.errors import ConfigError
from perturn.losses import LOSSES
from perturn.needs import Distance, request_of
from perturn.policy.config import TurnConfig
from perturn.policy.credits import choose_credit
from perturn.policy.models import compute_dtype, context_length, device
from perturn.policy.templates import chat_template
from perturn.ranks import share_of
from perturn.run.kept import goes_on
from perturn.run.tracking import PROJECT
from perturn.settings.parsing import build
from perturn.settings.recipe import Recipe
from perturn.settings.sections import Train

_ARGUMENTS = {
    "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "warmup_ratio": "warmup_steps",
    "scheduler": "lr_scheduler_type",
}
"""Settings of `Train` that transformers has by other names."""
if "activation_checkpointing" in TurnConfig.__dataclass_fields__:  # not in older versions, such as vLLM's
    _ARGUMENTS["gradient_checkpointing"] = "activation_checkpointing"

_OF_THE_BASE = ("shape", "clumsy", "aimless")
_OF_THE_LOOP = ("minibatches", "reference", "reference_decay", "threshold", "per_group")
"""Settings of `Base`, and of `Align` and `Reward`, that are not of one training."""

_REMEDY = {
    "groups": "such a loss goes into align, with the section `groups: {}`",
    "pairs": "such a loss goes into align, without the sections groups and outcomes",
    "labelled trajectories": "such a loss goes into align, with the section `outcomes: {name: kto}`",
    "single trajectories": "such a loss goes into sft, or into align with a section such as `outcomes: {name: rft}`",
}
"""Where a loss belongs, by its rows."""


def check_training(recipe: Recipe) -> None:
    """Make the losses, credits and the trainer's settings, before work.

    Raises:
        ConfigError: If a setting is wrong, or what it needs is not installed.
    """
    sections = ("base", "sft", "reward", "align")
    for name, settings in ((name, getattr(recipe, name)) for name in sections):
        if settings is None:
            continue
        rows = _rows_for(recipe, name)
        loss = build(LOSSES, settings.loss, f"{name}.loss")
        if _rows_of(loss) != rows:
            fitting = ", ".join(key for key, each in LOSSES.items() if _rows_of(each) == rows)
            raise ConfigError(
                f"{name}.loss.name must be a loss on {rows} ({fitting}), got {settings.loss['name']!r}, which is one "
                f"on {_rows_of(loss)}; {_REMEDY[_rows_of(loss)]}."
            )
        choose_credit(loss, settings.loss, recipe.credit if name == "align" else None)
        try:
            make_config(recipe, settings, run_folder(recipe), model=None)
        except (ValueError, ConfigError) as error:  # of the trainer's own settings
            raise ConfigError(f"{name}: {error}") from error
        if settings.lora and name == "align" and goes_on(recipe):
            raise ConfigError(
                "align.lora: adapters are merged when an iteration ends, so no optimizer can go on with them; leave "
                "align.minibatches out, or train all weights."
            )
        if settings.lora and importlib.util.find_spec("peft") is None:
            raise ConfigError(f'{name}.lora needs peft; run: pip install "perturn[lora]"')


def _rows_for(recipe: Recipe, name: str) -> str:
    """The rows that a training stage has."""
    if name == "reward":
        return "pairs"
    if name != "align" or recipe.outcomes:
        labelled = name == "align" and recipe.outcomes and recipe.outcomes.way.labelled
        return "labelled trajectories" if labelled else "single trajectories"
    return "groups" if recipe.groups else "pairs"


def distances_read(recipe: Recipe) -> set[str]:
    """Return the senses in which credits of a recipe read the remaining path of each turn."""
    found = []
    for name in ("reward", "align"):
        settings = getattr(recipe, name)
        if settings is not None:
            loss = build(LOSSES, settings.loss, f"{name}.loss")
            credit = choose_credit(loss, settings.loss, recipe.credit if name == "align" else None)
            found.append(request_of(credit.needs, Distance))
    return {each.sense for each in found if each is not None}


def _rows_of(loss: Any) -> str:
    """The rows that a loss learns from."""
    if getattr(loss, "needs_behavior", False):
        return "groups"
    if getattr(loss, "needs_mismatched", False):
        return "labelled trajectories"
    return "pairs" if loss.needs_rejected else "single trajectories"


def make_config(recipe: Recipe, settings: Train, output: Path, model: Any | None) -> TurnConfig:
    """A stage's settings -> the trainer's; without a model what depends on it is left open."""
    where, config = device(), None if model is None else model.config
    own = {_ARGUMENTS.get(name, name): value for name, value in asdict(settings).items()}
    for name in ("tasks", "lora", *_OF_THE_BASE, *_OF_THE_LOOP):
        own.pop(name, None)
    own["per_device_train_batch_size"] = share_of(settings.batch_size)
    own.setdefault("seed", recipe.seed)
    return TurnConfig(
        **own,
        output_dir=str(output),
        credit=None if settings is not recipe.align or recipe.credit is None else dict(recipe.credit),
        max_length=recipe.model.max_length or (context_length(model) if model is not None else None),
        chat_template=chat_template(recipe.model),
        bf16=compute_dtype(recipe.model.dtype, where, config) is torch.bfloat16,
        use_cpu=where.type == "cpu",
        logging_steps=1,
        report_to=[],  # trackers are opened for each stage, in the run folder
        run_name=f"{recipe.name}-{output.stem}",
        project=PROJECT,
        disable_tqdm=True,
    )
