"""From the section `evaluate.select` of a recipe to its selector: an entry of the table, or code of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, ClassVar

from perturn.envs.load import load_object
from perturn.errors import ConfigError
from perturn.select import SELECTORS
from perturn.select.protocol import (
    ActionScorer,
    EpisodeScorer,
    Selector,
    SelectorInputs,
    SelectorTraits,
)
from perturn.settings.evaluation import SELECT, Candidates
from perturn.settings.keys import unknown_name
from perturn.settings.parsing import parse
from perturn.types import Action, Prompt, Task

_SHARED = ("name", *asdict(Candidates()))
"""Settings of the section that are no selector's own."""


def make_selector(section: Mapping[str, Any]) -> Selector:
    """Return the selector that the section names, with its settings.

    Raises:
        ConfigError: If there is none of that name, or a setting is wrong.
    """
    name = str(section["name"])
    if ":" not in name and name not in SELECTORS:
        raise ConfigError(unknown_name(SELECT, name, SELECTORS))
    found: Any = load_object(name) if ":" in name else SELECTORS[name]
    own = {key: value for key, value in section.items() if key not in _SHARED}
    if isinstance(found, type):
        _traits(name, found)
        selector: Selector = parse(found, own, SELECT, also=_SHARED)
        return selector
    if not callable(found):
        raise ConfigError(f"{SELECT}.name: {name!r} is neither a selector nor a function that gives scores.")
    if own:
        raise ConfigError(
            f"{SELECT}.{next(iter(own))}: a function has no settings; leave it out, or name a class."
        )
    return Function(name, found)


def traits_of(section: Mapping[str, Any]) -> SelectorTraits:
    """Return the traits of the selector that the section names; of a function of the user's, the default ones.

    Code that is not there any more has the default traits too, so that a run that is done can still be read; a score
    that is to be made is checked by `make_selector` first.

    Raises:
        ConfigError: If a class of the user's is no selector.
    """
    name = str(section["name"])
    try:
        found = load_object(name) if ":" in name else SELECTORS.get(name)
    except ConfigError:
        return SelectorTraits()
    return _traits(name, found) if isinstance(found, type) else SelectorTraits()


def _traits(name: str, kind: type[Selector]) -> SelectorTraits:
    """The traits of a class.

    Raises:
        ConfigError: If it has none.
    """
    try:
        return kind.traits
    except AttributeError:
        raise ConfigError(
            f"{SELECT}.name: {name!r} has no `traits`; a selector has `traits = SelectorTraits(...)`."
        ) from None


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
        """One number a candidate.

        Raises:
            ConfigError: If the function fails, or gives anything else.
        """
        try:
            found = [float(each) for each in self.function(*arguments)]
        except Exception as error:  # a function of others
            raise ConfigError(
                f"{SELECT}.name: {self.name!r} failed: {type(error).__name__}: {error}"
            ) from error
        if len(found) != count or not all(map(isfinite, found)):
            raise ConfigError(
                f"{SELECT}.name: {self.name!r} must give one finite number for each of the {count} {what}, got "
                f"{len(found)}: {found!r:.80}."
            )
        return found
