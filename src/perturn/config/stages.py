"""The stages of a recipe, computed from its settings alone. Nothing is opened or loaded here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from perturn.config.explorer_settings import ExploreSettings
from perturn.config.recipe import REWARD_MODEL, Recipe
from perturn.config.row_maker_settings import ROWS, RowTraits
from perturn.table import name_of
from perturn.table_index import table

# Settings that a stage and the stages before it read, as keys of the recipe. A section stands for all its keys.
_WORLD = ("seed", "environment", "protocol")
_MODEL = ("model", "base")
_LESSONS = ("base", "environment", "protocol")  # `base` has a seed of its own
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
    """One stage of a run."""

    name: str
    """Name, unique in the run. With several iterations it ends in the iteration's number, as in `explore-003`."""
    command: str
    """Command that runs this stage alone: collect, pair, credit, train or evaluate."""
    does: str
    """Function that runs the stage, as `module:function`."""
    needs: tuple[str, ...] = ()
    """Names of the stages whose results this stage reads."""
    policy: str = ""
    """Policy that plays the episodes, or that the training makes."""
    section: str = ""
    """Section of the recipe with the settings of a training stage: base, sft, reward.model or align."""
    start: str = ""
    """Policy that a training stage starts from."""
    reference: str = ""
    """Reference policy of a training stage or a credit."""
    iteration: int = 1
    mark: str = ""
    """End of the names of the stage's files: empty, or for example `-003` with several iterations."""
    reads: tuple[str, ...] = ()
    """Keys of all settings that this stage and the stages before it read. If two recipes have equal values for these
    keys, their stages make the same files, and the runs of a study share them. Empty: the stage is never shared. With
    several iterations it is empty from the first alignment on, since policies and optimizers are deleted between
    iterations."""


def stages(recipe: Recipe) -> list[Stage]:
    """Return the stages of a recipe, in order. If a section is missing, so are its stages."""
    found = list(_first(recipe))
    for iteration in range(1, recipe.iterations + 1):
        trained = {stage.policy: stage.name for stage in found if stage.command == "train"}
        found += _iteration(recipe, iteration, trained)
    return found


def is_read(key: str, reads: Iterable[str]) -> bool:
    """Return whether `reads`, the keys that a stage reads, includes a dotted key. A section includes all its keys."""
    return any(key == each or key.startswith(f"{each}.") for each in reads)


def mark(recipe: Recipe, iteration: int) -> str:
    """Return the end of the names of an iteration's files, such as `-003`; empty if there is only one iteration."""
    return f"-{iteration:03d}" if recipe.iterations > 1 else ""


def policy_of(recipe: Recipe, iteration: int) -> str:
    """Return the name of the policy that an iteration makes; iteration 0 is the policy before the first iteration.

    If the loss is a class of the user's code, `file.py:Class`, the policy has the name of the class.
    """
    if recipe.align is None or iteration == 0:
        return "sft" if recipe.sft else "base"
    by_rows = recipe.rows is not None and recipe.rows.traits.names_policy
    name = rows_name(recipe) if by_rows else recipe.align.loss["name"]
    return f"{str(name).rpartition(':')[2]}{mark(recipe, iteration)}"


def is_of_run(recipe: Recipe, name: str) -> bool:
    """Return whether a policy belongs to the run, by its name."""
    return name == "base" or name in {stage.policy for stage in stages(recipe) if stage.command == "train"}


def rows_name(recipe: Recipe) -> str:
    """Return the name of the row maker of a recipe that has one."""
    return name_of(table(ROWS.table), type(recipe.rows))


def traits_of(recipe: Recipe) -> RowTraits | None:
    """Return the traits of the row maker of a recipe; None if the recipe has no row maker."""
    return recipe.rows.traits if recipe.rows else None


def makes(recipe: Recipe, *kinds: str) -> bool:
    """Return whether the row maker of a recipe makes rows of one of the given kinds."""
    return recipe.rows is not None and recipe.rows.traits.makes in kinds


