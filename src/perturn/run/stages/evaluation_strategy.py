"""Engine and turn limit of an evaluation, where they depart from plain episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import ceil

from perturn.envs.named_protocols import PROTOCOLS
from perturn.rules import TurnControl
from perturn.types import Engine, EpisodeProtocol, Trajectory

Serve = Callable[[Engine], Engine]
"""Makes the engine that an evaluation asks, from the engine of a policy."""


def _as_it_is(engine: Engine) -> Engine:
    return engine


@dataclass(frozen=True)
class Strategy:
    """Departures from plain episodes; none by default."""

    serve: Serve = _as_it_is
    turns: TurnControl | None = None


PLAIN = Strategy()


def controlled(protocol: EpisodeProtocol, turns: TurnControl | None) -> EpisodeProtocol:
    """Return rules with control of turns; a named protocol is then marked as custom.

    Args:
        protocol: The rules.
        turns: The control; None: there is none.
    """
    if turns is None:
        return protocol
    name = f"{protocol.name}-custom" if protocol.name in PROTOCOLS else protocol.name
    return replace(protocol, name=name, turns=turns)


def extension_counts(episodes: Iterable[Trajectory], protocol: EpisodeProtocol) -> dict[str, int]:
    """Return how many episodes were extended, and how often in all.

    Args:
        episodes: Played under control of turns.
        protocol: Their rules.
    """
    assert protocol.turns is not None
    size = protocol.turns.extend or 1
    given = [ceil(max(0, len(one.turns) - protocol.limit(one.task)) / size) for one in episodes]
    return {"extended": sum(map(bool, given)), "extensions": sum(given)}
