"""The loop as data: from a recipe to its stages. Nothing is opened or loaded here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from perturn.config.explorer_settings import ExploreSettings
from perturn.config.recipe import REWARD_MODEL, Recipe
from perturn.config.row_maker_settings import ROWS, RowTraits
from perturn.table import name_of
from perturn.table_index import table

# Settings that a stage and those before it read, as keys of the recipe; a section stands for all that is in it.
_WORLD = ("seed", "environment", "protocol")
_MODEL = ("model", "base")
_LESSONS = ("base", "environment", "protocol")  # the base has a seed of its own
_PLAY = (*_WORLD, *_MODEL, "engine", "user", "deterministic")
_JUDGE = "reward.judge"
_SCORE = (
    _JUDGE,
    "evaluate.tasks",
    "evaluate.sampling",
    "evaluate.concurrency",
    "evaluate.samples",
    "evaluate.select",
    "evaluate.turns",
    "evaluate.distance",
)
_EXPERT = (*_WORLD, "expert", _JUDGE)
_SFT = (*_EXPERT, *_MODEL, "backend", "sft")
_EXPLORE = (*_SFT, *_PLAY)
_LOOP = (*_EXPLORE, "explore", "reward", "rows", "credit", "align")


@dataclass(frozen=True)
class Stage:
    """One entry of the loop."""

    name: str
    """Unique in its run; with several iterations it ends in the iteration's number, as in `explore-003`."""
    command: str
    """The command that runs it alone: collect, pair, credit, train or evaluate."""
    does: str
    """The function that does it, as `module:function`."""
    needs: tuple[str, ...] = ()
    """Stages whose results it starts from."""
    policy: str = ""
    """The policy that acts, or that training makes."""
    section: str = ""
    """The section of the recipe that has the settings of a training: base, sft, reward.model or align."""
    start: str = ""
    """The policy that training starts from."""
    reference: str = ""
    """The reference of the training, and of a credit."""
    iteration: int = 1
    mark: str = ""
    """End of the names of its files: empty, or `-003` with several iterations."""
    reads: tuple[str, ...] = ()
    """Keys of all settings that it and the stages before it read. Stages of two recipes with equal values make the same
    files; empty: the stage is never shared. So it is of several iterations from the first alignment on, since policies
    and optimizers are deleted on the way."""


def stages(recipe: Recipe) -> list[Stage]:
    """Return the stages of a recipe, in order. A recipe without a section is a list without its stages."""
    found = list(_first(recipe))
    for iteration in range(1, recipe.iterations + 1):
        trained = {stage.policy: stage.name for stage in found if stage.command == "train"}
        found += _iteration(recipe, iteration, trained)
    return found


def is_read(key: str, reads: Iterable[str]) -> bool:
    """Return whether a stage reads a dotted key; among its keys, a section includes all keys in it."""
    return any(key == each or key.startswith(f"{each}.") for each in reads)


def mark(recipe: Recipe, iteration: int) -> str:
    """End of the names of an iteration's files, such as `-003`; empty where the loop is done once."""
    return f"-{iteration:03d}" if recipe.iterations > 1 else ""


def policy_of(recipe: Recipe, iteration: int) -> str:
    """Return the policy that an iteration makes; iteration 0 means the policy that the loop begins with."""
    if recipe.align is None or iteration == 0:
        return "sft" if recipe.sft else "base"
    by_rows = recipe.rows is not None and recipe.rows.traits.names_policy
    name = rows_name(recipe) if by_rows else recipe.align.loss["name"]
    return f"{name}{mark(recipe, iteration)}"


def rows_name(recipe: Recipe) -> str:
    """Return the name of the row maker of a recipe that has one."""
    return name_of(table(ROWS.table), type(recipe.rows))


def traits_of(recipe: Recipe) -> RowTraits | None:
    """Return the traits of the row maker of a recipe; None where it makes no rows."""
    return recipe.rows.traits if recipe.rows else None


def makes(recipe: Recipe, *kinds: str) -> bool:
    """Return whether the rows of a recipe are of one of the given kinds."""
    return recipe.rows is not None and recipe.rows.traits.makes in kinds


def starts_over(recipe: Recipe) -> bool:
    """Return whether the alignment trains the policy before SFT, and not the policy that explored."""
    return recipe.rows is not None and recipe.rows.traits.starts_over


def own_files(recipe: Recipe) -> dict[str, str]:
    """Return files of the user's that a recipe learns from, by their keys."""
    rows = recipe.rows.traits.source if recipe.rows else None
    expert = recipe.expert.file if recipe.expert else None
    explored = recipe.explore.traits.source if recipe.explore else None
    named = (("expert.file", expert), ("explore.path", explored), ("rows.path", rows))
    return {key: file for key, file in named if file is not None}


def suffix_of(recipe: Recipe, policy: str) -> str | None:
    """Return the suffix that asks a policy for success, if it was trained with suffixes that say how episodes end."""
    told = recipe.rows.traits.told if recipe.rows else None
    aligned = {policy_of(recipe, number) for number in range(1, recipe.iterations + 1)}
    return told[0] if told and policy in aligned else None


