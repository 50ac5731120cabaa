"""A prompt that is being answered."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from perturn.engines.local.kv_cache import History
from perturn.types import Prompt, Sampling


@dataclass(eq=False)
class Row:
    """One prompt, and its answer as it grows."""

    prompt: Prompt
    sampling: Sampling
    ids: list[int]
    longest: int
    """Tokens of prompt and answer, at most."""
    draw: random.Random
    history: History
    said: Callable[[Sequence[int]], str] = lambda ids: ""
    """Text of sampled tokens, in which the prompt's stop texts are looked for."""
    capacity: int = 0
    """Tokens that its slot will hold, once it joined the batch."""
    answer: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.ids) + len(self.answer)

    @property
    def fresh(self) -> list[int]:
        """Tokens that have not been through the model."""
        done = len(self.history.ids)
        return self.ids[done:] + self.answer if done < len(self.ids) else self.answer[done - len(self.ids) :]

    @property
    def missing(self) -> int:
        """Number of them."""
        return self.length - len(self.history.ids)

    def tail(self, tokens: int) -> list[int]:
        """The last tokens of prompt and answer."""
        return (self.ids[-tokens:] + self.answer)[-tokens:]

    def ended(self, end_ids: Collection[int]) -> bool:
        """Whether the answer is whole."""
        return self.answer[-1] in end_ids or self.length >= self.longest or self._stopped()

    def _stopped(self) -> bool:
        """Whether the answer ends with a text that is to end it."""
        if not (stop := self.prompt.stop):
            return False
        newest = self.said(self.answer[-max(len(text.encode()) for text in stop) - 4 :])
        return any(text in newest for text in stop)
