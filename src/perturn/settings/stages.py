"""The loop as data: from a recipe to its stages. Nothing is opened or loaded here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from perturn.settings.recipe import Recipe


@dataclass(frozen=True)
class Stage:
    """One entry of the loop."""

    name: str
    """Unique in its run; with several iterations it ends in the number of its own, as in `explore-003`."""
    command: str
    """The command that does it alone: collect, pair, train or evaluate."""
    does: str
    """The function that does it, as `module:function`."""
    needs: tuple[str, ...] = ()
    """Stages whose results it starts from."""
    policy: str = ""
    """The policy that acts, or that training makes."""
    start: str = ""
    """The policy that training starts from, which is its reference."""
    iteration: int = 1
    mark: str = ""
    """End of the names of its files: empty, or `-003` with several iterations."""


def stages(recipe: Recipe) -> list[Stage]:
    """The stages of a recipe, in order. A recipe without a section is a list without its stages."""
    found = list(_first(recipe))
    trained = {stage.policy: stage.name for stage in found if stage.command == "train"}
    start = "sft" if recipe.sft else "base"
    for iteration in range(1, recipe.iterations + 1):
        mark = f"-{iteration:03d}" if recipe.iterations > 1 else ""
        found += _iteration(recipe, iteration, mark, start, trained.get(start))
        trained |= {stage.policy: stage.name for stage in found if stage.command == "train"}
        start = f"{recipe.align.loss['name']}{mark}" if recipe.align else start
    return found


def _first(recipe: Recipe) -> Iterator[Stage]:
    """The stages that are done once: the expert's episodes, the base's score, SFT and its score."""
    paired = recipe.pair is not None and recipe.pair.file is None
    if recipe.sft or paired or recipe.expert:
        own = recipe.expert is not None and recipe.expert.file is not None
        does = "perturn.run.collect:bring_expert" if own else "perturn.run.collect:show_expert"
        yield Stage("expert", "collect", does)
    if recipe.evaluate:
        yield _evaluation("base", ())
    if recipe.sft:
        yield Stage("sft", "train", "perturn.run.train:train", ("expert",), "sft", "base")
        if recipe.evaluate:
            yield _evaluation("sft", ("sft",))


def _iteration(recipe: Recipe, number: int, mark: str, start: str, trained: str | None) -> Iterator[Stage]:
    """One iteration: exploration, pairs, alignment, and the aligned policy's score."""
    its: Any = {"iteration": number, "mark": mark}
    explore, pair, align = (f"{name}{mark}" for name in ("explore", "pair", "align"))
    if recipe.explore:
        needs = (trained,) if trained else ()
        yield Stage(explore, "collect", "perturn.run.collect:explore", needs, start, **its)
    if recipe.pair and recipe.pair.file is not None:
        yield Stage(pair, "pair", "perturn.run.pair:bring_pairs", **its)
    elif recipe.pair:
        yield Stage(pair, "pair", "perturn.run.pair:make_pairs", (explore, "expert"), **its)
    if recipe.align:
        policy = f"{recipe.align.loss['name']}{mark}"
        yield Stage(align, "train", "perturn.run.train:train", (pair,), policy, start, **its)
        if recipe.evaluate:
            yield _evaluation(policy, (align,), number)


def _evaluation(policy: str, needs: tuple[str, ...], iteration: int = 1) -> Stage:
    """The score of a policy."""
    does = "perturn.run.evaluate:evaluate"
    return Stage(f"evaluate-{policy}", "evaluate", does, needs, policy, iteration=iteration)
