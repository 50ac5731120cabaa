"""Checks which credits another trainer can feed: compares the inputs of a credit with the values the trainer gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Any

from perturn.credit import Credit
from perturn.errors import check_provided
from perturn.needs import keyword, name_of
from perturn.training.credit_choice import check_credit, make_credit
from perturn.types import Action, Task, Trajectory, Turn

STATES = "state keys"
"""Name of an input that a host has where its user passes a name for the state before each turn."""


@dataclass(frozen=True)
class HostCredit:
    """A credit that a host can feed; `host_credit` makes it."""

    host: str
    credit: Credit
    reads_states: bool


def host_credit(
    host: str, credit: str | Mapping[str, Any] | Credit, gives: Mapping[str, str | None]
) -> HostCredit:
    """Return a credit that a host can feed, or reject it before any training.

    Args:
        host: Name of the host.
        credit: A credit, the name of one, or a section `credit`.
        gives: What the host can give besides rewards and groups: STATES and names of quantities. Each is None if the
            host gives it, or else the remedy.

    Raises:
        ConfigError: If there is no such credit, or the host does not give one of its inputs.
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
    """Reject a credit that reads what a host does not give."""
    for need in _reads(credit):
        hint = gives.get(need, "run it in Perturn")
        check_provided(f"credit {name!r}", [need], [need] if hint is None else (), host, str(hint))


def _reads(credit: Credit) -> Iterator[str]:
    """Yield the inputs of a credit; inputs of turns come last, since a group must be weighed for them."""
    if credit.traits.trains_branches:
        yield "branches of episodes"
    if credit.traits.sets_clip:
        yield "a clip range for each turn"
    yield from map(name_of, credit.needs)
    yield from sorted(read_aspects(credit), key=lambda aspect: aspect != STATES)


def read_aspects(credit: Credit) -> set[str]:
    """Return the inputs of a credit besides rewards: state keys, texts, validity of actions.

    It is asked to weigh a small group, and the group with one of these changed. It lists only inputs that change the
    credit's numbers.
    """
    group = [
        Trajectory(
            Task("probe"),
            tuple(Turn((), Action("", token_ids=(0,), logprobs=(0.0,)), reward) for reward in rewards),
            total_reward=sum(rewards),
            success=sample != 1,
            terminated=True,
            sample=sample,
        )
        for sample, rewards in enumerate([[0.0, 0.5, 1.0], [0.25, 0.0], [0.0, 0.0, 0.0, 0.5]])
    ]
    plain = _probe(credit, group)
    return {
        aspect
        for aspect, change in _CHANGED.items()
        if plain
        != _probe(
            credit,
            [replace(one, turns=tuple(starmap(change, enumerate(one.turns, one.sample)))) for one in group],
        )
    }


_CHANGED: dict[str, Callable[[int, Turn], Turn]] = {
    STATES: lambda at, turn: replace(turn, state_key=f"s{at % 2}"),
    "texts": lambda at, turn: replace(
        turn,
        observation=({"role": "user", "content": f"{at} {'done' if at % 2 else 'Nothing happens.'}"},),
        action=replace(turn.action, text=f"{at} {'<think>' if at % 2 else 'search[x]'}"),
    ),
    "validity of actions": lambda at, turn: replace(turn, valid=at % 3 > 0),
}
"""Changes of a turn, by the aspect that they change; each is given the index of the turn plus the sample."""


def _probe(credit: Credit, group: Sequence[Trajectory]) -> list[list[float]]:
    """Return the weights of a group, where quantities are numbers that differ between turns."""
    needed: dict[str, Any] = {
        keyword(name_of(need)): [[[-0.1 * at - 0.2] for at, _ in enumerate(one.turns)] for one in group]
        for need in credit.needs
    }
    return [one.tolist() for one in credit(group, **needed)]
