"""Whether an evaluation can choose as it is told to, before any work."""

from __future__ import annotations

from perturn.errors import ConfigError, PerturnError, RunError
from perturn.run.maker import Maker, find_maker, is_made_elsewhere
from perturn.run.panels import Panels, read_panels
from perturn.run.session import engine_settings, evaluation_sampling
from perturn.select import SELECTORS
from perturn.select.lookup import make_selector
from perturn.select.protocol import Need, Selector
from perturn.settings.evaluation import SELECT
from perturn.settings.recipe import Recipe
from perturn.settings.stages import learned_from, stages

_OF_ENGINE: dict[Need, str] = {
    "logprobs": "the log-probabilities of what was sampled",
    "policy": "the policy in memory",
}
"""What an engine that serves checkpoints provides."""
_OF_RUN: dict[Need, str] = {
    "start": "it reads the policy from which another was trained, and no policy here is trained; score a policy in "
    "the checkpoints of the run that trained it",
    "explored": "it learns from explored episodes, and nothing is explored here; add the section explore, score a "
    "policy in the checkpoints of a run that explored",
}
"""What the run that made a policy provides, and what to do where there is no such run."""


def check_selection(recipe: Recipe, maker: Maker | None = None) -> None:
    """Refuse an evaluation that would choose among equal candidates, or by what is not there.

    Args:
        recipe: Of the run that scores.
        maker: The run that will have made its policy; None: look.

    Raises:
        PerturnError: Saying what to set.
    """
    if recipe.evaluate is None or recipe.evaluate.select is None:
        return
    section = recipe.evaluate.select
    traits, among = make_selector(section).traits, section["among"]
    who = f"{SELECT}.name={section['name']}"
    if among not in traits.among:
        raise ConfigError(
            f"{who} chooses among {traits.among[0]} alone, got {SELECT}.among={among}; set {SELECT}.among="
            f"{traits.among[0]}, or take {_others(recipe, among)}."
        )
    if not evaluation_sampling(recipe).temperature:
        raise ConfigError(
            f"{SELECT} chooses among several samples, which are all alike at temperature 0; set "
            "evaluate.sampling.temperature, such as 1.0."
        )
    needs = traits.needed(among)
    missing = [each for each in _OF_ENGINE if each in needs]
    if missing and not engine_settings(recipe).serves_checkpoints:
        raise ConfigError(
            f"{who} needs {_OF_ENGINE[missing[0]]}, which engine {recipe.engine['name']!r} does not give; "
            f"take {_others(recipe, among)}."
        )
    try:
        for need in _OF_RUN:
            if need in needs:
                _check_made(recipe, need, maker)
    except PerturnError as error:
        raise type(error)(f"{who}: {error} Or take {_others(recipe, among)}.") from error


def _others(recipe: Recipe, among: str) -> str:
    """The selectors that could choose here, whatever the run makes."""
    provided = frozenset(_OF_ENGINE) if engine_settings(recipe).serves_checkpoints else frozenset()
    fit = [name for name in SELECTORS if _fits(SELECTORS[name], among, provided)]
    return f"{SELECT}.name={', '.join(fit)} or a function of yours"


def _fits(selector: type[Selector], among: str, provided: frozenset[Need]) -> bool:
    return among in selector.traits.among and selector.traits.needed(among) <= provided


def _check_made(recipe: Recipe, need: Need, planned: Maker | None) -> None:
    """Refuse what no run makes, or the run that made the policy has not.

    Raises:
        PerturnError: Saying what to set, or what is missing in the run that made the policy.
    """
    made_here = planned is None and not is_made_elsewhere(recipe, {need})
    maker = None if made_here else planned or find_maker(recipe)
    if maker is None:
        here = _is_trained(recipe) if need == "start" else recipe.explore is not None
        if not (made_here and here):
            raise ConfigError(f"{_OF_RUN[need]}.")
    elif planned is None:
        maker.require({need})
    elif problem := maker.lack({need}):
        raise ConfigError(problem)


def _is_trained(recipe: Recipe) -> bool:
    """Whether a policy that is evaluated was trained from another."""
    scored = [stage.policy for stage in stages(recipe) if stage.command == "evaluate"]
    return any(learned_from(recipe, policy) is not None for policy in scored)


def refuse_seen(recipe: Recipe, panels: Panels) -> None:
    """Refuse a selector that has learned from the outcomes of the tasks that it chooses on.

    Raises:
        PerturnError: If tasks are explored and scored, or nobody can tell.
    """
    if recipe.evaluate is None or "explored" not in recipe.evaluate.needs:
        return
    theirs = panels
    if is_made_elsewhere(recipe, {"explored"}):
        theirs = _panels_elsewhere(recipe, panels.environment)
    explored = {task.id for task in theirs.tasks.get("explore", ())}
    scored = {task.id for task in panels.tasks.get("evaluate", ())}
    if both := sorted(explored & scored):
        raise ConfigError(
            f"{SELECT} learns from explored episodes, and {len(both)} of {len(scored)} tasks of evaluate.tasks are "
            f"explored too, such as {both[0]!r:.80}, so that it would know their outcomes; score tasks that are held "
            "out, such as another split."
        )


def _panels_elsewhere(recipe: Recipe, environment: str) -> Panels:
    """Tasks of the run that made the policy.

    Raises:
        PerturnError: If it has none, or they are of another world.
    """
    maker = find_maker(recipe)
    panels = None if maker is None else read_panels(maker.paths.tasks)
    if maker is None or panels is None:
        raise RunError(
            f"{SELECT}: nothing tells which tasks were explored before {recipe.model.name}; restore it from a copy."
        )
    if panels.environment != environment:
        raise ConfigError(
            f"{SELECT}: {maker.folder} explored {panels.environment}, and {environment} is scored, so nobody can tell "
            "whether its tasks are held out; score the same world in the same version, or take another selector."
        )
    return panels
