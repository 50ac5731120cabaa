"""Kinds of worlds by their answers when recorded episodes are played again; the kind decides how turns are measured."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from perturn.episodes.replay import play_again
from perturn.episodes.seeds import seed_of
from perturn.errors import DataError, RunError
from perturn.measure.points import Kind
from perturn.types import Environment, EpisodeProtocol, Trajectory

_logger = logging.getLogger(__name__)

REPLAYED = 20
"""Episodes that are played again, at most."""
_TIMES = 2
"""How often each is played again under its own seed."""


@dataclass(frozen=True)
class WorldCheck:
    """Episodes that were played again with their own actions."""

    kind: Kind
    """How the world answers."""
    episodes: int
    came_back: int
    """Episodes that went as before each time, under their own seed, to the last reward."""
    under_another_seed: int
    """Episodes that went as before under another seed too."""


def check_world(
    env: Environment, episodes: Sequence[Trajectory], protocol: EpisodeProtocol, *, has_user: bool = False
) -> WorldCheck:
    """Play some episodes again with their own actions, and say how the world answers.

    - deterministic: equal under any seed, so that a state follows from the actions so far;
    - seeded: the same under the episode's own seed;
    - open: not always the same, or a model plays the user, so that an action has several answers.

    Args:
        env: The world.
        episodes: Recorded ones; the first `REPLAYED` are played.
        protocol: The rules they were played by.
        has_user: Whether a model plays the user.

    Raises:
        RunError: If no episode is answered as it was recorded.
    """
    chosen, problem = episodes[:REPLAYED], ""
    restored = back = other = 0
    for one in chosen:
        own = [_difference(env, one, protocol) for _ in range(_TIMES)]
        restored += all(each.restored for each in own)
        problem = problem or next((each.problem for each in own if each.problem), "")
        back += not any(each.problem for each in own)
        other += not _difference(env, replace(one, seed=seed_of("another", one.seed)), protocol).problem
    if chosen and not restored:
        raise RunError(
            f"none of {len(chosen)} episodes went as it was recorded when it was played again, so that the world "
            f"cannot be restored to a turn: {problem}"
        )
    if problem:
        _logger.warning(
            "%d of %d episodes went otherwise when played again: %s", len(chosen) - back, len(chosen), problem
        )
    kind: Kind = (
        "open" if has_user or back < len(chosen) else "deterministic" if other == len(chosen) else "seeded"
    )
    return WorldCheck(kind, len(chosen), back, other)


class _Difference(NamedTuple):
    """Difference of an episode that is played again from its record."""

    restored: bool
    """Whether the world said the same before each turn."""
    problem: str
    """The difference in words; "" where there is none."""


def _difference(env: Environment, one: Trajectory, protocol: EpisodeProtocol) -> _Difference:
    """Return the differences of an episode from its record, in observations, rewards and end."""
    try:
        again = play_again(env, one, protocol)
    except DataError as error:
        return _Difference(False, str(error))
    then, now = ([turn.own_reward for turn in each.turns] for each in (one, again))
    ends = [(each.terminated, each.terminated and each.success) for each in (one, again)]
    where = f"task {one.task.id!r:.80}, sample {one.sample}"
    if then != now:
        return _Difference(True, f"{where}: expected the rewards {then}, got {now}.")
    if ends[0] != ends[1]:
        return _Difference(True, f"{where}: expected (ended, success) {ends[0]}, got {ends[1]}.")
    return _Difference(True, "")
