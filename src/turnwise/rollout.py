"""Play episodes: `episode` is one episode without model I/O, `play` drives many of them against an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from turnwise.errors import EngineFailure
from turnwise.formats import FORMATS
from turnwise.types import (
    Action,
    Engine,
    Environment,
    EpisodeProtocol,
    Message,
    Observation,
    Prompt,
    Sampling,
    Status,
    Task,
    Trajectory,
    Turn,
)

_logger = logging.getLogger(__name__)

Episode = Generator[Prompt, Action, Trajectory]


@dataclass(frozen=True)
class Job:
    """One episode to play."""

    task: Task
    seed: int
    sample: int = 0


def system_prompt(protocol: EpisodeProtocol) -> tuple[Message, ...]:
    """The messages before the first observation."""
    text = "\n\n".join(part for part in (protocol.system, FORMATS[protocol.format].instruction) if part)
    return ({"role": "system", "content": text},)


def episode(env: Environment, job: Job, *, protocol: EpisodeProtocol, policy: str = "") -> Episode:
    """Play one episode: yields prompts, is sent actions, returns the trajectory.

    An exception of the environment, or one thrown in by the driver, ends in a trajectory marked FAILED that keeps
    the turns played so far.

    Args:
        env: A world, free to be reset.
        job: The task, the seed of the episode and the index among the task's samples.
        protocol: Rules to play by.
        policy: Identity of the policy that will answer.
    """
    task = job.task
    reader = FORMATS[protocol.format]
    record = Trajectory(
        task=task,
        turns=(),
        environment=env.name,
        protocol=f"{protocol.name}-{protocol.format}",
        prompt=system_prompt(protocol),
        sample=job.sample,
        seed=job.seed,
        policy=policy,
    )
    turns: list[Turn] = []
    seen = Observation("")
    try:
        seen = env.reset(task, job.seed)
        while not seen.terminated and len(turns) < protocol.limit(task):
            heard: tuple[Message, ...] = ({"role": "user", "content": seen.text},)
            action = yield Prompt(
                messages=record.prompt,
                turns=tuple(turns),
                observation=heard,
                seed=job.seed * 1_000_003 + len(turns),
                conversation=f"{task.id}#{job.sample}",
            )
            command = reader.parse(action.text)
            before = seen
            if command is None:
                seen = Observation(reader.reminder, valid=False, state_key=before.state_key)
            else:
                seen = env.step(command)
            turns.append(Turn(heard, action, seen.reward, seen.valid, before.state_key))
        record = replace(
            record,
            success=seen.success,
            terminated=seen.terminated,
            truncated=not seen.terminated,
        )
    except Exception as error:  # noqa: BLE001  environments are code of others; a bad episode is data
        record = replace(record, status=Status.FAILED, error=f"{type(error).__name__}: {error}")
    return replace(record, turns=tuple(turns), total_reward=sum(turn.reward for turn in turns))


def play(
    jobs: Iterable[Job],
    engine: Engine,
    make_environment: Callable[[], Environment],
    *,
    protocol: EpisodeProtocol,
    sampling: Sampling,
    concurrency: int = 16,
) -> Iterator[Trajectory]:
    """Play many episodes at once; each trajectory is handed out as soon as its episode ends.

    Args:
        jobs: Episodes to play, in order of start.
        engine: Answers the prompts of all running episodes as one batch.
        make_environment: Starts a world. At most `concurrency` are alive; a world whose episode failed is replaced.
        protocol: Rules to play by.
        sampling: How actions are decoded.
        concurrency: Episodes running at the same time.
    """
    waiting = iter(jobs)
    idle: list[Environment] = []
    running: list[_Running] = []
    try:
        while True:
            for job in islice(waiting, concurrency - len(running)):
                env = idle.pop() if idle else make_environment()
                running.append(_Running(env, episode(env, job, protocol=protocol, policy=engine.name)))
            if not running:
                return
            yield from _advance_all(running, engine, sampling, idle)
    finally:
        for env in [*idle, *(one.env for one in running)]:
            try:
                env.close()
            except Exception as error:  # noqa: BLE001  one world that cannot close must not leave the others open
                _logger.warning("a world could not be closed: %s: %s", type(error).__name__, error)


@dataclass(eq=False)
class _Running:
    """An episode under way."""

    env: Environment
    steps: Episode
    prompt: Prompt | None = None
    conversation: str = ""

    def advance(self, answer: Action | EngineFailure | None) -> Trajectory | None:
        """Go on to the next prompt; the trajectory if the episode has ended."""
        try:
            if answer is None:
                self.prompt = next(self.steps)
            elif isinstance(answer, EngineFailure):
                self.prompt = self.steps.throw(answer)
            else:
                self.prompt = self.steps.send(answer)
        except StopIteration as end:
            trajectory: Trajectory = end.value
            return trajectory
        self.conversation = self.prompt.conversation
        return None


def _advance_all(
    running: list[_Running], engine: Engine, sampling: Sampling, idle: list[Environment]
) -> Iterator[Trajectory]:
    """Start the new episodes, answer one prompt of each, and hand out those that ended."""
    for one in [one for one in running if one.prompt is None]:
        yield from _take(one, one.advance(None), running, engine, idle)
    asked = [(one, one.prompt) for one in running if one.prompt is not None]
    if not asked:
        return
    answers = engine.generate([prompt for _, prompt in asked], sampling)
    for (one, _), answer in zip(asked, answers, strict=True):
        yield from _take(one, one.advance(answer), running, engine, idle)


def _take(
    one: _Running, ended: Trajectory | None, running: list[_Running], engine: Engine, idle: list[Environment]
) -> Iterator[Trajectory]:
    """Retire an episode that has ended; its world is used again unless it failed."""
    if ended is None:
        return
    running.remove(one)
    engine.forget(one.conversation)
    if ended.status is Status.FAILED:
        _logger.warning("episode of task %s failed: %s", ended.task.id, ended.error)
        with suppress(Exception):  # a broken world may not close either
            one.env.close()
    else:
        idle.append(one.env)
    yield ended