def starts_over(recipe: Recipe) -> bool:
    """Return whether the alignment trains the policy before SFT instead of the policy that explored."""
    return recipe.rows is not None and recipe.rows.traits.starts_over


def own_files(recipe: Recipe) -> dict[str, str]:
    """Return the user's own files that a recipe trains on, by the dotted keys that name them."""
    rows = recipe.rows.traits.source if recipe.rows else None
    expert = recipe.expert.file if recipe.expert else None
    explored = recipe.explore.traits.source if recipe.explore else None
    named = (("expert.file", expert), ("explore.path", explored), ("rows.path", rows))
    return {key: file for key, file in named if file is not None}


def suffix_of(recipe: Recipe, policy: str) -> str | None:
    """Return the prompt suffix that asks a policy for success; None if training added no such suffixes."""
    suffixes_of_rows = recipe.rows.traits.suffixes if recipe.rows else None
    aligned = {policy_of(recipe, number) for number in range(1, recipe.iterations + 1)}
    return suffixes_of_rows[0] if suffixes_of_rows and policy in aligned else None


def reward_model_of(recipe: Recipe, iteration: int) -> str:
    """Return the name of the reward model after an iteration; after 0 iterations, the policy that it starts from."""
    return f"prm{mark(recipe, iteration)}" if iteration else policy_of(recipe, 0)


def learned_from(recipe: Recipe, policy: str) -> str | None:
    """Return the policy from which the training of a policy, over all iterations, started; None for the base."""
    if policy == "base":
        return None
    return "base" if policy == "sft" or starts_over(recipe) else policy_of(recipe, 0)


def explored_before(recipe: Recipe, policy: str) -> str:
    """Return the name of the exploration before a policy's evaluation; for base and sft, the first exploration."""
    its = [number for number in range(1, recipe.iterations + 1) if policy_of(recipe, number) == policy]
    return f"explore{mark(recipe, its[0] if its else 1)}"


def _explores_first(recipe: Recipe) -> bool:
    """Return whether the evaluation's selector needs the run's explored episodes, so that exploration comes first."""
    return recipe.explore is not None and recipe.evaluate is not None and "explored" in recipe.evaluate.needs


def average_of(recipe: Recipe, iteration: int) -> str:
    """Return the name of the moving average of policies after an iteration."""
    return f"average{mark(recipe, iteration)}" if iteration else policy_of(recipe, 0)


def keeps_adapters(recipe: Recipe, section: str) -> bool:
    """Return whether the trainings of a section save adapters alone, and do not merge them into the weights.

    The saved adapters are added to the policy that the first iteration starts from. A training that runs only once
    merges its adapters. So does a training that may add words to the tokenizer, since these words change the
    embeddings.
    """
    settings = recipe.training(section)
    learns_words = recipe.rows is not None and recipe.rows.traits.suffixes is not None
    in_loop = recipe.iterations > 1 and section not in ("base", "sft") and not learns_words
    return in_loop and settings is not None and settings.lora is not None


def rank_of_loop(recipe: Recipe) -> int:
    """Return the largest rank of the adapters of aligned policies; 0 if policies are stored as whole models.

    Each iteration adds adapters to the adapters of earlier iterations, so the rank grows. If the optimizer continues
    from iteration to iteration, the iterations train one set of adapters.
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
    """Yield the stages before the iterations: the base, the expert's episodes, the base's score, SFT and its score.

    If the evaluation's selector needs explored episodes, these scores come after the first exploration.
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
        # SFT trains on the expert's episodes of its own task list, so it does not read the task list of exploration.
        does, needs = "perturn.run.stages.train_stage:train", (*made, "expert")
        yield Stage("sft", "train", does, needs, "sft", "sft", "base", "base", reads=_SFT)
        if scores:
            yield _evaluation("sft", ("sft",), (*_SFT, *_PLAY))


