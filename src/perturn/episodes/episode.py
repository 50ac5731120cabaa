"""An episode of a task, as a generator without model I/O: it yields prompts and is sent actions."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from perturn.episodes.calls.call import Tools
from perturn.episodes.calls.find_calls import without_thought, words_after_thought
from perturn.episodes.engine_abilities import EngineAbilities
from perturn.episodes.formats import FORMATS, Format
from perturn.episodes.job import Job as Job
from perturn.episodes.prompts import recalled, shown, system_prompt, window, with_suffix
from perturn.episodes.tool_calls import ToolCall, as_text, understand, write_action
from perturn.episodes.turn_budget import Allowance
from perturn.episodes.user_turns import User
from perturn.errors import ContextFull, EngineFailure, EnvironmentFailure, NotComeBack, RunError
from perturn.faults import sound
from perturn.io.plain_data import fault, mended, named_error
from perturn.traits import traits_of
from perturn.types import (
    Action,
    Environment,
    EpisodeProtocol,
    Message,
    Observation,
    Prompt,
    Status,
    Task,
    Trajectory,
    Turn,
)

Episode = Generator[Prompt, Action, Trajectory]


def episode(
    env: Environment,
    job: Job,
    *,
    protocol: EpisodeProtocol,
    policy: str = "",
    user_said: Sequence[Sequence[str]] = (),
    abilities: EngineAbilities | None = None,
    sharpened: bool = False,
) -> Episode:
    """Play one episode as a generator that yields prompts, is sent actions and returns the trajectory.

    If the environment plays its episodes itself, this function only calls it. If the environment asks for the user's
    turn, the generator yields the prompt of the user's model too.

    An exception of the environment or the engine ends the episode. Its trajectory is marked FAILED and keeps the turns
    played so far. An environment that does not return to the state of a begun episode has the same effect.
    `ContextFull` ends an episode of at least one turn like the turn limit does.

    Args:
        env: The environment, which no other episode uses.
        job: The task, the episode's seed and its index among the task's samples.
        protocol: Rules of the episode.
        policy: Identity of the policy that will answer.
        user_said: Recorded texts of the user before each turn, which are used again. After these texts, and the texts
            of a begun episode, the user's model or script speaks.
        abilities: Abilities of the engine, for an environment that plays its episodes itself.
        sharpened: Whether the engine samples with `Sampling.sharpens`.
    """
    if traits_of(env).plays_itself:
        playing: Any = env
        whole: Trajectory = yield from playing.play(job, protocol, policy, abilities)
        kept = len(job.begun.turns[: job.kept]) if job.begun else 0
        if whole.taken_over != kept:
            raise RunError(
                f"{env.name} plays its episodes itself, and began at turn {whole.taken_over} in place of {kept}; its "
                "play must begin at the turn of the job."
            )
    else:
        whole = yield from _turn_by_turn(env, job, protocol, policy, user_said)
    return replace(whole, sharpened=sharpened or (job.begun is not None and job.begun.sharpened))


def _turn_by_turn(
    env: Environment, job: Job, protocol: EpisodeProtocol, policy: str, user_said: Sequence[Sequence[str]]
) -> Episode:
    """Play one episode in an environment that answers one action at a time; see `episode`."""
    reader = FORMATS[protocol.format]
    recorded = job.begun.turns if job.begun else ()
    begun = recorded[: job.kept]
    known = len(begun) + (not job.anew)  # number of observations that must equal the recorded ones
    record = _unplayed(env, job, protocol, policy)
    turns: list[Turn] = []
    try:
        user = User(env, job, protocol, [*user_said, *_said_before(job)])
        seen = yield from user.speak(_posed(env, job.task, record.seed, protocol), 0)
        allowance = Allowance(protocol, job.task, seen)
        seen = replace(seen, text=with_suffix(seen.text, protocol.suffix))
        record = replace(record, tools=seen.tools)
        calls: tuple[ToolCall, ...] = ()
        last = inf if job.window is None else len(begun) + job.window
        while not seen.terminated and allowance.left and len(turns) < last:
            heard = allowance.tell(shown(seen, protocol, calls))
            if len(turns) < known:
                _check_back(recorded, turns, heard)
            if len(turns) < len(begun):
                action = begun[len(turns)].action
            else:
                action = yield _prompt(record, job, turns, heard)
            before = seen
            action, command, calls = _read(action, reader, record.tools)
            reminded = replace(before, text=reader.reminder, reward=0.0, valid=False, results=())
            seen = reminded if command is None else _answer(env, command, calls)
            said = user.said
            seen = yield from user.speak(seen, len(turns) + 1)
            allowance.spend(seen)
            later = recalled(heard, before, protocol)
            turn = Turn(heard, action, seen.reward, seen.valid, before.state_key, later, user_said=said)
            turns.append(turn)
        if job.begun is not None and len(turns) < known:
            raise NotComeBack(
                f"the world ended at turn {len(turns)}, before it had come back to turn {len(begun)}."
            )
        record = replace(_stopped(record, seen, allowance.left), user_said=user.said)
    except (RunError, KeyboardInterrupt, GeneratorExit):  # they stop the whole run
        raise
    except ContextFull as error:
        # A branch needs a turn of its own; with `anew`, the environment has answered the last kept turn anew.
        played = len(turns) > (0 if job.kept is None or job.anew else len(begun))
        record = _cut(record, seen, error) if played else _failed(record, error)
    except BaseException as error:  # noqa: BLE001  environments are code of others; a failed episode is recorded
        record = _failed(record, error)
    return replace(record, turns=tuple(turns), total_reward=sum(turn.reward for turn in turns))


def _posed(env: Environment, task: Task, seed: int, protocol: EpisodeProtocol) -> Observation:
    """Reset an environment and return the observation that states the task.

    Raises:
        EnvironmentFailure: If the episode ended in `reset`, or the environment cannot take actions in the protocol's
            format.
    """
    seen = sound(env.reset(task, seed), f"reset of task {task.id!r}")
    if seen.terminated:
        raise EnvironmentFailure(
            f"reset of task {task.id!r} returned terminated=True: the episode ended before its first turn. Remedy: "
            "clear the flag of the last episode in reset()."
        )
    if problem := misfit(seen, protocol):
        raise EnvironmentFailure(f"{env.name} {problem}")
    return seen


def _said_before(job: Job) -> list[tuple[str, ...]]:
    """Return the user's texts before each kept turn of a begun episode, and before the next turn."""
    if job.begun is None:
        return []
    said = [*(turn.user_said for turn in job.begun.turns), job.begun.user_said]
    return said[: len(job.begun.turns[: job.kept]) + (not job.anew)]


