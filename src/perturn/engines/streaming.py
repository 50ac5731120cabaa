"""Functions shared by streaming engines, which accept new prompts while they answer earlier prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

from perturn.errors import EngineFailure, RunError
from perturn.types import Action, Prompt, Sampling, StreamingEngine

Home = TypeVar("Home")
Item = TypeVar("Item")


def answer_all(
    engine: StreamingEngine, prompts: Sequence[Prompt], sampling: Sampling
) -> list[Action | EngineFailure]:
    """Submit prompts to a streaming engine, wait for all answers, and return them in order.

    A streaming engine implements its method `generate` with this function.
    """
    engine.submit(prompts, sampling)
    answers: dict[int, Action | EngineFailure] = {}
    while any(id(prompt) not in answers for prompt in prompts):
        answers |= {id(prompt): answer for prompt, answer in engine.advance()}
    return [answers[id(prompt)] for prompt in prompts]


def take_all(queue: SimpleQueue[Item], seconds: float) -> list[Item]:
    """Wait up to `seconds` for a first item in a queue; return all items that are then in the queue."""
    found: list[Item] = []
    with suppress(Empty):
        found.append(queue.get(timeout=seconds))
        while True:
            found.append(queue.get_nowait())
    return found


def home_of(conversation: str, homes: dict[str, Home], replicas: Collection[Home]) -> Home:
    """Return the replica that serves a conversation.

    A new conversation goes to the replica with the fewest conversations, and stays there.

    Args:
        conversation: Identity of the conversation.
        homes: Replica of each known conversation; a new conversation is added.
        replicas: The replicas to choose from.
    """
    if conversation not in homes:
        held = Counter(homes.values())
        homes[conversation] = min(replicas, key=held.__getitem__)
    return homes[conversation]


def refuse_update(busy: int) -> None:
    """Raise an error if prompts are being answered: their answers would mix tokens of two policies.

    Args:
        busy: Number of prompts that are being answered.

    Raises:
        RunError: If `busy` is not 0.
    """
    if busy:
        raise RunError(f"{busy} prompts are being answered; update weights between the batches.")
