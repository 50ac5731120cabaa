"""Look up the selector of the recipe section `evaluate.select`: an entry of the table, or the user's code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, ClassVar, get_args

from perturn.config.evaluation_settings import SELECT, Candidates
from perturn.config.parsing import build
from perturn.errors import ConfigError, check_fit, check_known
from perturn.io.user_code import load_object
from perturn.select import SELECTORS
from perturn.select.protocol import (
    ActionScorer,
    Among,
    EpisodeScorer,
    Selector,
    SelectorInputs,
    SelectorNeed,
    SelectorTraits,
)
from perturn.table import check_members, check_names, guarded
from perturn.types import Action, Prompt, Task, Trajectory

_SHARED = ("name", *asdict(Candidates()))
"""Keys of the section that are no settings of the selector."""


def make_selector(section: Mapping[str, Any]) -> Selector:
    """Return the selector that a recipe section names, with its settings.

    Raises:
        ConfigError: If there is no selector of this name, or a setting is wrong.
    """
    name = str(section["name"])
    if ":" not in name:
        selector: Selector = build(SELECTORS, section, SELECT, _SHARED)
        _check_kept(selector, name)
        return selector
    found = load_object(name)
    fits = callable(found) and not (isinstance(found, type) and _traits(found) is None)
    must = "be a function that gives scores, or a selector: a class with `traits = SelectorTraits(...)`"
    check_fit(fits, f"{SELECT}.name", must, name)
    made: Selector = build({name: found if isinstance(found, type) else object}, section, SELECT, _SHARED)
    if not isinstance(found, type):
        return Function(name, found)
    _check_kept(made, name)
    return made


def _check_kept(selector: Any, name: str) -> None:
    """Reject a class that misspells a name, lacks a method for its kinds of candidates, or declares an unknown need.

    Raises:
        ConfigError: If the class is rejected; the message names the first mistake.
    """
    known = get_args(Among)
    names = ("traits", *(f"among_{among}" for among in known))
    check_names(type(selector), kind="selector", known=names, traits=SelectorTraits)
    check_members(selector, ("traits",), "selector", "perturn.select.Selector")
    traits: SelectorTraits = selector.traits
    fits = isinstance(traits.among, tuple) and all(among in known for among in traits.among)
    check_fit(fits, f"among in the traits of {name!r}", f"be a tuple with words of {known}", traits.among)
    methods = [f"among_{among}" for among in traits.among]
    check_members(selector, methods, "selector", "perturn.select.SelectorTraits.among")
    for need in sorted(traits.needs):
        check_known(
            need, get_args(SelectorNeed), f"{SELECT}.name: {name!r} needs {need}, which nothing gives"
        )


def traits_of(section: Mapping[str, Any]) -> SelectorTraits:
    """Return the traits of the selector that a recipe section names; for a user's function, the default traits.

    Code that no longer exists has the default traits too, so a finished run can still be read. `make_selector` rejects
    such code before scoring.
    """
    name = str(section["name"])
    try:
        return _traits(load_object(name) if ":" in name else SELECTORS.get(name)) or SelectorTraits()
    except ConfigError:
        return SelectorTraits()


def _traits(found: Any) -> SelectorTraits | None:
    """Return the traits of a selector class; None for any other object."""
    classes = found.__mro__ if isinstance(found, type) else ()
    traits = next((vars(each)["traits"] for each in classes if "traits" in vars(each)), None)
    return traits if isinstance(traits, SelectorTraits) else None


@dataclass(frozen=True)
class Function:
    """Take the candidate with the highest score from a user's function."""

    traits: ClassVar[SelectorTraits] = SelectorTraits()

    name: str
    """Location of the function, as `module:function`."""
    function: Callable[..., Any]
    """Function from the episodes of a task, or from a task, a prompt and a list of distinct actions, to one number per
    episode or action."""

    def among_episodes(self, inputs: SelectorInputs) -> EpisodeScorer:
        """Return a function that scores episodes, and calls the user's function once for each task."""

        def scores(episodes: Sequence[Trajectory]) -> list[float]:
            of_task: dict[str, list[int]] = defaultdict(list)
            for index, one in enumerate(episodes):
                of_task[one.task.id].append(index)
            numbers: dict[int, float] = {}
            for indices in of_task.values():
                candidates = [episodes[index] for index in indices]
                found = self._numbers([candidates], len(candidates), "episodes")
                numbers |= zip(indices, found, strict=True)
            return [numbers[index] for index in range(len(episodes))]

        return scores

    def among_actions(self, inputs: SelectorInputs) -> ActionScorer:
        """Return a function that scores actions, and passes each distinct action to the user's function once."""

        def scores(task: Task, prompt: Prompt, actions: Sequence[Action]) -> list[float]:
            names = [repr((one.text, one.tool_calls, one.token_ids)) for one in actions]
            different = dict(zip(reversed(names), reversed(actions), strict=True))
            asked = {name: different[name] for name in names}
            found = self._numbers([task, prompt, list(asked.values())], len(asked), "actions")
            numbers = dict(zip(asked, found, strict=True))
            return [numbers[name] for name in names]

        return scores

    def _numbers(self, arguments: Sequence[Any], count: int, what: str) -> list[float]:
        """Call the user's function, and return one number per candidate.

        Raises:
            ConfigError: If the function raises an error, or does not return one finite number per candidate.
        """
        with guarded(f"{SELECT}.name: {self.name!r} failed"):
            found = [float(each) for each in self.function(*arguments)]
            if len(found) != count or not all(map(isfinite, found)):
                raise ValueError(
                    f"it must give one finite number for each of the {count} {what}, got {len(found)}: {found!r:.80}."
                )
            return found