def reward_model_of(recipe: Recipe, iteration: int) -> str:
    """Return the reward model that an iteration makes; for iteration 0, the policy that the loop begins with."""
    return f"prm{mark(recipe, iteration)}" if iteration else policy_of(recipe, 0)


def learned_from(recipe: Recipe, policy: str) -> str | None:
    """Return the policy that SFT, or the whole of the alignment, began with to make one; None for the base."""
    if policy == "base":
        return None
    return "base" if policy == "sft" or starts_over(recipe) else policy_of(recipe, 0)


def explored_before(recipe: Recipe, policy: str) -> str:
    """Return the last exploration before a policy is evaluated; for the policy of the start, the first one."""
    its = [number for number in range(1, recipe.iterations + 1) if policy_of(recipe, number) == policy]
    return f"explore{mark(recipe, its[0] if its else 1)}"


def _explores_first(recipe: Recipe) -> bool:
    """Return whether the selector of an evaluation needs episodes explored here, so that exploration comes first."""
    return recipe.explore is not None and recipe.evaluate is not None and "explored" in recipe.evaluate.needs


def average_of(recipe: Recipe, iteration: int) -> str:
    """Return the moving average of policies that an iteration leaves."""
    return f"average{mark(recipe, iteration)}" if iteration else policy_of(recipe, 0)


def keeps_adapters(recipe: Recipe, section: str) -> bool:
    """Return whether the trainings of a section keep adapters by themselves, upon the policy that the loop begins with.

    A training that is done once merges them. So does a training that may teach its tokenizer words, for these change
    the embeddings.
    """
    settings = recipe.training(section)
    learns_words = recipe.rows is not None and recipe.rows.traits.told is not None
    in_loop = recipe.iterations > 1 and section not in ("base", "sft") and not learns_words
    return in_loop and settings is not None and settings.lora is not None


def rank_of_loop(recipe: Recipe) -> int:
    """Return the largest rank of the adapters that the policies of the loop consist of; 0: they are whole models.

    Each iteration adds adapters to the adapters of earlier iterations. If the optimizer continues, so do the adapters.
    """
    if recipe.align is None or recipe.align.lora is None or not keeps_adapters(recipe, "align"):
        return 0
    adds = recipe.align.minibatches is None and not starts_over(recipe)
    return recipe.align.lora.rank * (recipe.iterations if adds else 1)


def is_scored(recipe: Recipe, iteration: int) -> bool:
    """Return whether the policy of an iteration is evaluated."""
    part = recipe.evaluate
    return part is not None and (iteration % part.every == 0 or iteration == recipe.iterations)


def _first(recipe: Recipe) -> Iterator[Stage]:
    """Yield the stages that are done once: the base, the expert's episodes, the base's score, SFT and its score.

    Where the selector of the evaluation needs explored episodes, these scores come after the first exploration.
    """
    scores = recipe.evaluate is not None and not _explores_first(recipe)
    made = ("base",) if recipe.base else ()
    if recipe.base:
        yield Stage("lessons", "collect", "perturn.run.stages.pretraining_stage:show_lessons", reads=_LESSONS)
        does, reads = "perturn.run.stages.train_stage:train", (*_LESSONS, "model")
        yield Stage("base", "train", does, ("lessons",), "base", "base", reads=reads)
    if recipe.sft or recipe.expert or compares_expert(recipe):
        own = recipe.expert is not None and recipe.expert.file is not None
        does = (
            "perturn.run.stages.collect_stage:bring_expert"
            if own
            else "perturn.run.stages.collect_stage:show_expert"
        )
        yield Stage("expert", "collect", does, reads=(*_EXPERT, "sft.tasks", "explore.tasks"))
    if scores:
        yield _evaluation("base", made, _PLAY)
    if recipe.sft:
        # Of the expert's episodes it takes those of its own panel, so that of exploration is nothing to it.
        does, needs = "perturn.run.stages.train_stage:train", (*made, "expert")
        yield Stage("sft", "train", does, needs, "sft", "sft", "base", "base", reads=_SFT)
        if scores:
            yield _evaluation("sft", ("sft",), (*_SFT, *_PLAY))


