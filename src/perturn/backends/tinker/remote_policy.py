"""A policy that a service trains: `TurnTrainer` uses it in place of a model, and it has no weights in this process."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from perturn.backends.tinker.convention import Convention
from perturn.chat.tokens import Encoded
from perturn.engines.tinker.service import Adapter, Numbers, Service, TokenSequence, requests
from perturn.engines.tinker.stored_policy import StoredPolicy
from perturn.errors import RunError
from perturn.policy.packing import loss_parts


@dataclass(frozen=True)
class Asked:
    """A sequence, and which of its log-probabilities belong to loss tokens."""

    sequence: TokenSequence
    at: Any
    """Indices in the log-probabilities of the sequence [loss tokens]."""


def asked(encoded: Encoded) -> list[Asked]:
    """Return the sequences of a trajectory that carry loss, in the order that `lay_out` has them."""
    return [
        Asked(TokenSequence(ids, np.append(ids[1:], words[-1])), at - 1)
        for ids, at, words, _ in loss_parts(encoded)
    ]


class RemotePolicy(nn.Module):
    """A policy at a service, with the config of its model; its one parameter exists for `transformers.Trainer`."""

    def __init__(
        self, service: Service, adapter: Adapter, stored: StoredPolicy, convention: Convention, config: Any
    ) -> None:
        """Hold an open policy.

        Args:
            service: Where it is.
            adapter: Its adapters there.
            stored: Where it was loaded from; of a base model the path is empty.
            convention: How the service takes gradients.
            config: Of the model.
        """
        super().__init__()
        self.config = config
        self.stands_in = nn.Parameter(torch.zeros(1))
        self.convention = convention
        self._service, self._adapter, self._stored = service, adapter, stored

    @property
    def device(self) -> torch.device:
        """Device on which the loss is computed."""
        return self.stands_in.device

    def logprobs(self, rows: Sequence[Asked], most: int) -> tuple[list[Numbers], Tensor]:
        """Return log-probabilities, in nats: of all tokens of each sequence, and of the loss tokens of all.

        Args:
            rows: At least one.
            most: Tokens of one request, at most.
        """
        found = self._adapter.logprobs([row.sequence for row in rows], most)
        flat = np.concatenate([values[row.at] for values, row in zip(found, rows, strict=True)])
        return found, torch.from_numpy(flat)

    def backward(
        self, rows: Sequence[Asked], logprobs: Sequence[Numbers], gradient: Tensor, most: int
    ) -> None:
        """Let the service add a gradient by the log-probabilities of loss tokens to the gradients of its weights.

        Args:
            rows: As `logprobs` had them.
            logprobs: Of all tokens of each sequence, as `logprobs` returned them.
            gradient: By the log-probability of each loss token [loss tokens].
            most: Tokens of one request, at most.

        Raises:
            RunError: If the gradient is not finite.
        """
        if not gradient.isfinite().all():
            raise RunError(
                "the gradient of the loss by log-probabilities is not finite, so it was not sent; lower the learning "
                "rate."
            )
        lengths = [len(row.sequence.ids) for row in rows]
        sequences, factors = [row.sequence for row in rows], np.empty(len(rows), np.float32)
        batches = [range(len(rows))] if self.convention.batch == "step" else requests(sequences, most)
        for batch in batches:
            factors[list(batch)] = self.convention.factors([lengths[index] for index in batch])
        sent = []
        parts = gradient.cpu().numpy()
        for row, own, factor in zip(rows, logprobs, factors, strict=True):
            spread = np.zeros(len(own), np.float32)
            spread[row.at], parts = parts[: len(row.at)], parts[len(row.at) :]
            sent.append((row.sequence, self.convention.inputs(own, spread, float(factor))))
        self._adapter.backward(sent, self.convention.loss, most)

    def step(self, **adam: float) -> dict[str, float]:
        """Let the service make an optimizer step; return the service's metrics."""
        return self._adapter.step(**adam)

    def save(self, name: str) -> StoredPolicy:
        """Let the service keep weights and optimizer; the name of the state is new each time."""
        path = self._adapter.save(f"{name}-{uuid.uuid4().hex[:8]}")
        return StoredPolicy(path, self._stored.base, self._stored.rank, self._stored.service)

    def load(self, stored: StoredPolicy) -> None:
        """Go on as a policy that the service has kept, with its optimizer."""
        before, self._adapter = self._adapter, self._service.adapter_from(stored.path, True)
        before.close()

    def close(self) -> None:
        """Let the service drop it."""
        self._adapter.close()


class RemoteAdam(Optimizer):
    """The service's Adam as an optimizer: each step is a step of the service."""

    def __init__(self, policy: RemotePolicy, settings: Mapping[str, float]) -> None:
        """Make no step yet.

        Args:
            policy: The policy that is trained.
            settings: Of `tinker.AdamParams`; `learning_rate` comes from the schedule.
        """
        self.measured: dict[str, float] = {}
        """Numbers that the service gave of the last step, by name."""
        self._policy = policy
        self._settings = {key: value for key, value in settings.items() if key != "learning_rate"}
        super().__init__([policy.stands_in], {"lr": settings["learning_rate"]})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make a step of the service."""
        self.measured = self._policy.step(learning_rate=self.param_groups[0]["lr"], **self._settings)