def _prompt(record: Trajectory, job: Job, turns: Sequence[Turn], heard: tuple[Message, ...]) -> Prompt:
    """Return the prompt of the next turn, with the history that the protocol includes."""
    earlier, newest = window(turns, heard, record.history)
    return Prompt(
        messages=record.prompt,
        turns=earlier,
        observation=newest,
        seed=job.seed * 1_000_003 + len(turns),
        conversation=job.conversation,
        tools=record.tools,
    )


def _stopped(record: Trajectory, seen: Observation, left: int) -> Trajectory:
    """Return the record of an episode that has ended, or of an UNFINISHED episode with turns left."""
    if left and not seen.terminated:
        return replace(record, status=Status.UNFINISHED)
    return replace(record, success=seen.success, terminated=seen.terminated, truncated=not seen.terminated)


def _cut(record: Trajectory, seen: Observation, error: ContextFull) -> Trajectory:
    """Return the record of an episode that a full context truncates."""
    return replace(_stopped(record, seen, 0), error=named_error(error))


def _failed(record: Trajectory, error: BaseException) -> Trajectory:
    """Return the record of an episode that an error ended."""
    why = named_error(error)
    if isinstance(error, ContextFull):
        why += (
            " No turn was played after the kept turns, which fill the context: let the branch begin at an earlier turn."
            if record.taken_over
            else " No turn was played, since the first prompt alone fills the context: shorten the task's text, the "
            "system text or the worked example."
        )
    return replace(record, status=Status.FAILED, error=why)


def _unplayed(env: Environment, job: Job, protocol: EpisodeProtocol, policy: str) -> Trajectory:
    """Return the record of an episode without its turns."""
    return Trajectory(
        task=job.task,
        turns=(),
        environment=env.name,
        protocol=f"{protocol.name}-{protocol.format}",
        prompt=system_prompt(protocol),
        sample=job.sample,
        seed=job.begun.seed if job.begun else job.seed,
        policy=policy,
        history=protocol.history,
        taken_over=len(job.begun.turns[: job.kept]) if job.begun else 0,
        origin=job.begun.sample if job.begun else None,
    )