def _iteration(recipe: Recipe, number: int, trained: dict[str, str]) -> Iterator[Stage]:
    """Yield the stages of one iteration: exploration, pairs or credit, alignment, and the aligned policy's score."""
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
        does, origin = "perturn.run.stages.train_stage:train", "base" if starts_over(recipe) else start
        policy = policy_of(recipe, number)
        needs = (rows[-1].name, *((trained[origin],) if origin in trained else ()))
        yield Stage(align, "train", does, needs, policy, "align", origin, seen, reads=after, **its)
        if is_scored(recipe, number):
            yield _evaluation(policy, (align,), after, number)


def _explored(recipe: Recipe) -> tuple[str, ...]:
    """Return the keys of the explorer's settings that the stage `explore` depends on.

    Perturn's explorers that branch share their rollouts, which depend on the settings of every explorer alone.
    """
    explorer = recipe.explore
    plain = explorer is not None and type(explorer).__module__.startswith("perturn.")
    if explorer is None or not plain or explorer.traits.resumes_earlier or explorer.traits.source is not None:
        return ("explore",)
    return tuple(f"explore.{each.name}" for each in fields(ExploreSettings))


def _reference(recipe: Recipe, number: int) -> str:
    """Return the name of an iteration's reference policy."""
    kind = recipe.align.reference if recipe.align else "previous"
    if kind == "average":
        return average_of(recipe, number - 1)
    return policy_of(recipe, 0 if kind == "start" else number - 1)


def _judged(recipe: Recipe, explore: str, its: Any) -> Iterator[Stage]:
    """Yield the stages of an iteration's reward model: making pairs of explored episodes, and training on them."""
    if recipe.reward_model is None:
        return
    number, end = its["iteration"], its["mark"]
    yield Stage(f"prefer{end}", "pair", "perturn.run.stages.row_stage:prefer", (explore,), **its)
    model, before = (reward_model_of(recipe, each) for each in (number, number - 1))
    seen = policy_of(recipe, 0 if recipe.reward_model.reference == "start" else number - 1)
    does, needs = "perturn.run.stages.train_stage:train", (f"prefer{end}",)
    yield Stage(f"reward{end}", "train", does, needs, model, REWARD_MODEL, before, seen, **its)


def _rows(recipe: Recipe, explore: str, judged: Sequence[Stage], seen: str, its: Any) -> Iterator[Stage]:
    """Yield the stage that makes the training rows of the alignment."""
    if recipe.rows is None:
        return
    traits = recipe.rows.traits
    end, grouped = its["mark"], traits.makes == "groups"
    name = {"pairs": "pair", "groups": "credit"}.get(traits.makes, "outcomes")
    by = judged[-1:] if grouped else []  # the reward model has its own reference policy
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
    """Return whether the rows are made from the expert's episodes, or from episodes that branch off from them."""
    of_his = recipe.explore is not None and recipe.explore.traits.expert
    return of_his or (recipe.rows is not None and recipe.rows.traits.expert)


def _rows_read(recipe: Recipe, before: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys of all settings that the rows depend on.

    Empty with a reward model in several iterations: its earlier versions are deleted, so the rows cannot be made again.
    `before` holds the keys that the exploration depends on.
    """
    if recipe.reward_model is not None and recipe.iterations > 1:
        return ()
    if not before or not makes(recipe, "groups"):
        return before and (*before, "explore", "rows")
    own = ("reward", "rows", "credit", "align.loss", "align.token_budget")  # a loss may choose the credit
    return (*before, "explore", *own)


def _evaluation(policy: str, needs: tuple[str, ...], reads: tuple[str, ...], iteration: int = 1) -> Stage:
    """Return the stage that evaluates a policy."""
    does = "perturn.run.stages.evaluate_stage:evaluate"
    reads = reads and (*reads, *_SCORE)
    return Stage(f"evaluate-{policy}", "evaluate", does, needs, policy, iteration=iteration, reads=reads)
