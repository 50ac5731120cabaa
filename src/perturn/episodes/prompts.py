"""Build the prompts of a policy: system message, worked example, earlier turns and observation.

Prompts depend on the protocol and the observations alone, not on the environment's class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from perturn.episodes.formats import FORMATS
from perturn.episodes.tool_calls import ToolCall, result_messages
from perturn.types import EpisodeProtocol, Message, Observation, Trajectory, Turn


def system_prompt(protocol: EpisodeProtocol) -> tuple[Message, ...]:
    """Return the messages before the first observation: system message and worked example."""
    text = "\n\n".join(part for part in (protocol.system, FORMATS[protocol.format].instruction) if part)
    system: list[Message] = [{"role": "system", "content": text}] if text else []
    return (*system, *protocol.example)


_LISTED = "\nAdmissible commands:\n"


def with_suffix(text: str, suffix: str) -> str:
    """Return a task's text with a suffix on a new line, before any list of commands."""
    posed, listed, commands = text.partition(_LISTED)
    return f"{posed}\n{suffix}{listed}{commands}" if suffix else text


def suffixed(trajectory: Trajectory, suffix: str) -> Trajectory:
    """Return an episode as if its protocol had the given suffix.

    If the episode begins with an action, the suffix is a user message before this action.
    """

    def ending(messages: tuple[Message, ...]) -> tuple[Message, ...]:
        if not messages:
            return ({"role": "user", "content": suffix},)
        *before, last = messages
        return (*before, {**last, "content": with_suffix(str(last["content"]), suffix)})

    first = trajectory.turns[0]
    later = None if first.recalled is None else ending(first.recalled)
    posed = replace(first, observation=ending(first.observation), recalled=later)
    return replace(trajectory, turns=(posed, *trajectory.turns[1:]))


def shown(
    seen: Observation, protocol: EpisodeProtocol, calls: Sequence[ToolCall] = ()
) -> tuple[Message, ...]:
    """Return the newest observation as messages for the policy: results of tool calls, then other text."""
    text = seen.text
    results = result_messages(calls, seen.results)
    if results and not text:
        return tuple(results)
    if protocol.list_admissible and seen.admissible:
        text += _LISTED + "\n".join(seen.admissible)
    return (*results, {"role": "user", "content": text})


def recalled(
    heard: tuple[Message, ...], seen: Observation, protocol: EpisodeProtocol
) -> tuple[Message, ...] | None:
    """Return an observation as later prompts show it, without the list of commands; None if it does not change."""
    if protocol.history is None:
        return None
    plain = shown(seen, replace(protocol, list_admissible=False))
    return None if plain == heard else plain


def window(
    turns: Sequence[Turn], newest: tuple[Message, ...], history: int | None
) -> tuple[tuple[Turn, ...], tuple[Message, ...]]:
    """Return the turns and the observation of a prompt that shows only the last turns.

    The observation that states the task is always shown. If its turn is left out, the oldest kept observation begins
    with its text, so that user and assistant messages still alternate.

    Args:
        turns: All turns so far.
        newest: The newest observation.
        history: Number of turns to show. None: all turns.
    """
    left_out = 0 if history is None else max(0, len(turns) - history)
    kept = tuple(_remembered(turn) for turn in turns[left_out:])
    if not left_out:
        return kept, newest
    posed = _remembered(turns[0]).observation
    if not kept:
        return (), _behind(posed, newest, left_out)
    oldest = replace(kept[0], observation=_behind(posed, kept[0].observation, left_out))
    return (oldest, *kept[1:]), newest


def as_seen(trajectory: Trajectory, index: int) -> tuple[Turn, ...]:
    """Return a turn and the turns before it, as the policy saw them when it took this turn.

    Args:
        trajectory: The recorded episode.
        index: Index of the turn, which is the last turn of the result.
    """
    taken = trajectory.turns[index]
    earlier, newest = window(trajectory.turns[:index], taken.observation, trajectory.history)
    return (*earlier, replace(taken, observation=newest))


def context_of(trajectory: Trajectory, index: int) -> Trajectory:
    """Return the conversation that the policy saw when it took a turn. This turn is the last of the result."""
    if trajectory.history is None:
        return trajectory.seen_from(index)
    return replace(trajectory, turns=as_seen(trajectory, index), history=None)


def request_at(trajectory: Trajectory, index: int) -> list[Any]:
    """Return the request that the policy answered at a turn of an agent's episode; see `request_of`."""
    then = trajectory.seen_from(index)
    newest = then.turns[-1].observation
    return request_of(then.prompt, then.turns[:-1], newest, then.tools, then.template_kwargs)


def request_of(
    prompt: Sequence[Message],
    turns: Sequence[Turn],
    newest: Sequence[Message],
    tools: Sequence[Any],
    variables: Mapping[str, Any],
) -> list[Any]:
    """Return the parts of a request as a list: template variables, tools, and all messages before the answer."""
    said = [message for turn in turns for message in (*turn.observation, turn.action.message())]
    return [dict(variables), list(tools), *prompt, *said, *newest]


def sequences_of(trajectory: Trajectory) -> Iterator[tuple[Trajectory, range]]:
    """Yield the training sequences of an episode: conversations, each with the range of turns that carry loss in it.

    Each turn carries loss once, in the conversation in which the policy took it. The turns with loss are the last turns
    of their sequence. Over all sequences, they are in the order of the episode. If the history was shortened, each turn
    has its own sequence.
    """
    if trajectory.is_one_sequence:
        yield replace(trajectory, history=None), range(len(trajectory.turns))
        return
    begun, shortened = 0, trajectory.history is not None
    for end in range(1, len(trajectory.turns) + 1):
        if shortened or end == len(trajectory.turns) or trajectory.parent(end) != end - 1:
            yield context_of(trajectory, end - 1), range(begun, end)
            begun = end


def _remembered(turn: Turn) -> Turn:
    """Return a turn as later prompts show it."""
    return turn if turn.recalled is None else replace(turn, observation=turn.recalled, recalled=None)


def _behind(first: tuple[Message, ...], heard: tuple[Message, ...], left_out: int) -> tuple[Message, ...]:
    """Return an observation with the text of the task put before it."""
    posed = "\n".join(str(message.get("content") or "") for message in first)
    turns = "1 turn is" if left_out == 1 else f"{left_out} turns are"
    opening: Message = heard[0] if heard else {"role": "user"}
    text = f"{posed}\n\n({turns} left out here.)\n\n{opening.get('content') or ''}"
    return ({**opening, "content": text}, *heard[1:])
