"""Client of a Tinker API service, for training and sampling adapters; no other module calls the package `tinker`.

The client in the package `tinker` retries for minutes without a message. So this module limits the wait for every
answer, and regularly checks that the service can still be reached.
"""

from __future__ import annotations

import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import tinker
from numpy.typing import NDArray
from tinker import types
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

from perturn.engines.tinker.service_settings import ServiceSettings
from perturn.errors import RunError

T = TypeVar("T")
Numbers = NDArray[np.float32]

_MOMENT = 2.0
"""Seconds between two checks that the service can be reached."""
_LOOK = 5.0
"""Time limit of one check in seconds."""

_logger = logging.getLogger(__name__)


class Rejected(RunError):
    """Raised if the service answers that it does not support a request."""


@dataclass(frozen=True)
class TokenSequence:
    """Input tokens of one sequence, with the target token of each."""

    ids: NDArray[np.int64]
    """Token ids that the model reads [tokens]."""
    targets: NDArray[np.int64]
    """Token id that follows each input token [tokens]."""


@dataclass(frozen=True)
class Sampled:
    """An answer of a sampler: token ids and their log-probabilities."""

    ids: list[int]
    logprobs: list[float]
    """Log-probability of each token, in nats."""


class Patience:
    """Two limits on waiting for an answer: its total time, and the time that the service may be unreachable."""

    def __init__(self, settings: ServiceSettings, what: str) -> None:
        self._settings, self._what = settings, what
        self._began = self._seen = time.monotonic()

    def check(self) -> None:
        """Check both limits; the request to the service may take some seconds.

        Raises:
            RunError: If the service has been unreachable for too long, or the answer has taken too long.
        """
        settings = self._settings
        if (problem := unreachable(settings)) is None:
            self._seen = time.monotonic()
        now = time.monotonic()
        if problem is not None and now - self._seen > settings.patience:
            raise RunError(
                f"{settings.host} has not answered for {settings.patience:g} s ({problem}), while {self._what} was "
                "awaited; start the service again, then run the same command to go on from the last saved state."
            )
        if now - self._began > settings.timeout:
            raise RunError(
                f"{settings.host} did not give {self._what} within {settings.timeout:g} s; look at the service's own "
                "log, raise timeout if it was still at work, then run the same command to go on."
            )


def unreachable(settings: ServiceSettings) -> str | None:
    """Return the reason why a service cannot be reached; None if it answers."""
    try:
        with urllib.request.urlopen(f"{settings.base_url.rstrip('/')}/api/v1/healthz", timeout=_LOOK):
            return None
    except urllib.error.HTTPError:  # an HTTP error is an answer too
        return None
    except (OSError, ValueError) as error:
        return " ".join(str(error).split())


