"""What a policy is shown: the messages before an episode, each observation, and the turns before it.

All of it follows from the protocol, so equal protocols show equal things, whatever the environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from turnwise.formats import FORMATS
from turnwise.types import EpisodeProtocol, Message, Observation, Turn


def system_prompt(protocol: EpisodeProtocol) -> tuple[Message, ...]:
    """The messages before the first observation: system text and worked example."""
    text = "\n\n".join(part for part in (protocol.system, FORMATS[protocol.format].instruction) if part)
    return ({"role": "system", "content": text}, *protocol.example)


def shown(seen: Observation, protocol: EpisodeProtocol) -> tuple[Message, ...]:
    """The newest observation as the policy reads it."""
    text = seen.text
    if protocol.list_admissible and seen.admissible:
        text = "\n".join([text, "Admissible commands:", *seen.admissible])
    return ({"role": "user", "content": text},)


def recalled(seen: Observation, protocol: EpisodeProtocol) -> tuple[Message, ...]:
    """An earlier observation as the policy reads it: a full history stays as it was, a shortened one has no lists."""
    return shown(seen, protocol if protocol.history is None else replace(protocol, list_admissible=False))


def window(
    turns: Sequence[Turn], newest: tuple[Message, ...], history: int | None
) -> tuple[tuple[Turn, ...], tuple[Message, ...]]:
    """The turns and the observation that are shown where only the last turns are.

    The observation that posed the task is always shown: where its turn is left out, it opens the oldest message
    that is kept, so that user and assistant go on taking turns.

    Args:
        turns: All turns so far.
        newest: The newest observation.
        history: How many of the turns to show; None: all.
    """
    if history is None or len(turns) <= history:
        return tuple(turns), newest
    left_out = len(turns) - history
    kept = tuple(turns[left_out:])
    if not kept:
        return (), _behind(turns[0].observation, newest, left_out)
    oldest = replace(kept[0], observation=_behind(turns[0].observation, kept[0].observation, left_out))
    return (oldest, *kept[1:]), newest


def _behind(first: tuple[Message, ...], heard: tuple[Message, ...], left_out: int) -> tuple[Message, ...]:
    """An observation that opens with the one that posed the task."""
    posed = "\n".join(str(message.get("content") or "") for message in first)
    turns = "1 turn is" if left_out == 1 else f"{left_out} turns are"
    text = f"{posed}\n\n({turns} left out here.)\n\n{heard[0].get('content') or ''}"
    return ({**heard[0], "content": text}, *heard[1:])
