"""The value head that chooses at test time: what it learns from, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from perturn.data.run_folder import Run
from perturn.data.store import read_trajectories
from perturn.errors import ConfigError, RunError
from perturn.policy.templates import chat_template
from perturn.run.maker import find_maker, is_made_elsewhere, maker_of
from perturn.run.panels import Panels, read_panels
from perturn.run.session import policy_path
from perturn.settings.recipe import Recipe
from perturn.settings.sections import TOKEN_BUDGET
from perturn.settings.stages import VALUE, chosen_by
from perturn.table import locate


class Values:
    """The value head of a policy, which learns when it is first asked for.

    It has seen the outcomes of explored tasks and of no other: on tasks that are held out, it looks at no result.
    """

    def __init__(self, run: Run, policy: str) -> None:
        """Of a policy of a run."""
        self._run, self._policy = run, policy

    @cached_property
    def learned(self) -> Any:
        """The `perturn.policy.action_values.ActionValues` of the policy, learned from what its run explored last."""
        recipe, maker = self._run.recipe, maker_of(self._run, self._policy, VALUE)
        episodes = sorted(read_trajectories(maker.explored), key=lambda one: one.key)
        budget = recipe.align.token_budget if recipe.align else TOKEN_BUDGET
        open_reader = locate("perturn.quantities.readers:open_reader")
        reader = open_reader(policy_path(self._run, self._policy), None, chat_template(recipe.model), budget)
        make = locate("perturn.policy.action_values:ActionValues")
        return make(reader.model, reader.renderer, episodes, budget)

    def counts(self) -> dict[str, Any]:
        """Episodes that it has learned from, their tokens, and how much it explains of other episodes' scores."""
        explained = self.learned.explained
        said = {} if explained is None else {"value_explained": round(explained, 4)}
        return {"value_episodes": self.learned.episodes, "value_tokens": self.learned.tokens, **said}


def refuse_seen(recipe: Recipe, panels: Panels) -> None:
    """Refuse to choose by a head that has learned from the outcomes of the tasks that it chooses on.

    Raises:
        PerturnError: If tasks are explored and scored, or nobody can tell.
    """
    if chosen_by(recipe) != VALUE:
        return
    theirs = _panels_elsewhere(recipe, panels.environment) if is_made_elsewhere(recipe, VALUE) else panels
    explored, scored = _ids(theirs, "explore"), _ids(panels, "evaluate")
    if both := sorted(explored & scored):
        raise ConfigError(
            f"by=value learns from explored episodes, and {len(both)} of {len(scored)} tasks of evaluate.tasks are "
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
            f"by=value: nothing tells which tasks were explored before {recipe.model.name}; restore it from a copy."
        )
    if panels.environment != environment:
        raise ConfigError(
            f"by=value: {maker.folder} explored {panels.environment}, and {environment} is scored, so nobody can tell "
            "whether its tasks are held out; score the same world in the same version, or choose by something else."
        )
    return panels


def _ids(panels: Panels, name: str) -> set[str]:
    tasks: Sequence[Any] = panels.tasks.get(name, ())
    return {task.id for task in tasks}
