"""Work of a run's trainings: number of rows and tokens, estimated if the rows do not exist yet."""

from __future__ import annotations

from dataclasses import dataclass

from perturn.config.recipe import REWARD_MODEL, Recipe
from perturn.config.sections import Train
from perturn.config.stages import Stage, makes, starts_over
from perturn.data.run_folder import run_folder
from perturn.data.run_paths import RunPaths
from perturn.estimate.episode_lengths import Episodes
from perturn.estimate.stage_costs import trained_tokens
from perturn.explore.protocol import Forecast
from perturn.formats.read_rows import rows_of
from perturn.io.read_input import user_path
from perturn.run.stages.branch_stage import explorer_of
from perturn.run.stages.row_stage import ROWS_OF
from perturn.table import locate
from perturn.types import PreferencePair

KEPT = 0.75
"""Assumed share of explored episodes that become pairs, or that an expert corrects."""


@dataclass(frozen=True)
class Work:
    """Work of a training: number of rows, and number of tokens in one epoch."""

    settings: Train
    rows: int
    tokens: float
    text: str
    """Description of the work for the plan."""


def training_work(recipe: Recipe, stage: Stage, found: Episodes) -> Work:
    """Return the work of a training stage.

    Args:
        recipe: Recipe of the run.
        stage: The training stage.
        found: Number and lengths of episodes.
    """
    once = stage.section if stage.section in ("base", "sft") else None
    settings, judges = recipe.training(stage.section), stage.section == REWARD_MODEL
    assert settings is not None
    on_pairs = judges or (once is None and makes(recipe, "pairs"))
    own = recipe.rows.traits.source if recipe.rows and once is None and not judges else None
    rows, what = getattr(found, once) if once else weighed_episodes(recipe, found), "episodes"
    if once is None and makes(recipe, "single", "labelled"):
        rows = stage.iteration * corrected_episodes(recipe, found) or rows
        rows += (found.sft or found.expert) if starts_over(recipe) else found.explore
    if on_pairs or own:
        paths = RunPaths(run_folder(recipe))
        made = paths.preferences(stage.mark) if judges else paths.pairs(stage.mark)
        file = user_path(own, "rows.path") if own else made
        assumed = (
            round(KEPT * found.explore / 2) if judges else assumed_pairs(recipe, found)
        )  # a pair has two episodes
        is_there = bool(own) or file.is_file()
        kind = ROWS_OF[recipe.rows.traits.makes] if own and recipe.rows else PreferencePair
        rows = sum(1 for _ in rows_of(file, kind)) if is_there else assumed
        what = ("pairs" if on_pairs else "rows") + ("" if is_there else " (assumed)")
    of_groups = once is None and not judges and makes(recipe, "groups")
    tokens = trained_tokens(found, rows, on_pairs, own=of_groups)
    text = f"{rows} {what}, {settings.epochs:g} epochs, about {tokens * settings.epochs / 1000:.0f}k tokens"
    return Work(settings, rows, tokens, text)


def weighed_episodes(recipe: Recipe, found: Episodes) -> int:
    """Return the number of episodes that a credit on groups weighs: explored episodes, and branches if it uses them."""
    credit = locate("perturn.training.credit_choice:make_credit")(recipe.credit) if recipe.credit else None
    if not makes(recipe, "groups") or credit is None or not credit.traits.trains_branches:
        return found.explore
    return found.explore + expected_branches(recipe, found, found.policy_turns(True)).played


def expected_branches(recipe: Recipe, found: Episodes, turns: float) -> Forecast:
    """Return the forecast of branches, if an explored episode has `turns` turns on average."""
    return explorer_of(recipe).forecast(found.explore, turns, found.turns)


def assumed_pairs(recipe: Recipe, found: Episodes) -> int:
    """Return the assumed number of pairs: a share of explored episodes, of groups of episodes, or of branching points.

    A row maker that compares the episodes of a group is assumed to make one pair of each group, its default.
    """
    groups: float = found.explore
    if recipe.explore and recipe.rows and recipe.rows.traits.several_samples:
        groups /= recipe.explore.samples
    if recipe.explore and recipe.explore.rounds and not recipe.explore.traits.expert:
        groups = expected_branches(recipe, found, found.policy_turns(True)).points
    return round(KEPT * groups)


def corrected_episodes(recipe: Recipe, found: Episodes) -> int:
    """Return the assumed number of episodes that an expert corrects; 0 if the recipe has no corrections."""
    return round(KEPT * found.explore) * recipe.rows.traits.corrects if recipe.rows else 0
