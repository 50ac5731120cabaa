"""Interface between the vLLM engine and vLLM, wherever it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Sampled:
    """One answer, as tokens."""

    ids: list[int]
    logprobs: list[float]
    """At temperature 1, in nats."""
    versions: tuple[str, ...]
    """Label of the weights that sampled each token; empty where a server does not say."""
    reused: int
    """Tokens of the prompt whose keys and values were there already; 0 where a server does not say."""


def labels(spans: Iterable[tuple[str, int, int]]) -> tuple[str, ...]:
    """Return the label of each token, of vLLM's spans (label, first token, token after the last)."""
    return tuple(label for label, start, end in spans for _ in range(start, end))


class Backend(Protocol):
    """One or several replicas of a model."""

    replicas: int
    limit: int
    """Longest sequence in tokens."""

    async def open(self, model: str, version: str) -> None:
        """Be ready to answer by a model, whose weights are labelled with the version.

        Raises:
            RunError: If that fails.
        """
        ...

    async def answer(self, replica: int, ids: Sequence[int], sampling: dict[str, Any]) -> Sampled:
        """Continue a prompt.

        Args:
            replica: Which one is to answer.
            ids: Tokens of the prompt.
            sampling: Keyword arguments of vLLM's `SamplingParams`.

        Raises:
            EngineFailure: If this prompt cannot be answered.
            RunError: If no prompt can.
        """
        ...

    async def load(self, folder: str, version: str, adapters: bool = False) -> None:
        """Replace the weights, drop all keys and values, and label later tokens with the version.

        Answers that `pause` stopped go on under the new weights. An answer that was begun without adapters continues
        without them, and the reverse.

        Args:
            folder: Of a model, or of adapters.
            version: Label of the new weights.
            adapters: Whether the folder has adapters, which are added to the model that was loaded last.

        Raises:
            RunError: If that fails.
        """
        ...

    async def pause(self) -> None:
        """Stop sampling in the middle of answers, and drop all keys and values.

        Raises:
            RunError: If that fails.
        """
        ...

    async def resume(self) -> None:
        """Go on with the answers that `pause` stopped, whose keys and values are computed again."""
        ...

    async def sleep(self) -> None:
        """Give the memory of the device back, while nothing is asked."""
        ...

    async def wake(self) -> None:
        """Take the memory of the device again."""
        ...

    async def close(self) -> None:
        """Release what is held."""
        ...
