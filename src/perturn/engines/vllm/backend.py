"""Interface between the vLLM engine and vLLM, which runs in this process or as servers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from perturn.types import Prompt, Sampling

LOADING = "loading"
"""Label of weights that are half replaced."""


@dataclass(frozen=True)
class Sampled:
    """An answer of vLLM: token ids and their log-probabilities."""

    ids: list[int]
    logprobs: list[float]
    """Log-probability of each token at temperature 1, in nats."""
    versions: tuple[str, ...]
    """For each token, the label of the weights that sampled it; empty if the server does not report labels."""
    reused: int
    """Number of prompt tokens found in the prefix cache; 0 if the server does not report it."""


def labels(spans: Iterable[tuple[str, int, int]]) -> tuple[str, ...]:
    """Return the weight label of each token, from vLLM's spans (label, first index, index after the last)."""
    return tuple(label for label, start, end in spans for _ in range(start, end))


def sampling_params(prompt: Prompt, sampling: Sampling, end_ids: Collection[int]) -> dict[str, Any]:
    """Return keyword arguments of vLLM's `SamplingParams`; the model's default decoding settings are ignored."""
    # vLLM needs the text of an answer only to find stop texts.
    stop = {"stop": list(prompt.stop), "include_stop_str_in_output": True, "detokenize": True}
    return (stop if prompt.stop else {"detokenize": False}) | {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
        "seed": prompt.seed % 2**63,
        "stop_token_ids": sorted(end_ids),
        "ignore_eos": True,
        "logprobs": 0,  # only the log-probability of the sampled token
    }


class Backend(Protocol):
    """One or several vLLM replicas of a model."""

    replicas: int
    limit: int
    """Longest sequence in tokens."""

    async def open(self, model: str, version: str) -> None:
        """Prepare to answer with a model.

        Args:
            model: Folder or Hub id of the model.
            version: Label of its weights.

        Raises:
            RunError: If vLLM cannot be reached or cannot load the weights.
        """
        ...

    async def answer(self, replica: int, ids: Sequence[int], sampling: dict[str, Any]) -> Sampled:
        """Sample an answer to a prompt.

        Args:
            replica: Index of the replica that answers.
            ids: Token ids of the prompt.
            sampling: Keyword arguments of vLLM's `SamplingParams`.

        Raises:
            EngineFailure: If this prompt cannot be answered.
            RunError: If a fault concerns all prompts.
        """
        ...

    async def load(self, folder: str, version: str, adapters: bool = False) -> None:
        """Replace the weights, drop all cached keys and values, and label later tokens with the version.

        Answers that `pause` stopped continue with the new weights. An answer that was started without adapters
        continues without adapters, and an answer that was started with adapters continues with adapters.

        Args:
            folder: Folder of a model, or of adapters.
            version: Label of the new weights.
            adapters: Whether the folder holds adapters, which are added to the last loaded model.

        Raises:
            RunError: If vLLM cannot load the weights.
        """
        ...

    async def workers(self) -> list[int]:
        """Return the number of vLLM workers of each server; vLLM in this process counts as one server."""
        ...

    async def transfer(self, step: str, bodies: Sequence[dict[str, Any]]) -> None:
        """Run a step of vLLM's weight transfer on all servers at once.

        Args:
            step: Name of the step in vLLM's protocol, such as `start_weight_update`.
            bodies: Parameters of the step for each server.

        Raises:
            RunError: If the step fails on a server.
        """
        ...

    async def label(self, version: str) -> None:
        """Drop all cached keys and values, and label later tokens with a version.

        Raises:
            RunError: If a server fails.
        """
        ...

    async def pause(self) -> None:
        """Stop sampling without ending the unfinished answers, and drop all cached keys and values.

        Raises:
            RunError: If a server fails.
        """
        ...

    async def resume(self) -> None:
        """Continue the answers that `pause` stopped; their keys and values are computed again."""
        ...

    async def sleep(self) -> None:
        """Free the device memory; no prompt may be open."""
        ...

    async def wake(self, parts: Sequence[str]) -> None:
        """Allocate the device memory again.

        Args:
            parts: Parts to allocate: `weights`, `kv_cache` or both.
        """
        ...

    async def close(self) -> None:
        """Release processes and connections."""
        ...
