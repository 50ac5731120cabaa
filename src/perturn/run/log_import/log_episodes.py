"""Assemble trajectories from logged calls or rollouts, by the prefix rule of the recording endpoint."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from perturn.episodes.prefix_matching import Cause, Position, Sequences, as_recorded, in_call_order
from perturn.formats.logs.log_entries import Rollout, Step
from perturn.run.log_import.log_spool import Logged, can_carry_loss
from perturn.types import OPENS, Message, Opening, Status, Task, Trajectory, Turn

_LONGEST = 200
"""Longest id of a task, in characters. A longer text is replaced by its digest."""


@dataclass(frozen=True)
class LoggedEpisode:
    """An episode from a log."""

    trajectory: Trajectory
    is_scored: bool
    """Whether any call of the episode has the score."""
    sequences: int
    """Number of sequences that the turns form."""
    broke: Counter[Cause]
    """Number of requests that opened another sequence, by cause."""


@dataclass
class Assembled:
    """Turns of an episode, each linked to the turn that it continues."""

    opening: Opening
    turns: list[Turn]
    broke: Counter[Cause]

    @property
    def sequences(self) -> int:
        """Number of sequences that the turns form."""
        return 1 + sum(1 for turn in self.turns[1:] if turn.follows == OPENS)


def assemble(steps: Iterable[Step]) -> Assembled:
    """Return the turns of an episode's answers, each linked to the turn whose context it extends.

    Raises:
        DataError: If a message cannot be stored in an episode.
    """
    sequences = Sequences()
    found = Assembled(Opening(), [], Counter())
    earlier: tuple[Position, list[Message], Sequence[object]] | None = None
    for index, step in enumerate(steps):
        messages = in_call_order(step.messages)
        if earlier is None or earlier[2] != step.tools:
            asked = sequences.position(messages, step.tools)
        else:
            asked = sequences.position(messages, earlier=earlier[0], same=_shared(earlier[1], messages))
        earlier = asked, messages, step.tools
        opens, answer = asked.follows == OPENS, as_recorded(step.answer)
        if opens and not index:
            found.opening = Opening(asked.prompt, step.tools)
        turn = Turn(
            asked.heard,
            answer,
            reward=step.reward or 0.0,
            trained=step.trained and can_carry_loss(step.answer),
            follows=None if asked.follows == index - 1 else asked.follows,
            opening=Opening(asked.prompt, step.tools) if opens and index else None,
        )
        found.turns.append(turn)
        sequences.add(asked, answer.message())
        if asked.broke is not None:
            found.broke[asked.broke.cause] += 1
    return found


def _shared(one: Sequence[Message], other: Sequence[Message]) -> int:
    """Return the number of messages that two conversations share at the start."""
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False)))


def episode_of(calls: Sequence[Logged], environment: str, success_at: float | None) -> LoggedEpisode:
    """Return the episode that consists of the given calls, which are in the order of time.

    The reward of a turn is the score of its call, and the total reward is the sum of the rewards. If only one choice of
    a response is continued, it has the score of the response. The episode is a success if each of its scores is large
    enough.

    Args:
        calls: The calls; at least one.
        environment: Name of the log's format, which becomes the trajectory's environment.
        success_at: Smallest score of a success. None: any score above 0.
    """
    found = assemble(
        Step(tuple(call.messages), call.action, call.tools, call.score, call.held["trained"])
        for call in calls
    )
    scores = [call.score for call in calls if call.score is not None]
    succeeded = [score > 0 if success_at is None else score >= success_at for score in scores]
    trajectory = Trajectory(
        Task(_named(calls[0].held["task"], [Step(tuple(calls[0].messages), calls[0].action)])),
        _at_continued(calls, found.turns),
        environment=environment,
        prompt=found.opening.prompt,
        tools=found.opening.tools,
        total_reward=sum(scores),
        success=bool(succeeded) and all(succeeded),
        truncated=not found.turns[-1].action.ended,
        policy=" + ".join(dict.fromkeys(str(call.held["model"]) for call in calls if call.held["model"]))[
            :_LONGEST
        ],
    )
    return LoggedEpisode(trajectory, bool(scores), found.sequences, found.broke)


def _at_continued(calls: Sequence[Logged], turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return the turns, with the reward of each response at its only continued choice, or else at its first choice."""
    continued = {index - 1 if turn.follows is None else turn.follows for index, turn in enumerate(turns)}
    responses: dict[int, set[int]] = {}
    first = 0
    for index, call in enumerate(calls):
        first = first if call.held["choice"] else index
        responses.setdefault(first, set()).add(index)
    found = list(turns)
    for first, choices in responses.items():
        kept = choices & continued
        if len(kept) == 1 and first not in kept:
            (at,) = kept
            found[first] = replace(turns[first], reward=turns[at].reward)
            found[at] = replace(turns[at], reward=turns[first].reward)
    return tuple(found)


def trajectory_of(rollout: Rollout, environment: str) -> tuple[Trajectory, Assembled]:
    """Return the trajectory of a whole rollout, without its total reward, and its assembled turns.

    Raises:
        DataError: If the rollout holds data that an episode cannot hold.
    """
    found = assemble(rollout.steps)
    trajectory = Trajectory(
        Task(_named(rollout.task, rollout.steps), data={"answer": rollout.answer} if rollout.answer else {}),
        tuple(found.turns),
        environment=environment,
        prompt=found.opening.prompt,
        tools=found.opening.tools,
        truncated=rollout.truncated,
        status=Status.COMPLETED if rollout.error is None else Status.FAILED,
        error=rollout.error,
        policy=rollout.policy[:_LONGEST],
    )
    return trajectory, found


def scored(
    trajectory: Trajectory, score: float | None, success_at: float | None, succeeded: bool | None = None
) -> tuple[Trajectory, bool]:
    """Return a rollout's trajectory with its total reward, and whether the rewards of its turns were replaced.

    Rewards of turns are kept if they sum to the total reward. Otherwise the last turn gets the total reward.

    Args:
        trajectory: Trajectory from `trajectory_of`.
        score: Total reward. None: the rollout has no score, so the total is the sum of the rewards of its turns.
        success_at: Smallest score of a success. None: any score above 0.
        succeeded: Whether the record says that the rollout is a success; None if it does not say. It counts unless
            `success_at` is given.
    """
    turns = trajectory.turns
    had = any(turn.reward for turn in turns)
    total = sum(turn.reward for turn in turns) if score is None else score
    fits = math.isclose(sum(turn.reward for turn in turns), total, rel_tol=1e-6, abs_tol=1e-6)
    if not fits or not had:
        turns = tuple(replace(turn, reward=0.0) for turn in turns)
        turns = (*turns[:-1], replace(turns[-1], reward=total)) if turns else ()
    success = score is not None and (score > 0 if success_at is None else score >= success_at)
    if succeeded is not None and success_at is None:
        success = succeeded
    if trajectory.status is Status.FAILED:
        success = False
    return replace(trajectory, turns=turns, total_reward=total, success=success), had and not fits


def _named(task: str | None, steps: Sequence[Step]) -> str:
    """Return the id of a task: its name, or else a digest of the first user message."""
    if task is not None:
        return task if len(task) <= _LONGEST else _digest(task)
    asked = (str(each["content"]) for step in steps for each in step.messages if each["role"] == "user")
    return f"log/{_digest(next(asked, ''))}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
