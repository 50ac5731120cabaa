"""Checks that the sections of a recipe fit together: explorer, row maker, credit, reward model and evaluation."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import fields, replace
from inspect import Parameter
from typing import TYPE_CHECKING

from perturn.config.explorer_settings import ExploreSettings
from perturn.config.parsing import default_of
from perturn.config.row_maker_settings import ROWS, RowMaker, sense_in
from perturn.config.sections import Align, Train
from perturn.table import at_defaults, name_of
from perturn.table_index import table

if TYPE_CHECKING:
    from perturn.config.recipe import Recipe

_logger = logging.getLogger(__name__)

IMPOSED = {
    "unfinished": "episodes that are not over",
    "some-episodes": "branches of some episodes alone, which tell how these ended",
    "prover": "branches of another policy than the exploring one",
    "cut-branches": "branches that are not over",
    "dependent-branches": "branches at turns that depend on the other samples of the task",
}
"""Properties that an explorer's episodes may have, with descriptions. A row maker, credit or selector that reads the
episodes must accept each property."""
_PROVIDED = {
    "tree": "a tree",
    "regular-branches": "branches at regular turns",
    "turn-branches": "branches at every turn (explore.every=1)",
}
"""Descriptions, in messages, of kinds of episodes that an explorer provides. A kind that is missing here is described
by its name."""

Needs = Iterable[str | Collection[str]]
"""Kinds of episodes that a row maker, credit or evaluation needs from the explorer. If an entry is a collection of
kinds, one of these kinds is enough."""


def explorer_name(recipe: Recipe) -> str:
    """Return the name of a recipe's explorer. The recipe must have one."""
    return name_of(table("explorers"), type(recipe.explore))


def providers(*needs: str) -> list[str]:
    """Return the names of explorers that, with default settings, provide any of the needed kinds of episodes."""
    return [name for name, one in _explorers().items() if not one.traits.provides.isdisjoint(needs)]


def _explorers() -> dict[str, ExploreSettings]:
    """Return the explorers with default settings, by name. Explorers with a setting without default are left out."""
    found = {name: at_defaults(entry) for name, entry in table("explorers").items()}
    return {name: one for name, one in found.items() if one is not None}


def misfit(recipe: Recipe, reader: str, needs: Needs, takes: Collection[str]) -> str | None:
    """Return the reason why a row maker, credit or selector cannot read the explorer's episodes; None if it can.

    Args:
        recipe: A recipe with an explorer.
        reader: Name of the row maker, credit or selector in the message, such as `rows.name=tree-pairs`.
        needs: Kinds of episodes that the reader needs from the explorer.
        takes: Properties of episodes that the reader accepts; see `IMPOSED`.
    """
    assert recipe.explore is not None
    name, traits = explorer_name(recipe), recipe.explore.traits
    for need in needs:
        options = (need,) if isinstance(need, str) else tuple(sorted(need))
        if traits.provides.isdisjoint(options):
            has, others = ", ".join(sorted(traits.provides)) or "none", providers(*options)
            tail = f"; explorers that do: {', '.join(others)}" if others else ""
            return (
                f"{reader} needs {' or '.join(_PROVIDED.get(each, each) for each in options)}, and explore.name={name} "
                f"provides {has}{tail}."
            )
    imposed = next((each for each in sorted(traits.imposes) if each not in takes), None)
    if imposed is None:
        return None
    return (
        f"{reader} does not take {IMPOSED.get(imposed, imposed)}, which explore.name={name} has; "
        f"{_without(recipe.explore, imposed)}."
    )


def _without(explorer: ExploreSettings, imposed: str) -> str:
    """Return the remedy against a property of the episodes: a setting to change, else another explorer to choose."""
    for each in fields(explorer):
        default = default_of(type(explorer), each.name)
        if default is Parameter.empty:
            continue
        plain = replace(explorer, **{each.name: default})
        if imposed not in plain.traits.imposes:
            return f"set explore.{each.name}={'null' if default is None else default}"
    others = (name for name, one in _explorers().items() if imposed not in one.traits.imposes)
    return f"take explore.name={' or '.join(others)}"


def explorer_faults(recipe: Recipe) -> Iterator[str]:
    """Yield messages about an explorer whose episodes the row maker or the evaluation cannot use.

    The needs of a credit are checked elsewhere, since credits may import torch.
    """
    explorer = recipe.explore
    if explorer is None:
        return
    rows, traits = recipe.rows, explorer.traits
    reads = rows is not None and rows.traits.explored
    reader = f"rows.name={name_of(table('rows'), type(rows))}" if reads else ""
    needs = (rows.traits.branches,) if rows is not None and rows.traits.branches else ()
    if rows is not None and reads and (problem := misfit(recipe, reader, needs, rows.traits.takes)):
        yield problem
    grouped = rows is not None and rows.traits.makes == "groups"
    if not grouped and traits.provides and not any(traits.provides & need for need in needs):
        yield (
            f"explore.name={explorer_name(recipe)} provides {', '.join(sorted(traits.provides))}, which "
            f"{reader or 'nothing'} reads{' not' if reader else ''}; take explore.name=rollouts."
        )
    learns = recipe.evaluate is not None and "explored" in recipe.evaluate.needs
    if learns and (problem := misfit(recipe, "evaluate.select", (), set(IMPOSED) - {"unfinished"})):
        yield problem
    if traits.resumes_earlier and recipe.iterations == 1:
        yield f"explore.name={explorer_name(recipe)} resumes episodes in the next iteration; set iterations > 1."
    if traits.source is not None and recipe.iterations > 1:
        yield (
            f"explore.name={explorer_name(recipe)} has the episodes of one iteration; set iterations to 1, got "
            f"{recipe.iterations}."
        )
    if traits.policy == "sft" and recipe.sft is None:
        yield "explore.policy is sft, and the recipe has no section sft; add one, or take explore.policy=base."
    if len({sense_in(explorer.needs), sense_in(rows.needs) if rows else None} - {None}) > 1:
        yield "explore.distance and rows.distance must be equal: a run measures one sense alone."


