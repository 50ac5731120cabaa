"""Client of a service of the Tinker API: adapters that are trained there, and samplers; no other module calls `tinker`.

The client of that package retries for minutes without a message. So every answer is awaited here, with a limit, and a
service that is gone is noticed by asking whether it lives.
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
"""Seconds between two looks at whether the service lives."""
_LOOK = 5.0
"""Seconds that such a look may take."""

_logger = logging.getLogger(__name__)


class Rejected(RunError):
    """The service answered that it does not support the request."""


@dataclass(frozen=True)
class TokenSequence:
    """Tokens of one sequence, and which of them carry loss."""

    ids: NDArray[np.int64]
    """Tokens that the model reads."""
    targets: NDArray[np.int64]
    """The token that follows each of them."""


@dataclass(frozen=True)
class Sampled:
    """An answer of a sampler."""

    ids: list[int]
    logprobs: list[float]
    """Of each token, in nats."""


class Patience:
    """Limit on waiting for one answer: the time it may take, and the time for which the service may be away."""

    def __init__(self, settings: ServiceSettings, what: str) -> None:
        self._settings, self._what = settings, what
        self._began = self._seen = time.monotonic()

    def check(self) -> None:
        """Look whether the service lives, which may take some seconds.

        Raises:
            RunError: If it has been away, or the answer has been missing, for too long.
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
    """Return why a service cannot be reached; None: it answers."""
    try:
        with urllib.request.urlopen(f"{settings.base_url.rstrip('/')}/api/v1/healthz", timeout=_LOOK):
            return None
    except urllib.error.HTTPError:  # it answers
        return None
    except (OSError, ValueError) as error:
        return " ".join(str(error).split())


class Service:
    """An open session at a service."""

    def __init__(self, settings: ServiceSettings) -> None:
        """Open a session.

        Raises:
            PerturnError: If the client is not the tested one, the key is missing, or the service cannot be reached.
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
        """Make new adapters upon a base model; the policy then is the base model."""
        how: Any = {"rank": rank, "seed": seed, "train_unembed": False}
        made = self.run(lambda: self._client.create_lora_training_client(base, **how), f"adapters of {base}")
        return Adapter(self, made)

    def adapter_from(self, path: str, with_optimizer: bool) -> Adapter:
        """Make adapters with the weights of a saved state, and with its optimizer or a fresh one."""
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
        """End the session, whose rest the service then drops, and the connections, which the client leaves open."""
        holder = self._client.holder
        holder.close()

        async def disconnect() -> None:
            for pool in holder._client_pools.values():
                for client in pool._clients:
                    await client.close()

        self.wait(holder.run_coroutine_threadsafe(disconnect()), "the end of the session")

    def run(self, call: Callable[[], T], what: str) -> Any:
        """Make a call of the client that waits for the service by itself, and wait no longer than the settings say."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001  the one who waits is told
                future.set_exception(error)

        threading.Thread(target=work, name="perturn-tinker", daemon=True).start()
        return self.wait(future, what)

    def wait(self, future: Any, what: str) -> Any:
        """Wait for an answer.

        Args:
            future: Of the client.
            what: The awaited result, for errors.

        Raises:
            Rejected: If the service says that it cannot do it.
            RunError: If it does not answer.
        """
        patience = Patience(self.settings, what)
        while True:
            try:
                return future.result(timeout=_MOMENT)
            except TimeoutError:
                patience.check()
            except Exception as error:  # the client raises its own, and whatever its parts raise
                raise self.failure(error, what) from error

    def failure(self, error: Exception, what: str) -> RunError:
        """Return our error for an error of the client."""
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
        """Return the log-probability of each target, in nats, one array a sequence.

        Args:
            sequences: At least one.
            most: Tokens of one request, at most; a longer sequence is a separate request.

        Raises:
            RunError: If the service does not answer, or one of them is not finite.
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
        """Add the gradient of a loss of the service to the gradient of the next step.

        Args:
            rows: Sequences, each with the inputs that the loss reads, by name [tokens].
            loss: Name of the loss at the service.
            most: Tokens of one request, at most.
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
        """Save weights and optimizer at the service under a name that is new; returns the path to load them by."""
        path: str = self._service.wait(self._client.save_state(name), f"the saved state {name}").path
        return path

    def sampler(self) -> Sampler:
        """Return a sampler of the current weights."""
        make = self._client.save_weights_and_get_sampling_client
        return Sampler(self._service, self._service.run(make, "a sampler"), self)

    def close(self) -> None:
        """Have the service drop the adapters; a service that cannot drops them when the session ends."""
        holder, model = self._client.holder, self._client.model_id

        async def unload() -> None:
            with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
                await client.models.unload(request=types.UnloadModelRequest(model_id=model), max_retries=0)

        try:
            holder.run_coroutine_threadsafe(unload()).result(_LOOK)
        except Exception as error:  # noqa: BLE001  nothing depends on it
            _logger.debug("%s keeps adapters %s: %s", self._service.settings.host, model, error)


class Sampler:
    """Samples from a policy at a service."""

    def __init__(
        self, service: Service, client: tinker.SamplingClient, adapter: Adapter | None = None
    ) -> None:
        self._client, self._adapter, self._service = client, adapter, service

    def ask(self, ids: Sequence[int], stop: Sequence[int], seed: int, **how: Any) -> Future[Any]:
        """Begin to sample one continuation of a prompt; `read` reads the answer."""
        wanted = types.SamplingParams(seed=seed, stop=list(stop), **how)
        future: Future[Any] = self._client.sample(types.ModelInput.from_ints(list(ids)), 1, wanted)
        return future

    def read(self, future: Future[Any]) -> Sampled:
        """Return an answer that has come.

        Raises:
            RunError: If it is none.
        """
        try:
            (sequence,) = future.result().sequences
        except Exception as error:
            raise self._service.failure(error, "an answer") from error
        if sequence.logprobs is None or len(sequence.logprobs) != len(sequence.tokens):
            raise RunError(f"{self._service.settings.host} gave an answer without a log-probability a token.")
        return Sampled(list(sequence.tokens), list(sequence.logprobs))

    def close(self) -> None:
        """Let the service drop the resources of this sampler."""
        if self._adapter is not None:
            self._adapter.close()


def requests(sequences: Sequence[TokenSequence], most: int) -> Iterable[list[int]]:
    """Divide sequences into requests with a limit on tokens; yields their indices."""
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
    """Return a sequence as the client takes it."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(sequence.ids.tolist()),
        loss_fn_inputs={"target_tokens": sequence.targets, **inputs},
    )
