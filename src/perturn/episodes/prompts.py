"""Prompts of a policy: the messages before an episode, each observation, and the turns before it.

All of it follows from the protocol, so equal protocols show equal things, whatever the environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from perturn.episodes.formats import FORMATS
from perturn.episodes.tool_calls import ToolCall, result_messages
from perturn.types import EpisodeProtocol, Message, Observation, Trajectory, Turn


def system_prompt(protocol: EpisodeProtocol) -> tuple[Message, ...]:
    """Return the messages before the first observation: system text and worked example."""
    text = "\n\n".join(part for part in (protocol.system, FORMATS[protocol.format].instruction) if part)
    system: list[Message] = [{"role": "system", "content": text}] if text else []
    return (*system, *protocol.example)


_LISTED = "\nAdmissible commands:\n"


def with_suffix(text: str, suffix: str) -> str:
    """Return the text that poses a task with another on its own line after it, before any list of commands."""
    posed, listed, commands = text.partition(_LISTED)
    return f"{posed}\n{suffix}{listed}{commands}" if suffix else text


def told(trajectory: Trajectory, suffix: str) -> Trajectory:
    """Return an episode as it would be under a protocol with a suffix."""

    def ending(messages: tuple[Message, ...]) -> tuple[Message, ...]:
        *before, last = messages
        return (*before, {**last, "content": with_suffix(str(last["content"]), suffix)})

    first = trajectory.turns[0]
    later = None if first.recalled is None else ending(first.recalled)
    posed = replace(first, observation=ending(first.observation), recalled=later)
    return replace(trajectory, turns=(posed, *trajectory.turns[1:]))


def shown(
    seen: Observation, protocol: EpisodeProtocol, calls: Sequence[ToolCall] = ()
) -> tuple[Message, ...]:
    """Return the newest observation as the policy reads it: results of the calls before it, then further text."""
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
    """Return an observation as later turns see it; in a shortened history, it has no lists of commands."""
    if protocol.history is None:
        return None
    plain = shown(seen, replace(protocol, list_admissible=False))
    return None if plain == heard else plain


def window(
    turns: Sequence[Turn], newest: tuple[Message, ...], history: int | None
) -> tuple[tuple[Turn, ...], tuple[Message, ...]]:
    """Return the turns and the observation that are shown where only the last turns are.

    The observation that posed the task is always shown: where its turn is left out, it opens the oldest message
    that is kept, so that user and assistant go on taking turns.

    Args:
        turns: All turns so far.
        newest: The newest observation.
        history: How many of the turns to show; None: all.
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
    """Return the turns as the policy saw them when it took one of them, that one last.

    Args:
        trajectory: As recorded.
        index: Of the turn that was taken.
    """
    taken = trajectory.turns[index]
    earlier, newest = window(trajectory.turns[:index], taken.observation, trajectory.history)
    return (*earlier, replace(taken, observation=newest))


def context_of(trajectory: Trajectory, index: int) -> Trajectory:
    """Return the conversation in which a turn was taken, that turn last; its messages are those the policy saw."""
    if trajectory.history is None:
        return trajectory.seen_from(index)
    return replace(trajectory, turns=as_seen(trajectory, index), history=None)


def sequences_of(trajectory: Trajectory) -> Iterator[tuple[Trajectory, range]]:
    """Yield the sequences of an episode: a conversation that the policy saw, and the turns that carry loss in it.

    These are its last ones. Each turn carries loss once, in the conversation in which it was taken. The turns of a
    sequence follow each other in the episode too, so that the sequences hold all turns in order. Where the history was
    shortened, each turn is a sequence.
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
    """Return a turn as later ones see it."""
    return turn if turn.recalled is None else replace(turn, observation=turn.recalled, recalled=None)


def _behind(first: tuple[Message, ...], heard: tuple[Message, ...], left_out: int) -> tuple[Message, ...]:
    """Return an observation that opens with the observation that posed the task."""
    posed = "\n".join(str(message.get("content") or "") for message in first)
    turns = "1 turn is" if left_out == 1 else f"{left_out} turns are"
    opening: Message = heard[0] if heard else {"role": "user"}
    text = f"{posed}\n\n({turns} left out here.)\n\n{opening.get('content') or ''}"
    return ({**opening, "content": text}, *heard[1:])