def row_faults(recipe: Recipe) -> Iterator[str]:
    """Yield messages about sections that contradict the row maker."""
    grouped = recipe.rows is not None and recipe.rows.traits.makes == "groups"
    if recipe.reward_model is not None and not grouped:
        yield "reward.model is read by credits of groups alone; take rows.name=groups, or leave it out."
    judge, corrects = recipe.judge, recipe.rows is not None and recipe.rows.traits.corrects
    if judge is not None and recipe.explore is None and not judge.evaluates:
        yield (
            "reward.judge rates what is explored, and the recipe explores nothing; set explore or "
            "reward.judge.evaluates."
        )
    if judge is not None and corrects:
        yield (
            "reward.judge rates no corrections, which the rows compare with the episodes that it rates; leave it out."
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
            traits.suffixes and recipe.protocol and recipe.protocol.suffix,
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
            traits.several_samples and explore and explore.samples == 1 and explore.traits.source is None,
            "compares the samples of a task; explore.samples must be > 1, got 1",
        ),
        (
            grouped and explore and explore.sampling.sharpens,
            "has the gradient of the policy itself, and not of a sharper policy that acts in its place; "
            "explore.sampling must have temperature 1 and top_p 1",
        ),
    ):
        if holds:
            yield f"rows.name={name} {says}."
    if explore and explore.per_iteration:
        yield from minibatch_faults(recipe, explore.per_iteration)


def minibatch_faults(recipe: Recipe, tasks: int) -> Iterator[str]:
    """Yield a message if an iteration has more minibatches than episodes.

    Args:
        recipe: Recipe of the run.
        tasks: Number of tasks that an iteration explores.
    """
    grouped = recipe.rows is not None and recipe.rows.traits.makes == "groups"
    asked, explore = recipe.align.minibatches if recipe.align else None, recipe.explore
    if not grouped or not asked or explore is None or explore.traits.provides or explore.traits.source:
        return  # the number of branches, or of a file's episodes, is not known
    if asked > (most := tasks * explore.samples):
        yield f"align.minibatches must be at most the {most} episodes of an iteration, got {asked}."


def unused_faults(recipe: Recipe) -> Iterator[str]:
    """Yield messages about settings that nothing reads, episodes that nothing uses, and a policy's name in use.

    Recorded recipes may have such settings, so that only a new run is checked.
    """
    rows, explore, align, expert = recipe.rows, recipe.explore, recipe.align, recipe.expert
    for name in ("align", "reward.model", "sft", "base"):
        training = recipe.training(name)
        if training is None:
            continue
        if training.tasks is not None and name in ("align", "reward.model"):
            yield f"{name}.tasks has no effect, since {name} trains on explored tasks; set explore.tasks."
        if training.scheduler == "constant" and training.warmup_ratio not in (0, Train.warmup_ratio):
            yield (
                f"{name}.warmup_ratio has no effect with {name}.scheduler=constant; take "
                f"{name}.scheduler=constant_with_warmup, or leave {name}.warmup_ratio out."
            )
    if recipe.credit is not None and align is None and explore is None:
        yield "credit needs explored episodes or an alignment; set align, or take credit=null."
    loss = str(align.loss.get("name")) if align else ""
    label = loss.rpartition(":")[2].lower()  # names a folder, and some file systems ignore case
    if ":" in loss and label in ("base", "sft", "prm"):
        yield f"align.loss.name must name a class that is not called like a policy of the run, got {loss!r:.200}."
    selects = recipe.evaluate is not None and "explored" in recipe.evaluate.needs
    if rows is not None and explore is not None and not rows.traits.explored and not selects:
        yield f"explore plays episodes that rows.name={_rows_name(rows)} does not read; leave explore out."
    of_expert = recipe.sft is not None or (explore is not None and explore.traits.expert)
    if expert is not None and rows is not None and not (of_expert or rows.traits.expert):
        yield f"expert brings episodes that rows.name={_rows_name(rows)} does not read; add sft, or leave expert out."
    if recipe.cluster is not None and recipe.cluster.engine_gpus and not recipe.cluster.engines:
        yield "cluster.engine_gpus has no effect with cluster.engines=0; leave one of them out."


def warn_of_equal_samples(recipe: Recipe) -> None:
    """Log a warning if the row maker compares samples that only a random environment can make differ."""
    explore, rows = recipe.explore, recipe.rows
    if explore is None or explore.traits.source is not None or recipe.user is not None:
        return
    greedy = explore.sampling.temperature == 0 and explore.samples > 1
    if greedy and rows is not None and rows.traits.several_samples:
        says = "rows.name=%s compares equal episodes at temperature 0 unless the environment is random"
        _logger.warning("%s; set explore.sampling.temperature, such as to 1.0", says % _rows_name(rows))


def _rows_name(rows: RowMaker) -> str:
    return name_of(table(ROWS.table), type(rows))