def misfit(posed: Observation, protocol: EpisodeProtocol) -> str | None:
    """Return why an episode cannot use the protocol's action format; None if it can."""
    native = FORMATS[protocol.format].native
    if posed.tools and not native:
        return f"offers tools, which format {protocol.format!r} cannot call; set protocol.format=tools."
    if native and not posed.tools:
        return "offers no tools; set protocol.format to react, action or plain, or return schemas in Observation.tools."
    return None


def _check_back(recorded: Sequence[Turn], turns: Sequence[Turn], heard: tuple[Message, ...]) -> None:
    """Reject an environment that does not return to its state after the first turns of a recorded episode.

    Raises:
        NotComeBack: If an observation or the rewards differ; names the turn and the difference.
    """
    at = len(turns)
    told = (heard, recorded[at].observation if at < len(recorded) else heard)
    then = [each.own_reward for each in recorded[:at]]
    rewards = [each.reward for each in turns]
    if told[0] != told[1]:
        raise NotComeBack(f"the world did not come back to turn {at}: {parted(*told)}.")
    if rewards != then:
        raise NotComeBack(
            f"the world did not come back to turn {at}: expected rewards {then}, got {rewards}."
        )


def parted(got: Any, expected: Any) -> str:
    """Return what was expected and what came instead, from where two values differ, as JSON."""
    texts = [
        json.dumps(each, ensure_ascii=False) for each in (got, expected)
    ]  # repr would quote them in two ways
    came, wanted = (_from(text, _parting(*texts)) for text in texts)
    return f"expected {wanted}, got {came}"


def _parting(one: str, other: str) -> int:
    """Return the index of the first character in which two texts differ."""
    alike = zip(one, other, strict=False)
    return next((at for at, (its, ours) in enumerate(alike) if its != ours), min(len(one), len(other)))


def _from(text: str, at: int) -> str:
    """Return 200 characters of a text that begin 20 characters before index `at`."""
    start = max(0, at - 20)
    return ("..." if start else "") + text[start : start + 200]


def _read(action: Action, reader: Format, tools: Tools) -> tuple[Action, str | None, tuple[ToolCall, ...]]:
    """Return the action with its tool calls, the text for the environment, and the calls.

    The text has no thoughts. It is None if the action breaks the format. An action that cannot be stored without change
    breaks every format. Token ids are kept as sampled.
    """
    if not all(map(math.isfinite, action.logprobs or ())):
        raise EngineFailure(
            "the engine gave log-probabilities that are not finite: its weights hold NaN or inf."
        )
    if action.reasoning:
        action = replace(action, reasoning=mended(action.reasoning))
    if fault((action.text, action.tool_calls), "action"):
        return as_text(action), None, ()
    if not reader.native:
        return action, _command(action.text, reader), ()
    action, said = understand(action, tools)
    said = said and replace(said, text=words_after_thought(said.text))
    if said is None or not (said.text or said.calls):
        return action, None, ()
    return action, write_action(said), said.calls


def _command(text: str, reader: Format) -> str | None:
    """Return the command in a text without the thoughts before it; None if the text breaks the format.

    Only a text that breaks the format otherwise may begin within a thought. So in `plain`, no text does.
    """
    tried = (reader.parse(without_thought(text, prompted=prompted)) for prompted in (False, True))
    return next((command for command in tried if command is not None), None)


def understood(action: Action, reader: Format, tools: Tools = ()) -> str | None:
    """Return the command that an action sends to the environment; None if the action breaks the format."""
    return _read(action, reader, tools)[1]


def _answer(env: Environment, command: str, calls: tuple[ToolCall, ...]) -> Observation:
    """Return the environment's observation after an action."""
    what = f"step({command!r:.80})"
    seen = sound(env.step(command), what)
    if len(seen.results) != len(calls) and not seen.terminated:
        raise EnvironmentFailure(
            f"{what} returned {len(seen.results)} results for {len(calls)} calls. Remedy: return a list of texts, "
            "one for each call, or put them into Observation.results."
        )
    return seen
