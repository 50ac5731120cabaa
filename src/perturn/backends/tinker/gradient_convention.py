"""Gradient convention of a service: the divisor that it applies to a received gradient, found by a self-test.

A loss of Perturn is a function of token log-probabilities, with a gradient g for each token. The gradient is sent in
the form of a loss that the service supports, and whose gradient is linear in the numbers sent:

    importance_sampling   L = -sum_t exp(log pi(y_t) - logprobs_t) advantages_t,   advantages = -g: ratio 1
    cross_entropy         L = -sum_t weights_t log pi(y_t),                        weights = -g

Services divide this sum differently. Tinker does not divide. SkyRL's JAX backend divides by the sum of a sequence's
weights, which are 1 if none are sent, and by the number of sequences in an optimizer step. So Perturn multiplies the
numbers that it sends by the divisor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np

from perturn.engines.tinker.service import Adapter, Numbers, Rejected, Service, TokenSequence
from perturn.errors import RunError

LOSSES = ("importance_sampling", "cross_entropy")
"""Losses of a service in whose form a gradient can be sent, in the order in which they are tried."""
_SHORT, _LONG, _IDLE = 8, 16, 30
"""Lengths of the three test sequences, in tokens."""
_LOSS = 5
"""Number of last tokens of the short sequence that have a gradient."""
_FLAT = 1e4
"""Epsilon of Adam, much larger than any gradient, so that a step is proportional to the gradient."""
_GAIN = 0.3
"""Intended change of the summed log-probabilities by one test step, in nats."""
_TRIES = 8
"""Largest number of steps to find a learning rate with the intended change."""
_TOLERANCE = 0.12
"""Largest relative difference between a measured ratio and the ratio that a convention predicts."""
_REQUEST = 1 << 20


@dataclass(frozen=True)
class Convention:
    """The number by which a service divides a received gradient, and whether the service clips the gradient."""

    loss: str
    """Loss of the service in whose form the gradient is sent."""
    of_sequence: Literal["nothing", "tokens"] = "nothing"
    """Divisor of the sum over the tokens of a sequence."""
    of_batch: Literal["nothing", "sequences", "tokens"] = "nothing"
    """Divisor of the sum over the sequences of a batch."""
    batch: Literal["step", "request"] = "step"
    """Extent of a batch: all requests of an optimizer step, or a single request."""
    clips: bool = False
    """Whether the service applies `grad_clip_norm`."""

    def factors(self, lengths: Sequence[int]) -> Numbers:
        """Return the factor by which to multiply the gradient of each sequence of a batch [sequences].

        Args:
            lengths: Number of tokens of each sequence.
        """
        own = np.array(lengths if self.of_sequence == "tokens" else [1] * len(lengths), np.float64)
        whole = {"nothing": 1, "sequences": len(lengths), "tokens": sum(lengths)}[self.of_batch]
        return (own * whole).astype(np.float32)

    def inputs(self, logprobs: Numbers, gradient: Numbers, factor: float) -> dict[str, Numbers]:
        """Return the inputs of the service's loss for one sequence.

        Args:
            logprobs: Log-probabilities of the sequence's tokens from the service, in nats [tokens].
            gradient: Gradient of Perturn's loss with respect to `logprobs` [tokens].
            factor: Factor from `factors`.
        """
        if self.loss == "cross_entropy":
            return {"weights": -gradient * factor}
        return {"logprobs": logprobs, "advantages": -gradient * factor}

    def __str__(self) -> str:
        divisors = [f"the {self.of_sequence} of a sequence"] if self.of_sequence != "nothing" else []
        if self.of_batch != "nothing":
            divisors.append(f"the {self.of_batch} of a {self.batch}")
        how = f"divided by {' and '.join(divisors)}" if divisors else "a sum"
        return f"{self.loss}: {how}{', clipped' if self.clips else ''}"


@dataclass(frozen=True)
class _Seen:
    """Responses of a service in the self-test, divided by its response to the short sequence alone.

    A response is the change of summed log-probabilities by one step.
    """

    longer: float
    """Response if the gradient is sent with a longer sequence that starts with the same tokens."""
    beside: float
    """Response if a sequence without gradient is in the same request."""
    apart: float
    """Response if a sequence without gradient is in another request of the same step."""
    twice: float
    """Response if the short sequence is sent twice, in two requests."""
    clipped: float
    """Response with a tiny `grad_clip_norm`."""

    def __str__(self) -> str:
        return (
            "as shares of the change by one request with the short sequence alone: "
            f"a longer sequence {self.longer:.3f} ({_SHORT}/{_LONG} = {_SHORT / _LONG:.3f} if divided by tokens); "
            f"beside an idle sequence {self.beside:.3f}; in a request of its own beside one {self.apart:.3f}; "
            f"in two requests {self.twice:.3f}"
        )


def find_convention(service: Service, base: str, rank: int) -> Convention:
    """Find the gradient convention of a service, with temporary adapters.

    Args:
        service: The service.
        base: Name of the base model at the service.
        rank: Rank of the adapters.

    Raises:
        RunError: If no known convention explains the service's responses; the message gives the measured numbers.
    """
    adapter = service.adapter(base, rank, 0)
    try:
        probe = _Probe(adapter, service.settings.host)
        for loss in LOSSES:
            try:
                probe.begin(loss)
            except Rejected:
                if loss == LOSSES[-1]:
                    raise
                continue
            return probe.convention()
        raise AssertionError
    finally:
        adapter.close()


class _Probe:
    """Makes steps proportional to a known gradient, and measures the change of log-probabilities by each step.

    The direction alternates, so that the weights stay close to their initial values, where changes are linear.
    """

    def __init__(self, adapter: Adapter, host: str) -> None:
        ids = np.arange(_IDLE + 1, dtype=np.int64) * 7 % 97 + 3
        self._adapter, self._host = adapter, host
        self._short, self._long, self._idle = (
            TokenSequence(ids[:length], ids[1 : length + 1]) for length in (_SHORT, _LONG, _IDLE)
        )
        self._up, self._rate, self._loss = 1.0, 1.0, ""

    def begin(self, loss: str) -> None:
        """Find a learning rate at which a step changes the log-probabilities by about the intended amount.

        Raises:
            RunError: If there is no such learning rate, or a step moves against the gradient.
        """
        self._loss = loss
        for _ in range(_TRIES):
            gain = self._step([self._short])
            if 0.3 * _GAIN < abs(gain) < 3 * _GAIN:
                break
            self._rate *= min(100.0, max(0.01, _GAIN / max(abs(gain), 1e-9)))
        else:
            raise RunError(
                f"{self._host}: the self-test of the gradient found no learning rate at which a step changes "
                f"log-probabilities by about {_GAIN} nats; the last change was {gain:.3g} nats at {self._rate:.3g}."
            )
        if gain < 0:
            raise RunError(
                f"{self._host} moves against the gradient that it is sent as {loss}: log-probabilities that were to "
                f"rise changed by {gain:.3g} nats, so it cannot train our losses."
            )

    def convention(self) -> Convention:
        """Measure the service's responses, and return the only convention that fits.

        Raises:
            RunError: If no convention fits, or several do.
        """
        alone = self._step([self._short])
        measured = {
            "longer": self._step([self._long]),
            "beside": self._step([self._short, self._idle]),
            "apart": self._step([self._short], [self._idle]),
            "twice": self._step([self._short], [self._short]),
            "clipped": self._step([self._short], clip=1e-9),
        }
        unit = (alone + self._step([self._short])) / 2
        seen = _Seen(**{name: change / unit for name, change in measured.items()})
        fits = [each for each in _conventions(self._loss) if _fits(each, seen)]
        if abs(alone / unit - 1) > _TOLERANCE or len(fits) != 1:
            raise RunError(
                f"{self._host} does not apply the gradient that it is sent as {self._loss} in a way that is known: "
                f"{seen}; the same step again gave {2 - alone / unit:.3f}. Perturn was tested with SkyRL 0.3.0."
            )
        return replace(fits[0], clips=seen.clipped < 0.1)

    def _step(self, *batches: Sequence[TokenSequence], clip: float = 0.0) -> float:
        """Send the gradient of each batch as a request, make a step, and return the response.

        The response is the change of the summed log-probabilities in the step's direction, in nats.
        """
        before = self._adapter.logprobs([self._long], _REQUEST)[0]
        whole = Convention(self._loss)
        for batch in batches:
            gradients = [-self._up * self._mask(each) for each in batch]
            # The idle sequence has no gradient, so any log-probabilities serve for it.
            logprobs = [np.resize(before, len(each.ids)) for each in batch]
            inputs = [whole.inputs(*both, 1.0) for both in zip(logprobs, gradients, strict=True)]
            self._adapter.backward(list(zip(batch, inputs, strict=True)), self._loss, _REQUEST)
        self._adapter.step(
            learning_rate=self._rate * _FLAT * 1e-3,
            beta1=0.0,
            beta2=0.0,
            eps=_FLAT,
            grad_clip_norm=clip,
        )
        after = self._adapter.logprobs([self._long], _REQUEST)[0]
        change = self._up * float((after - before)[_SHORT - _LOSS : _SHORT].astype(np.float64).sum())
        self._up = -self._up
        return change

    def _mask(self, sequence: TokenSequence) -> Numbers:
        """Return 1 at the tokens that have a gradient, and 0 elsewhere [tokens]."""
        mask = np.zeros(len(sequence.ids), np.float32)
        if sequence is not self._idle:
            mask[_SHORT - _LOSS : _SHORT] = 1
        return mask


def _conventions(loss: str) -> Iterator[Convention]:
    """Yield each known convention once."""
    yield from (Convention(loss, each) for each in ("nothing", "tokens"))
    for one, many, batch in product(("nothing", "tokens"), ("sequences", "tokens"), ("step", "request")):
        if (one, many) != ("tokens", "tokens"):
            yield Convention(loss, one, many, batch)  # type: ignore[arg-type]


def _fits(convention: Convention, seen: _Seen) -> bool:
    """Return whether the measured responses agree with a convention's predictions."""
    alone = convention.factors([_SHORT])[0]
    apart = convention.factors([_SHORT, _IDLE] if convention.batch == "step" else [_SHORT])[0]
    twice = convention.factors([_SHORT, _SHORT] if convention.batch == "step" else [_SHORT])[0]
    predicted = {
        "longer": alone / convention.factors([_LONG])[0],
        "beside": alone / convention.factors([_SHORT, _IDLE])[0],
        "apart": alone / apart,
        "twice": 2 * alone / twice,
    }
    return all(abs(getattr(seen, name) / value - 1) < _TOLERANCE for name, value in predicted.items())