class Service:
    """An open session at a service of the Tinker API."""

    def __init__(self, settings: ServiceSettings) -> None:
        """Open a session.

        Raises:
            PerturnError: If the client has an untested version, the key is missing, or the service is unreachable.
        """
        settings.check_client()
        self.settings = settings
        if problem := unreachable(settings):
            raise RunError(
                f"{settings.base_url} cannot be reached ({problem}); start the service, or correct base_url."
            )
        key = settings.read_key()
        self._client: tinker.ServiceClient = self.run(
            lambda: tinker.ServiceClient(base_url=settings.base_url, api_key=key), "a session"
        )

    def adapter(self, base: str, rank: int, seed: int) -> Adapter:
        """Create new adapters on a base model; before training, they do not change its output."""
        how: Any = {"rank": rank, "seed": seed, "train_unembed": False}
        made = self.run(lambda: self._client.create_lora_training_client(base, **how), f"adapters of {base}")
        return Adapter(self, made)

    def adapter_from(self, path: str, with_optimizer: bool) -> Adapter:
        """Create adapters with the weights of a saved state.

        Args:
            path: Name of the saved state at the service.
            with_optimizer: Whether to load the saved optimizer state; otherwise the optimizer starts afresh.
        """
        create = (
            self._client.create_training_client_from_state_with_optimizer
            if with_optimizer
            else self._client.create_training_client_from_state
        )
        return Adapter(self, self.run(lambda: create(path), f"the saved state {path}"))

    def sampler(self, base: str) -> Sampler:
        """Return a sampler of a base model."""
        made = self.run(lambda: self._client.create_sampling_client(base_model=base), f"a sampler of {base}")
        return Sampler(self, made)

    def close(self) -> None:
        """End the session, and close the connections, which the client would leave open."""
        holder = self._client.holder
        holder.close()

        async def disconnect() -> None:
            for pool in holder._client_pools.values():
                for client in pool._clients:
                    await client.close()

        self.wait(holder.run_coroutine_threadsafe(disconnect()), "the end of the session")

    def run(self, call: Callable[[], T], what: str) -> Any:
        """Run a blocking call of the client in a thread, and return its result within the limits of the settings.

        Args:
            call: The blocking call.
            what: The awaited result, for error messages.
        """
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001  raised again in the waiting thread
                future.set_exception(error)

        threading.Thread(target=work, name="perturn-tinker", daemon=True).start()
        return self.wait(future, what)

    def wait(self, future: Any, what: str) -> Any:
        """Wait for an answer of the service and return it.

        Args:
            future: Future that the client returned.
            what: The awaited result, for error messages.

        Raises:
            Rejected: If the service answers that it does not support the request.
            RunError: If the service does not answer within the limits.
        """
        patience = Patience(self.settings, what)
        while True:
            try:
                return future.result(timeout=_MOMENT)
            except TimeoutError:
                patience.check()
            except Exception as error:  # the client documents no complete list of its exceptions
                raise self.failure(error, what) from error

    def failure(self, error: Exception, what: str) -> RunError:
        """Return the `RunError` that reports an error of the client.

        Args:
            error: Exception that the client raised.
            what: The awaited result.
        """
        said = " ".join(str(error).split())
        status = getattr(error, "status_code", None)
        kind = Rejected if isinstance(error, tinker.RequestFailedError) or status in (400, 422) else RunError
        hint = (
            "it was started again and lost what was open; run the same command to go on from the last saved state"
            if "not loaded" in said or status == 404
            else "correct the setting, or look at the service's own log"
        )
        return kind(
            f"{self.settings.host} did not give {what} ({type(error).__name__}: {said:.400}); {hint}."
        )


