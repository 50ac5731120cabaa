"""Whether an evaluation can choose as it is told to, among several episodes of a task or several actions of a turn."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from perturn.envs.load import load_object
from perturn.errors import ConfigError, PerturnError, did_you_mean
from perturn.run.maker import Maker, find_maker, is_made_elsewhere
from perturn.run.session import engine_settings, evaluation_sampling
from perturn.settings.recipe import Recipe
from perturn.settings.stages import IMPLICIT, VALUE, learned_from, stages

_MISSING = {
    VALUE: "learns from explored episodes, and nothing is explored here; add the section explore, score a policy in "
    "the checkpoints of a run that explored",
    IMPLICIT: "reads the policy that another was trained from, and no policy here is trained; score a policy in the "
    "checkpoints of the run that trained it",
}
"""Where a run has nothing to choose by, and its model is no run's."""


def check_choice(
    recipe: Recipe,
    name: str,
    known: Collection[str],
    read_logprobs: Collection[str],
    maker: Maker | None = None,
) -> None:
    """Refuse to choose among what is alike, or by what is not there.

    Args:
        recipe: Whose evaluation has such a section.
        name: Of the section: best_of or rerank.
        known: What it can be chosen by, beside a function.
        read_logprobs: Those that read the log-probabilities of what was sampled.
        maker: The run that will have made the policy; None: look.

    Raises:
        ConfigError: Saying what to set.
    """
    by = getattr(recipe.evaluate, name).by
    where = f"evaluate.{name}"
    if not evaluation_sampling(recipe).temperature:
        raise ConfigError(
            f"{where} chooses among several samples, which are all alike at temperature 0; set "
            "evaluate.sampling.temperature, such as 1.0."
        )
    if ":" in by:
        if not callable(load_object(by)):
            raise ConfigError(f"{where}.by: {by!r} is no function that gives a number each.")
    elif by not in known:
        raise ConfigError(
            f"unknown {where}.by {by!r}.{did_you_mean(by, known)} Known: {', '.join(known)}, or module:function."
        )
    if by in read_logprobs and not engine_settings(recipe).traits.serves_checkpoints:
        raise ConfigError(
            f"{where}.by={by} reads the log-probabilities of what was sampled, which engine "
            f"{recipe.engine['name']!r} does not give; take {_other(known, {*read_logprobs, IMPLICIT, VALUE})}."
        )
    others = _other(known, {IMPLICIT, VALUE})
    if by == VALUE and not engine_settings(recipe).traits.serves_checkpoints:
        raise ConfigError(
            f"{where}.by={VALUE} reads the hidden states of the policy, which engine {recipe.engine['name']!r} does "
            f"not have here; take {others}."
        )
    if by in (VALUE, IMPLICIT):
        _check_made(recipe, where, by, others, maker)


def _check_made(recipe: Recipe, where: str, by: str, others: str, planned: Maker | None) -> None:
    """Refuse values that nothing teaches, and implicit rewards over a policy that is not there.

    Raises:
        PerturnError: Saying what to set, or what is missing in the run that made the policy.
    """
    if planned is None and not is_made_elsewhere(recipe, by):
        has = recipe.explore is not None if by == VALUE else _is_trained(recipe)
        if not has:
            raise ConfigError(f"{where}.by={by} {_MISSING[by]}, or take {others}.")
        return
    maker = planned or find_maker(recipe)
    if maker is None:
        raise ConfigError(f"{where}.by={by} {_MISSING[by]}, or take {others}.")
    try:
        if planned is None:
            maker.require(by)
        elif problem := maker.lack(by):
            raise ConfigError(problem)
    except PerturnError as error:
        raise type(error)(f"{where}.by={by}: {error} Or take {others}.") from error


def _is_trained(recipe: Recipe) -> bool:
    """Whether a policy that is evaluated was trained from another."""
    scored = [stage.policy for stage in stages(recipe) if stage.command == "evaluate"]
    return any(learned_from(recipe, policy) is not None for policy in scored)


def _other(known: Iterable[str], refused: Collection[str]) -> str:
    return f"by={', '.join(by for by in known if by not in refused)} or a function of yours"
