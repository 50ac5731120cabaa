"""Parts that engines which take prompts on while they answer others have in common."""

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
    """Return `generate` of an engine: one action a prompt, when all are answered."""
    engine.submit(prompts, sampling)
    answers: dict[int, Action | EngineFailure] = {}
    while any(id(prompt) not in answers for prompt in prompts):
        answers |= {id(prompt): answer for prompt, answer in engine.advance()}
    return [answers[id(prompt)] for prompt in prompts]


def take_all(queue: SimpleQueue[Item], seconds: float) -> list[Item]:
    """Return all that is in a queue, once something is; it is waited for so long."""
    found: list[Item] = []
    with suppress(Empty):
        found.append(queue.get(timeout=seconds))
        while True:
            found.append(queue.get_nowait())
    return found


def home_of(conversation: str, homes: dict[str, Home], replicas: Collection[Home]) -> Home:
    """Return the replica that a conversation stays with: at first the replica that has the fewest."""
    if conversation not in homes:
        held = Counter(homes.values())
        homes[conversation] = min(replicas, key=held.__getitem__)
    return homes[conversation]


def refuse_update(busy: int) -> None:
    """Raise unless no prompt is being answered.

    Raises:
        RunError: Otherwise: half an answer would be of either policy.
    """
    if busy:
        raise RunError(f"{busy} prompts are being answered; update weights between the batches.")
