"""From the section `evaluate.select` of a recipe to its selector: an entry of the table, or code of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, ClassVar, get_args

from perturn.config.evaluation_settings import SELECT, Candidates
from perturn.config.parsing import build
from perturn.envs.load_environment import load_object
from perturn.errors import ConfigError, check_fit, check_known
from perturn.select import SELECTORS
from perturn.select.protocol import (
    ActionScorer,
    EpisodeScorer,
    Selector,
    SelectorInputs,
    SelectorNeed,
    SelectorTraits,
)
from perturn.table import check_members, guarded
from perturn.types import Action, Prompt, Task

_SHARED = ("name", *asdict(Candidates()))
"""Settings of the section that are no selector's own."""


def make_selector(section: Mapping[str, Any]) -> Selector:
    """Return the selector that the section names, with its settings.

    Raises:
        ConfigError: If there is none of that name, or a setting is wrong.
    """
    name = str(section["name"])
    if ":" not in name:
        selector: Selector = build(SELECTORS, section, SELECT, _SHARED)
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
    """Reject a class that lacks what its traits declare, or declares a need that nothing meets.

    Raises:
        ConfigError: Before any work, naming the first that is wrong.
    """
    traits: SelectorTraits = selector.traits
    methods = [f"among_{among}" for among in traits.among]
    check_members(selector, methods, "selector", "perturn.select.SelectorTraits.among")
    for need in sorted(traits.needs):
        check_known(
            need, get_args(SelectorNeed), f"{SELECT}.name: {name!r} needs {need}, which nothing gives"
        )


def traits_of(section: Mapping[str, Any]) -> SelectorTraits:
    """Return the traits of the selector that the section names; the default ones of a function of the user's.

    Code that is not there any more has the default traits too, so that a run that is done can still be read. Before a
    score is made, `make_selector` rejects it.
    """
    name = str(section["name"])
    try:
        return _traits(load_object(name) if ":" in name else SELECTORS.get(name)) or SelectorTraits()
    except ConfigError:
        return SelectorTraits()


def _traits(found: Any) -> SelectorTraits | None:
    """Return the traits of a class of a selector; None of anything else."""
    classes = found.__mro__ if isinstance(found, type) else ()
    traits = next((vars(each)["traits"] for each in classes if "traits" in vars(each)), None)
    return traits if isinstance(traits, SelectorTraits) else None


@dataclass(frozen=True)
class Function:
    """Take the candidate with the highest number, by a function of the user's."""

    traits: ClassVar[SelectorTraits] = SelectorTraits()

    name: str
    """`module:function`."""
    function: Callable[..., Any]
    """From the episodes to a number each; or from a task, a prompt and different actions to a number each."""

    def among_episodes(self, inputs: SelectorInputs) -> EpisodeScorer:
        """Return the function, which must give each episode a finite number."""
        return lambda episodes: self._numbers([episodes], len(episodes), "episodes")

    def among_actions(self, inputs: SelectorInputs) -> ActionScorer:
        """Return the function, which is asked about each different action of a turn once."""

        def scores(task: Task, prompt: Prompt, actions: Sequence[Action]) -> list[float]:
            names = [repr((one.text, one.tool_calls, one.token_ids)) for one in actions]
            different = dict(zip(reversed(names), reversed(actions), strict=True))
            asked = {name: different[name] for name in names}
            found = self._numbers([task, prompt, list(asked.values())], len(asked), "actions")
            numbers = dict(zip(asked, found, strict=True))
            return [numbers[name] for name in names]

        return scores

    def _numbers(self, arguments: Sequence[Any], count: int, what: str) -> list[float]:
        """Return one number a candidate.

        Raises:
            ConfigError: If the function fails, or gives anything else.
        """
        with guarded(f"{SELECT}.name: {self.name!r} failed"):
            found = [float(each) for each in self.function(*arguments)]
            if len(found) != count or not all(map(isfinite, found)):
                raise ValueError(
                    f"it must give one finite number for each of the {count} {what}, got {len(found)}: {found!r:.80}."
                )
            return found
