"""Classify an environment by its answers to replayed episodes. The kind decides how turns are measured."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from perturn.episodes.replay import play_again
from perturn.episodes.seeds import seed_of
from perturn.errors import DataError, EnvironmentFailure, RunError
from perturn.measure.points import Kind, histories
from perturn.types import Environment, EpisodeProtocol, Trajectory, failed

_logger = logging.getLogger(__name__)

REPLAYED = 20
"""Maximum number of episodes to replay."""
_TIMES = 2
"""Number of replays of each episode under its own seed."""
_TRIES = 2
"""Number of times to try a replay in which the environment raises, dies or hangs."""


@dataclass(frozen=True)
class WorldCheck:
    """Result of replaying recorded episodes with their own actions."""

    kind: Kind
    """How the environment answers."""
    episodes: int
    """Number of replayed episodes, without episodes in whose replay the environment failed."""
    came_back: int
    """Number of episodes that every replay under the episode's own seed reproduced, including all rewards and the end.
    """
    under_another_seed: int
    """Number of episodes that a replay under another seed reproduced."""
    answers_differ: bool = False
    """Whether the kind is `seeded` since explored episodes got different answers to one action after one history."""


def check_world(
    env: Environment,
    episodes: Sequence[Trajectory],
    protocol: EpisodeProtocol,
    explored: Sequence[Trajectory] = (),
    *,
    has_user: bool = False,
) -> WorldCheck:
    """Replay some episodes with their own actions, and classify the environment.

    - deterministic: Replays are equal under any seed, so that a state follows from the earlier actions. Episodes never
      got different answers to one action after one history.
    - seeded: Replays are equal under the seed of the episode.
    - open: Replays differ, or a model plays the user, so that an action has several possible answers.

    Args:
        env: The environment.
        episodes: Recorded episodes. Only the first `REPLAYED` are replayed.
        protocol: Protocol of the recorded episodes.
        explored: All episodes of the exploration, whose recorded answers are compared too.
        has_user: Whether a model plays the user.

    Raises:
        RunError: If no replay gives the recorded observations.
    """
    problem, failure, answers_differ = "", "", False
    replayed = restored = back = other = 0
    for one in episodes[:REPLAYED]:
        own = [_difference(env, one, protocol)]
        own += [_difference(env, one, protocol) for _ in range(1, _TIMES) if not own[0].has_failed]
        if broken := [each.problem for each in own if each.has_failed]:
            failure = failure or broken[0]
            continue
        replayed += 1
        restored += all(each.restored for each in own)
        problem = problem or next((each.problem for each in own if each.problem), "")
        back += not any(each.problem for each in own)
        other += not _difference(env, replace(one, seed=seed_of("another", one.seed)), protocol).problem
    _tell(len(episodes[:REPLAYED]), replayed, restored, back, problem, failure)
    if has_user or back < replayed:
        kind: Kind = "open"
    else:
        answers_differ = other == replayed and _differ([*episodes, *explored])
        kind = "seeded" if other < replayed or answers_differ else "deterministic"
    return WorldCheck(kind, replayed, back, other, answers_differ)


def _tell(chosen: int, replayed: int, restored: int, back: int, problem: str, failure: str) -> None:
    """Warn of replays that differ or fail.

    Args:
        chosen: Number of chosen episodes.
        replayed: Number of episodes in whose replays the environment did not fail.
        restored: Number of episodes whose replays gave the recorded observations.
        back: Number of episodes whose replays gave the recorded observations, rewards and end.
        problem: Description of the first difference; empty if there is none.
        failure: Description of the first failure; empty if there is none.

    Raises:
        RunError: If no replay gives the recorded observations.
    """
    if chosen and not restored:
        raise RunError(
            f"none of {chosen} episodes went as it was recorded when it was played again, so that the world "
            f"cannot be restored to a turn: {problem or failure}"
        )
    if failure:
        _logger.warning(
            "the kind of the environment is found without %d of %d episodes: %s",
            chosen - replayed,
            chosen,
            failure,
        )
    if problem:
        _logger.warning(
            "%d of %d episodes went otherwise when played again: %s", replayed - back, replayed, problem
        )
    if 2 * restored < replayed:
        _logger.warning(
            "only %d of %d episodes got their recorded observations again; turns to which the environment does not "
            "return are not measured, so the measured turns will mostly be first turns.",
            restored,
            replayed,
        )


def _differ(episodes: Sequence[Trajectory]) -> bool:
    """Return whether episodes got different answers to the same action after the same history.

    Recorded actions may never reveal a hidden state that a seed sets, so replays under another seed can be equal.
    """
    rewards: dict[bytes, float] = {}
    answers: dict[bytes, object] = {}
    for one in episodes:
        if failed(one):
            continue
        keys = list(histories(one))
        later: list[object] = [before for before, _ in keys[1:]]
        later.append(one.success if one.terminated else None)  # None: the last answer is not recorded
        for (_, key), turn, answer in zip(keys, one.turns, later, strict=True):
            if answer is None:
                continue
            if rewards.setdefault(key, turn.own_reward) != turn.own_reward:
                return True
            if answers.setdefault(key, answer) != answer:
                return True
    return False


class _Difference(NamedTuple):
    """Difference between a recorded episode and its replay."""

    restored: bool
    """Whether the environment gave the recorded observation before each turn."""
    problem: str
    """Description of the difference or failure; empty if there is none."""
    has_failed: bool = False
    """Whether the environment failed in each try."""


def _difference(env: Environment, one: Trajectory, protocol: EpisodeProtocol) -> _Difference:
    """Replay an episode, and return its differences in observations, rewards and end."""
    for left in reversed(range(_TRIES)):
        try:
            again = play_again(env, one, protocol, retries=0)
            break
        except DataError as error:
            return _Difference(False, str(error))
        except EnvironmentFailure as error:
            if not left:
                return _Difference(False, str(error), has_failed=True)
    then, now = ([turn.own_reward for turn in each.turns] for each in (one, again))
    ends = [(each.terminated, each.terminated and each.success) for each in (one, again)]
    where = f"task {one.task.id!r:.80}, sample {one.sample}"
    if then != now:
        return _Difference(True, f"{where}: recorded rewards {then}, now {now}.")
    if ends[0] != ends[1]:
        return _Difference(True, f"{where}: recorded (ended, success) {ends[0]}, now {ends[1]}.")
    return _Difference(True, "")
