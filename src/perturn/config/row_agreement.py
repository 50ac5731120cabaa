"""Agreement between the rows of an alignment and the sections that play, weigh and train: one rule on traits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perturn.config.row_maker_settings import ROWS
from perturn.config.sections import Align, require
from perturn.table import name_of
from perturn.table_index import table

if TYPE_CHECKING:
    from perturn.config.recipe import Recipe


def check_rows(recipe: Recipe) -> None:
    """Refuse sections that contradict what the rows of the alignment are.

    Raises:
        ValueError: Naming the section, the row maker and what to set.
    """
    grouped = recipe.rows is not None and recipe.rows.traits.makes == "groups"
    require(
        recipe.reward_model is None or grouped,
        "reward.model is read by credits of groups alone; take rows.name=groups, or leave it out.",
    )
    judge, corrects = recipe.judge, recipe.rows is not None and recipe.rows.traits.corrects
    require(
        judge is None or recipe.explore is not None or judge.evaluates,
        "reward.judge rates what is explored, and the recipe explores nothing; set explore or reward.judge.evaluates.",
    )
    require(
        judge is None or not corrects,
        "reward.judge rates no corrections, which the rows compare with the episodes that it rates; leave it out.",
    )
    if recipe.rows is None:
        return
    name, traits = name_of(table(ROWS.table), type(recipe.rows)), recipe.rows.traits
    align, explore, several = recipe.align, recipe.explore, recipe.iterations > 1
    alone, anew = traits.makes in ("single", "labelled"), traits.starts_over
    for holds, says in (
        (traits.makes != "pairs" and align is None, "makes rows for an alignment; set align"),
        (
            alone and recipe.credit,
            "has rows that all have one weight, so credit weighs no turns; leave it out",
        ),
        (
            traits.told and recipe.protocol and recipe.protocol.suffix,
            "has a suffix of its own; leave protocol.suffix out",
        ),
        (
            several and anew and not traits.aggregates,
            f"trains the policy that SFT began with; set iterations to 1, got {recipe.iterations}",
        ),
        (
            several and anew and align and align.minibatches is not None,
            "trains the policy that SFT began with in each iteration, so that no optimizer goes on; leave "
            "align.minibatches out, and set align.batch_size",
        ),
        (
            anew and align and align.reference != Align.reference,
            "has no reference; leave align.reference out",
        ),
        (
            traits.several_samples and explore and explore.samples == 1,
            "compares the samples of a task; explore.samples must be > 1, got 1",
        ),
        (
            grouped and explore and not explore.sampling.temperature == explore.sampling.top_p == 1,
            "has the gradient of the policy itself, and not of a sharper one that acts in its place; "
            "explore.sampling must have temperature 1 and top_p 1",
        ),
    ):
        require(not holds, f"rows.name={name} {says}.")
    if grouped and explore and explore.per_iteration and align and align.minibatches:
        most = explore.per_iteration * explore.samples
        require(
            align.minibatches <= most,
            f"align.minibatches must be at most the {most} episodes of an iteration, got {align.minibatches}.",
        )
