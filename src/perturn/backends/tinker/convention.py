"""The convention of a service: the number by which it divides the gradient that it is sent. A self-test finds it out.

A loss of Perturn is a function of token log-probabilities. Its gradient by each of them, g, is sent as a loss of the
service whose gradient is linear in the numbers sent:

    importance_sampling   L = -sum_t exp(log pi(y_t) - logprobs_t) advantages_t,   advantages = -g: ratio 1
    cross_entropy         L = -sum_t weights_t log pi(y_t),                        weights = -g

Services divide that sum by other things: Tinker by nothing; SkyRL's JAX backend by the sum of a sequence's weights,
which are 1 where none are sent, and by the sequences of an optimizer step. The numbers sent are multiplied by these
again.
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
"""Losses of a service that can carry a gradient, in the order in which they are tried."""
_SHORT, _LONG, _IDLE = 8, 16, 30
"""Tokens of the sequences of the self-test."""
_LOSS = 5
"""Last tokens of the short sequence, which carry the gradient."""
_FLAT = 1e4
"""Epsilon of Adam that is large compared with a gradient, so that a step is in proportion to the gradient."""
_GAIN = 0.3
"""Sum of log-probabilities in nats by which a step of the self-test is to raise them."""
_TRIES = 8
"""Steps to find the learning rate of such a gain."""
_TOLERANCE = 0.12
"""Share by which a measured ratio may differ from the ratio that a convention predicts."""
_REQUEST = 1 << 20


@dataclass(frozen=True)
class Convention:
    """The number by which a service divides the gradient that it is sent, and whether it clips it."""

    loss: str
    """Loss of the service that the gradient is sent as."""
    of_sequence: Literal["nothing", "tokens"] = "nothing"
    """Divisor of the sum over a sequence."""
    of_batch: Literal["nothing", "sequences", "tokens"] = "nothing"
    """Divisor of the sum over sequences."""
    batch: Literal["step", "request"] = "step"
    """Whether a batch is all that is sent before an optimizer step, or one request."""
    clips: bool = False
    """Whether the service keeps to `grad_clip_norm`."""

    def factors(self, lengths: Sequence[int]) -> Numbers:
        """Return the factor on the gradient of each sequence of a batch.

        Args:
            lengths: Tokens of each sequence.
        """
        own = np.array(lengths if self.of_sequence == "tokens" else [1] * len(lengths), np.float64)
        whole = {"nothing": 1, "sequences": len(lengths), "tokens": sum(lengths)}[self.of_batch]
        return (own * whole).astype(np.float32)

    def inputs(self, logprobs: Numbers, gradient: Numbers, factor: float) -> dict[str, Numbers]:
        """Return the inputs of the service's loss for one sequence.

        Args:
            logprobs: Of its tokens, in nats, as the service computed them [tokens].
            gradient: Of our loss by each of them [tokens].
            factor: From `factors`.
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
    """Responses of a service, as shares of the response to the short sequence alone."""

    longer: float
    """The same gradient in a longer sequence with the same beginning."""
    beside: float
    """The same next to an idle sequence."""
    apart: float
    """The same next to an idle sequence in another request."""
    twice: float
    """The same in two requests."""
    clipped: float
    """The same with a tiny `grad_clip_norm`."""

    def __str__(self) -> str:
        return (
            "as shares of the change by one request with the short sequence alone: "
            f"a longer sequence {self.longer:.3f} ({_SHORT}/{_LONG} = {_SHORT / _LONG:.3f} if divided by tokens); "
            f"beside an idle sequence {self.beside:.3f}; in a request of its own beside one {self.apart:.3f}; "
            f"in two requests {self.twice:.3f}"
        )


def find_convention(service: Service, base: str, rank: int) -> Convention:
    """Find the number by which a service divides a gradient, with adapters that are dropped afterwards.

    Args:
        service: The service.
        base: Name of the base model there.
        rank: Of the adapters.

    Raises:
        RunError: If the service computes something else than the gradient that it is sent; with the numbers seen.
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
    """Steps in proportion to a known gradient, and the change of log-probabilities by each.

    Steps go up and down by turns, so that the weights stay near those at the beginning, where changes are linear.
    """

    def __init__(self, adapter: Adapter, host: str) -> None:
        ids = np.arange(_IDLE + 1, dtype=np.int64) * 7 % 97 + 3
        self._adapter, self._host = adapter, host
        self._short, self._long, self._idle = (
            TokenSequence(ids[:length], ids[1 : length + 1]) for length in (_SHORT, _LONG, _IDLE)
        )
        self._up, self._rate, self._loss = 1.0, 1.0, ""

    def begin(self, loss: str) -> None:
        """Find a learning rate at which a step changes the log-probabilities well above rounding, and not too much."""
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
        """Measure the service, and return the one convention that fits.

        Raises:
            RunError: If none does.
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
        """Send the gradient of each batch as a request, make a step, and return the change in its direction."""
        before = self._adapter.logprobs([self._long], _REQUEST)[0]
        whole = Convention(self._loss)
        for batch in batches:
            gradients = [-self._up * self._mask(each) for each in batch]
            logprobs = [np.resize(before, len(each.ids)) for each in batch]  # of the idle one, any
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
        """Return 1 at the tokens that carry the gradient."""
        mask = np.zeros(len(sequence.ids), np.float32)
        if sequence is not self._idle:
            mask[_SHORT - _LOSS : _SHORT] = 1
        return mask


def _conventions(loss: str) -> Iterator[Convention]:
    """Yield the conventions that are known, each once."""
    yield from (Convention(loss, each) for each in ("nothing", "tokens"))
    for one, many, batch in product(("nothing", "tokens"), ("sequences", "tokens"), ("step", "request")):
        if (one, many) != ("tokens", "tokens"):
            yield Convention(loss, one, many, batch)  # type: ignore[arg-type]


def _fits(convention: Convention, seen: _Seen) -> bool:
    """Return whether the responses agree with a convention's prediction."""
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
