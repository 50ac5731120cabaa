"""Engine and turn limit of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import ceil

from perturn.envs.named_protocols import PROTOCOLS
from perturn.rules import TurnControl
from perturn.types import Engine, EpisodeProtocol, Trajectory

Serve = Callable[[Engine], Engine]
"""Function from the engine of a policy to the engine that an evaluation uses."""


def _as_it_is(engine: Engine) -> Engine:
    return engine


@dataclass(frozen=True)
class Strategy:
    """Engine and turn control of an evaluation. By default they are as in other episodes."""

    serve: Serve = _as_it_is
    turns: TurnControl | None = None


PLAIN = Strategy()


def controlled(protocol: EpisodeProtocol, turns: TurnControl | None) -> EpisodeProtocol:
    """Return rules with the given turn control. A named protocol is then marked as custom.

    Args:
        protocol: The rules.
        turns: The turn control. None: the rules are returned unchanged.
    """
    if turns is None:
        return protocol
    name = f"{protocol.name}-custom" if protocol.name in PROTOCOLS else protocol.name
    return replace(protocol, name=name, turns=turns)


def extension_counts(episodes: Iterable[Trajectory], protocol: EpisodeProtocol) -> dict[str, int]:
    """Return the number of extended episodes, and the number of all extensions.

    Args:
        episodes: Episodes that were played with turn control.
        protocol: Rules of the episodes.
    """
    assert protocol.turns is not None
    size = protocol.turns.extend or 1
    given = [ceil(max(0, len(one.turns) - protocol.limit(one.task)) / size) for one in episodes]
    return {"extended": sum(map(bool, given)), "extensions": sum(given)}