def _iteration(recipe: Recipe, number: int, trained: dict[str, str]) -> Iterator[Stage]:
    """Yield one iteration: exploration, pairs or credit, alignment, and the aligned policy's score."""
    end, start = mark(recipe, number), policy_of(recipe, number - 1)
    before = (*_EXPLORE, *_explored(recipe)) if number == 1 else ()
    after = _LOOP if recipe.iterations == 1 else ()
    its: Any = {"iteration": number, "mark": end}
    explore, align = f"explore{end}", f"align{end}"
    if recipe.explore:
        goes_on = recipe.explore.traits.resumes_earlier and number > 1
        needs = (
            *((trained[start],) if start in trained else ()),
            *((f"explore{mark(recipe, number - 1)}",) if goes_on else ()),
        )
        does = "explore" if recipe.explore.traits.source is None else "bring_explored"
        yield Stage(
            explore, "collect", f"perturn.run.stages.collect_stage:{does}", needs, start, reads=before, **its
        )
        if number == 1 and _explores_first(recipe):
            yield _evaluation("base", (*(("base",) if recipe.base else ()), explore), before)
            if recipe.sft:
                yield _evaluation("sft", ("sft", explore), before)
    if recipe.explore and recipe.explore.rounds:
        reads = before and (*before, "explore")
        does = "perturn.run.stages.branch_stage:branch"
        by = recipe.explore.traits.policy or start
        begun = (explore, "expert") if recipe.explore.traits.expert else (explore,)
        needs = (*begun, *((trained[by],) if by in trained and by != start else ()))
        yield Stage(f"branch{end}", "collect", does, needs, by, reads=reads, **its)
    seen = _reference(recipe, number)
    alone = before and recipe.iterations == 1
    judged = list(_judged(recipe, explore, {**its, "reads": (*before, "reward") if alone else ()}))
    yield from judged
    rows = list(_rows(recipe, explore, judged, seen, {**its, "reads": _rows_read(recipe, before)}))
    yield from rows
    if recipe.align:
        policy, needs = policy_of(recipe, number), (rows[-1].name,)
        does, origin = "perturn.run.stages.train_stage:train", "base" if starts_over(recipe) else start
        yield Stage(align, "train", does, needs, policy, "align", origin, seen, reads=after, **its)
        if is_scored(recipe, number):
            yield _evaluation(policy, (align,), after, number)


def _explored(recipe: Recipe) -> tuple[str, ...]:
    """Return settings of the explorer that its rollouts read: the settings of every explorer, or all."""
    if recipe.explore is None or recipe.explore.traits.resumes_earlier:
        return ("explore",)
    return tuple(f"explore.{each.name}" for each in fields(ExploreSettings))


def _reference(recipe: Recipe, number: int) -> str:
    """Return the reference of an iteration."""
    kind = recipe.align.reference if recipe.align else "previous"
    if kind == "average":
        return average_of(recipe, number - 1)
    return policy_of(recipe, 0 if kind == "start" else number - 1)


def _judged(recipe: Recipe, explore: str, its: Any) -> Iterator[Stage]:
    """Yield the stages that make an iteration's reward model: pairs of own episodes, and training on them."""
    if recipe.reward_model is None:
        return
    number, end = its["iteration"], its["mark"]
    yield Stage(f"prefer{end}", "pair", "perturn.run.stages.row_stage:prefer", (explore,), **its)
    model, before = (reward_model_of(recipe, each) for each in (number, number - 1))
    seen = policy_of(recipe, 0 if recipe.reward_model.reference == "start" else number - 1)
    does, needs = "perturn.run.stages.train_stage:train", (f"prefer{end}",)
    yield Stage(f"reward{end}", "train", does, needs, model, REWARD_MODEL, before, seen, **its)


def _rows(recipe: Recipe, explore: str, judged: Sequence[Stage], seen: str, its: Any) -> Iterator[Stage]:
    """Yield the stage that makes the rows of the alignment."""
    if recipe.rows is None:
        return
    traits = recipe.rows.traits
    end, grouped = its["mark"], traits.makes == "groups"
    name = {"pairs": "pair", "groups": "credit"}.get(traits.makes, "outcomes")
    by = judged[-1:] if grouped else []  # the reward model has a reference of its own
    branched = traits.explored and recipe.explore is not None and recipe.explore.rounds
    needs = (
        *((explore,) if traits.explored else ()),
        *(("expert",) if compares_expert(recipe) else ()),
        *((f"branch{end}",) if branched else ()),
        *(stage.name for stage in by),
    )
    command, reference = ("credit", by[0].reference if by else seen) if grouped else ("pair", "")
    does = "perturn.run.stages.row_stage:make_rows"
    yield Stage(f"{name}{end}", command, does, needs, reference=reference, **its)


def compares_expert(recipe: Recipe) -> bool:
    """Return whether rows are made of the expert's episodes, or of branches of these."""
    of_his = recipe.explore is not None and recipe.explore.traits.expert
    return of_his or (recipe.rows is not None and recipe.rows.traits.expert)


def _rows_read(recipe: Recipe, before: tuple[str, ...]) -> tuple[str, ...]:
    """Return settings that are read up to the rows, if those up to the exploration are known.

    Reward models of earlier iterations are deleted, so nothing else can make the weights that follow from them.
    """
    if recipe.reward_model is not None and recipe.iterations > 1:
        return ()
    if not before or not makes(recipe, "groups"):
        return before and (*before, "explore", "rows")
    own = ("reward", "rows", "credit", "align.loss", "align.token_budget")  # the loss may name the credit
    return (*before, "explore", *own)


def _evaluation(policy: str, needs: tuple[str, ...], reads: tuple[str, ...], iteration: int = 1) -> Stage:
    """Return the score of a policy."""
    does = "perturn.run.stages.evaluate_stage:evaluate"
    reads = reads and (*reads, *_SCORE)
    return Stage(f"evaluate-{policy}", "evaluate", does, needs, policy, iteration=iteration, reads=reads)
