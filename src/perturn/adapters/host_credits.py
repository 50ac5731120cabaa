"""Check whether another trainer (a "host") provides all inputs that a credit reads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Any

from perturn.credit import Credit
from perturn.errors import ConfigError, check_provided
from perturn.needs import keyword, name_of
from perturn.table import guarded
from perturn.training.credit_choice import check_credit, make_credit
from perturn.types import Action, Task, Trajectory, Turn

STATES = "state keys"
"""Name of an input of credits that compare states: a key of the state before each turn, recorded by the host's user."""


@dataclass(frozen=True)
class HostCredit:
    """A credit whose inputs a host provides; `host_credit` makes it."""

    host: str
    """Name of the host."""
    credit: Credit
    reads_states: bool
    """Whether the credit's weights depend on state keys."""


def host_credit(
    host: str, credit: str | Mapping[str, Any] | Credit, gives: Mapping[str, str | None]
) -> HostCredit:
    """Make a credit for a host, and check that the host provides its inputs, before any training.

    Args:
        host: Name of the host.
        credit: A credit, the name of a credit, or a section `credit`.
        gives: Input besides rewards and groups (STATES or the name of a quantity) -> None if the host provides the
            input, else a remedy.

    Raises:
        ConfigError: If the credit is unknown, or the host does not provide one of its inputs.
    """
    if isinstance(credit, str | Mapping):
        section = {"name": credit} if isinstance(credit, str) else dict(credit)
        made, name = make_credit(section), str(section.get("name"))
    else:
        check_credit(credit, type(credit).__name__)
        made, name = credit, type(credit).__name__
    _check_given(host, made, name, gives)
    return HostCredit(host, made, STATES in read_aspects(made))


def _check_given(host: str, credit: Credit, name: str, gives: Mapping[str, str | None]) -> None:
    """Raise `ConfigError` if a credit reads an input that a host does not provide."""
    for need in _reads(credit):
        hint = gives.get(need, "run it in Perturn")
        check_provided(f"credit {name!r}", [need], [need] if hint is None else (), host, str(hint))


def _reads(credit: Credit) -> Iterator[str]:
    """Yield the inputs of a credit. Inputs from `read_aspects` come last, since finding them takes more time."""
    if credit.traits.trains_branches:
        yield "branches of episodes"
    if credit.traits.sets_clip:
        yield "a clip range for each turn"
    yield from map(name_of, credit.needs)
    yield from sorted(read_aspects(credit), key=lambda aspect: (aspect != STATES, aspect))


def read_aspects(credit: Credit) -> set[str]:
    """Return which inputs that a host may lack a credit reads: state keys, texts, tokens, validity and truncation.

    The credit weighs a small group, and then the group with one input changed. An input is read if the weights change.
    Texts and tokens are also read if the credit gets a field of a turn or an action, except to copy or compare it.

    Raises:
        ConfigError: If the credit raises an error, and reads no texts and no tokens.
    """
    seen: set[str] = set()
    turn, action = _watched(Turn, seen), _watched(Action, seen)
    group = [
        Trajectory(
            Task("probe"),
            tuple(
                turn(_OBSERVATION, action("probe", token_ids=(0,), logprobs=(0.0,)), reward)
                for reward in rewards
            ),
            total_reward=sum(rewards),
            success=sample != 1,
            terminated=True,
            sample=sample,
        )
        for sample, rewards in enumerate([[0.0, 0.5, 1.0], [0.25, 0.0], [0.0, 0.0, 0.0, 0.5]])
    ]
    changed = {aspect: [change(one) for one in group] for aspect, change in _CHANGED.items()}
    seen.clear()
    try:
        with guarded(f"credit {type(credit).__name__} cannot weigh a group of three episodes"):
            plain = _probe(credit, group)
            return {aspect for aspect, other in changed.items() if plain != _probe(credit, other)} | seen
    except ConfigError:
        if seen:
            return seen
        raise


_OBSERVATION = ({"role": "user", "content": "probe"},)
_TEXTS, _TOKENS = "texts", "tokens of actions"
_READ = {
    "observation": _TEXTS,
    "text": _TEXTS,
    "reasoning": _TEXTS,
    "tool_calls": _TEXTS,
    "recalled": _TEXTS,
    "user_said": _TEXTS,
    "token_ids": _TOKENS,
    "logprobs": _TOKENS,
    "ended": _TOKENS,
    "candidates": _TOKENS,
    "versions": _TOKENS,
}
"""Field of a turn or an action that no host provides -> name of the input."""
_OF_DATA_CLASSES = ("replace", "_replace", "__eq__", "__hash__", "__repr__")
"""Functions of data classes that read all fields, to copy, compare, hash or print an object."""


def _watched(kind: Any, seen: set[str]) -> Any:
    """Return a subclass of a data class whose objects add the inputs that are read to `seen`."""

    def read(self: Any, name: str) -> Any:
        if name in _READ and sys._getframe(1).f_code.co_name not in _OF_DATA_CLASSES:
            seen.add(_READ[name])
        return object.__getattribute__(self, name)

    return type(f"Watched{kind.__name__}", (kind,), {"__getattribute__": read})


def _each_turn(one: Trajectory, change: Callable[[int, Turn], Turn]) -> Trajectory:
    return replace(one, turns=tuple(starmap(change, enumerate(one.turns, one.sample))))


_CHANGED: dict[str, Callable[[Trajectory], Trajectory]] = {
    STATES: lambda one: _each_turn(one, lambda at, turn: replace(turn, state_key=f"s{at % 2}")),
    _TEXTS: lambda one: _each_turn(
        one, lambda at, turn: replace(turn, action=replace(turn.action, text=f"probe {at}"))
    ),
    "validity of actions": lambda one: _each_turn(one, lambda at, turn: replace(turn, valid=at % 3 > 0)),
    "truncation of episodes": lambda one: replace(one, terminated=one.sample > 0, truncated=one.sample == 0),
}
"""Name of an input -> function that returns an episode with another value of the input."""


def _probe(credit: Credit, group: Sequence[Trajectory]) -> list[list[float]]:
    """Return the weights of a group, with made-up quantities that differ between turns."""
    needed: dict[str, Any] = {
        keyword(name_of(need)): [[[-0.1 * at - 0.2] for at, _ in enumerate(one.turns)] for one in group]
        for need in credit.needs
    }
    return [one.tolist() for one in credit(group, **needed)]
