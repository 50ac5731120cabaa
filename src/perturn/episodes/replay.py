"""Play episodes with given actions, from a script or a recorded episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perturn.episodes.episode import Episode, Job, episode, parted, understood
from perturn.episodes.formats import FORMATS
from perturn.episodes.prompts import request_at
from perturn.episodes.world_threads import ignore
from perturn.episodes.world_threads import play_again as played_again
from perturn.errors import ContextFull, DataError, EngineFailure, EnvironmentFailure
from perturn.traits import traits_of
from perturn.types import (
    Action,
    Environment,
    EpisodeProtocol,
    Message,
    Prompt,
    Trajectory,
    failed,
    filled_context,
)


def play_script(
    steps: Episode,
    script: Sequence[Action],
    failure: BaseException,
    hear: Callable[[Prompt], object] = ignore,
) -> Trajectory:
    """Play an episode with given actions. If it has not ended after them, mark it FAILED with the error `failure`.

    `hear` is called for each prompt.
    """
    try:
        hear(next(steps))
        for action in script:
            hear(steps.send(action))
        steps.throw(failure)
    except StopIteration as end:
        trajectory: Trajectory = end.value
        return trajectory
    raise AssertionError("an episode ends when its engine fails")


def play_again(
    env: Environment, recorded: Trajectory, protocol: EpisodeProtocol, retries: int = 1
) -> Trajectory:
    """Replay a recorded episode, and check that its observations are equal. Rewards and outcome may differ.

    Args:
        env: The environment, which no other episode uses.
        recorded: The recorded episode, whose last turns may be missing.
        protocol: The protocol of the recorded episode.
        retries: Number of times to replay it again if the environment died or hung.

    Returns: The replayed episode; FAILED if the episode has not ended after the recorded turns.

    Raises:
        DataError: If an observation differs from the recorded one.
        EnvironmentFailure: If the environment fails before the recorded turns are played, and its observations were
            equal so far.
    """
    task, script = recorded.task, [turn.action for turn in recorded.turns]
    said = [turn.user_said for turn in recorded.turns]
    kind = ContextFull if filled_context(recorded) else EngineFailure
    end = kind("the episode was recorded no further.")
    seen: list[tuple[Message, ...]] = []

    def played() -> Trajectory:
        seen.clear()
        steps = episode(env, Job(task, recorded.seed, recorded.sample), protocol=protocol, user_said=said)
        return play_script(steps, script, end, lambda prompt: seen.append(prompt.observation))

    again = played_again(played, retries)
    came_back = all(now == turn.observation for now, turn in zip(seen, recorded.turns, strict=False))
    if failed(again) and len(again.turns) < len(script) and came_back:
        raise EnvironmentFailure(
            f"task {task.id!r:.80}, sample {recorded.sample}: the environment failed at turn {len(again.turns)} when "
            f"the episode was played again: {again.error or '':.200}"
        )
    for index, turn in enumerate(recorded.turns):
        heard = seen[index] if index < len(seen) else again.error
        if heard != turn.observation:
            now = "ends the episode before it" if heard is None else f"answers {heard!r:.200}"
            raise DataError(
                f"task {task.id!r:.80}, sample {recorded.sample}: turns[{index}].observation: recorded was "
                f"{turn.observation!r:.200}, but the environment {now} when the episode is played again. Either the "
                "episode was recorded in another environment or protocol, or the environment answers at random."
            )
    if traits_of(env).plays_itself and (problem := _other_request(again, recorded)):
        raise DataError(f"task {task.id!r:.80}, sample {recorded.sample}: {problem}")
    return again


def _other_request(again: Trajectory, recorded: Trajectory) -> str:
    """Return how the first request of an agent that differs from the recorded one does so; empty if none differs."""
    for index in range(len(recorded.turns)):
        got, expected = (request_at(each, index) for each in (again, recorded))
        if got != expected:
            return f"the request of turn {index} differs when the agent runs again: {parted(got, expected)}."
    return ""


def replay(
    env: Environment, recorded: Trajectory, protocol: EpisodeProtocol, retries: int = 1
) -> list[str | None]:
    """Replay a recorded episode, and return the commands that it sends to the environment.

    Args:
        env: The environment, which no other episode uses.
        recorded: The recorded episode, whose last turns may be missing.
        protocol: The protocol of the recorded episode.
        retries: Number of times to replay it again if the environment died or hung.

    Returns: The text sent to the environment at each turn [turns]; None if the action broke the format, so that no text
    was sent.

    Raises:
        DataError: If an observation differs from the recorded one.
        EnvironmentFailure: If the environment fails before the recorded turns are played.
    """
    play_again(env, recorded, protocol, retries)
    return [understood(turn.action, FORMATS[protocol.format], recorded.tools) for turn in recorded.turns]