class Adapter:
    """Adapters that a service trains."""

    def __init__(self, service: Service, client: tinker.TrainingClient) -> None:
        self._service, self._client = service, client

    def logprobs(self, sequences: Sequence[TokenSequence], most: int) -> list[Numbers]:
        """Return the log-probability of each target token, in nats, as one array [tokens] per sequence.

        Args:
            sequences: At least one sequence.
            most: Largest number of tokens in one request; a longer sequence gets a request of its own.

        Raises:
            RunError: If the service does not answer, or a log-probability is not finite.
        """
        asked = [
            self._client.forward(
                [
                    _datum(sequences[i], {"weights": np.ones(len(sequences[i].ids), np.float32)})
                    for i in request
                ],
                "cross_entropy",
            )
            for request in requests(sequences, most)
        ]
        found = [
            output
            for each in asked
            for output in self._service.wait(each, "log-probabilities").loss_fn_outputs
        ]
        values = [np.asarray(each["logprobs"].data, np.float32) for each in found]
        lengths = [len(each.ids) for each in sequences]
        if [len(each) for each in values] != lengths or not all(np.isfinite(each).all() for each in values):
            raise RunError(
                f"{self._service.settings.host} gave log-probabilities that are not one finite number per token; lower "
                "the learning rate if they were finite before, or look at the service's own log."
            )
        return values

    def backward(
        self, rows: Sequence[tuple[TokenSequence, Mapping[str, Numbers]]], loss: str, most: int
    ) -> None:
        """Accumulate the gradient of a loss, which the service computes, for the next optimizer step.

        Args:
            rows: Sequences, each with the arrays that the loss reads, by name [tokens].
            loss: Name of the loss at the service.
            most: Largest number of tokens in one request.
        """
        sequences = [sequence for sequence, _ in rows]
        asked = [
            self._client.forward_backward([_datum(*rows[i]) for i in request], loss)
            for request in requests(sequences, most)
        ]
        for each in asked:
            self._service.wait(each, "a gradient")

    def step(self, **adam: float) -> dict[str, float]:
        """Update the weights with Adam; return the service's metrics by name.

        Args:
            adam: Settings of `tinker.AdamParams`.
        """
        found = self._service.wait(self._client.optim_step(types.AdamParams(**adam)), "an optimizer step")
        return dict(found.metrics or {})

    def save(self, name: str) -> str:
        """Save weights and optimizer at the service under a new name; return the path by which to load them."""
        path: str = self._service.wait(self._client.save_state(name), f"the saved state {name}").path
        return path

    def sampler(self) -> Sampler:
        """Return a sampler of the current weights."""
        make = self._client.save_weights_and_get_sampling_client
        return Sampler(self._service, self._service.run(make, "a sampler"), self)

    def close(self) -> None:
        """Ask the service to drop the adapters; if the request fails, they are dropped at the end of the session."""
        holder, model = self._client.holder, self._client.model_id

        async def unload() -> None:
            with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
                await client.models.unload(request=types.UnloadModelRequest(model_id=model), max_retries=0)

        try:
            holder.run_coroutine_threadsafe(unload()).result(_LOOK)
        except Exception as error:  # noqa: BLE001  the end of the session drops them too
            _logger.debug("%s keeps adapters %s: %s", self._service.settings.host, model, error)


class Sampler:
    """Samples from a policy at a service."""

    def __init__(
        self, service: Service, client: tinker.SamplingClient, adapter: Adapter | None = None
    ) -> None:
        self._client, self._adapter, self._service = client, adapter, service

    def ask(self, ids: Sequence[int], stop: Sequence[int], seed: int, **how: Any) -> Future[Any]:
        """Start sampling one answer to a prompt; `read` reads it from the returned future.

        Args:
            ids: Token ids of the prompt.
            stop: Token ids that end an answer.
            seed: Seed of the sampling.
            how: Other parameters of `tinker.SamplingParams`.
        """
        wanted = types.SamplingParams(seed=seed, stop=list(stop), **how)
        future: Future[Any] = self._client.sample(types.ModelInput.from_ints(list(ids)), 1, wanted)
        return future

    def read(self, future: Future[Any]) -> Sampled:
        """Return the answer of a finished future.

        Raises:
            RunError: If the request failed, or the answer lacks log-probabilities.
        """
        try:
            (sequence,) = future.result().sequences
        except Exception as error:
            raise self._service.failure(error, "an answer") from error
        if sequence.logprobs is None or len(sequence.logprobs) != len(sequence.tokens):
            raise RunError(f"{self._service.settings.host} gave an answer without a log-probability a token.")
        return Sampled(list(sequence.tokens), list(sequence.logprobs))

    def close(self) -> None:
        """Ask the service to drop the adapters of this sampler."""
        if self._adapter is not None:
            self._adapter.close()


def requests(sequences: Sequence[TokenSequence], most: int) -> Iterable[list[int]]:
    """Divide sequences into requests; yield the indices of the sequences of each request.

    Args:
        sequences: The sequences, whose order is kept.
        most: Largest number of tokens in one request; a longer sequence gets a request of its own.
    """
    own: list[int] = []
    size = 0
    for index, each in enumerate(sequences):
        if own and size + len(each.ids) > most:
            yield own
            own, size = [], 0
        own.append(index)
        size += len(each.ids)
    if own:
        yield own


def _datum(sequence: TokenSequence, inputs: Mapping[str, Numbers]) -> types.Datum:
    """Return a sequence and the arrays of its loss as the client's type `Datum`."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(sequence.ids.tolist()),
        loss_fn_inputs={"target_tokens": sequence.targets, **inputs},
    )
