"""Interface between the vLLM engine and vLLM, wherever it runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from perturn.types import Prompt, Sampling

LOADING = "loading"
"""Label of weights that are half replaced."""


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


def sampling_params(prompt: Prompt, sampling: Sampling, end_ids: Collection[int]) -> dict[str, Any]:
    """Return keyword arguments of vLLM's `SamplingParams`; the model's default decoding is left aside."""
    # Ids alone are wanted, but for texts that end an answer, which vLLM looks for in its text.
    stop = {"stop": list(prompt.stop), "include_stop_str_in_output": True, "detokenize": True}
    return (stop if prompt.stop else {"detokenize": False}) | {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
        "seed": prompt.seed % 2**63,
        "stop_token_ids": sorted(end_ids),
        "ignore_eos": True,
        "logprobs": 0,  # of the sampled token alone
    }


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

    async def workers(self) -> list[int]:
        """Return the number of vLLM's workers of each server; all workers are counted as one server in this process."""
        ...

    async def transfer(self, step: str, bodies: Sequence[dict[str, Any]]) -> None:
        """Take a step of vLLM's weight transfer at all servers at once.

        Args:
            step: Such as `start_weight_update`.
            bodies: What each server is told.

        Raises:
            RunError: If that fails.
        """
        ...

    async def label(self, version: str) -> None:
        """Drop all keys and values, and label what comes with a version.

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

    async def wake(self, parts: Sequence[str]) -> None:
        """Take the memory of the device again for `weights`, for the `kv_cache`, or for both."""
        ...

    async def close(self) -> None:
        """Release what is held."""
        ...
