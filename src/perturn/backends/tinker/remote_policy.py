"""A policy whose weights are at a service; `TurnTrainer` uses it in place of a model."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from perturn.backends.tinker.gradient_convention import Convention
from perturn.chat.tokens import Encoded
from perturn.engines.tinker.service import Adapter, Numbers, Service, TokenSequence, requests
from perturn.engines.tinker.stored_policy import StoredPolicy
from perturn.errors import RunError
from perturn.policy.packing import loss_parts


@dataclass(frozen=True)
class Asked:
    """A sequence, with the indices of its loss tokens."""

    sequence: TokenSequence
    at: Any
    """Indices of the loss tokens among the sequence's log-probabilities [loss tokens]."""


def asked(encoded: Encoded) -> list[Asked]:
    """Return the sequences of a trajectory that carry loss, in the same order as in `lay_out`."""
    return [
        Asked(TokenSequence(ids, np.append(ids[1:], words[-1])), at - 1)
        for ids, at, words, _ in loss_parts(encoded)
    ]


class RemotePolicy(nn.Module):
    """A policy at a service, with the config of its model; its dummy parameter exists for `transformers.Trainer`."""

    def __init__(
        self, service: Service, adapter: Adapter, stored: StoredPolicy, convention: Convention, config: Any
    ) -> None:
        """Wrap an open policy.

        Args:
            service: The service.
            adapter: Adapters of the policy at the service.
            stored: Saved state from which the policy was loaded; its path is empty for a base model.
            convention: Gradient convention of the service.
            config: Config of the model.
        """
        super().__init__()
        self.config = config
        self.stands_in = nn.Parameter(torch.zeros(1))
        self.convention = convention
        self._service, self._adapter, self._stored = service, adapter, stored

    @property
    def device(self) -> torch.device:
        """Device of the dummy parameter, on which the loss is computed."""
        return self.stands_in.device

    def logprobs(self, rows: Sequence[Asked], most: int) -> tuple[list[Numbers], Tensor]:
        """Return log-probabilities from the service, in nats.

        Args:
            rows: At least one sequence.
            most: Largest number of tokens in one request.

        Returns:
            For each sequence, the log-probabilities of all its tokens [tokens]. The log-probabilities of the loss
            tokens of all sequences, concatenated [loss tokens].
        """
        found = self._adapter.logprobs([row.sequence for row in rows], most)
        flat = np.concatenate([values[row.at] for values, row in zip(found, rows, strict=True)])
        return found, torch.from_numpy(flat)

    def backward(
        self, rows: Sequence[Asked], logprobs: Sequence[Numbers], gradient: Tensor, most: int
    ) -> None:
        """Send the gradient of the loss to the service, which accumulates the gradients of its weights.

        Args:
            rows: The sequences that were passed to `logprobs`.
            logprobs: First result of `logprobs`.
            gradient: Gradient of the loss with respect to each loss token's log-probability [loss tokens].
            most: Largest number of tokens in one request.

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
        """Make an optimizer step at the service; return the service's metrics by name.

        Args:
            adam: Settings of `tinker.AdamParams`.
        """
        return self._adapter.step(**adam)

    def save(self, name: str) -> StoredPolicy:
        """Save weights and optimizer at the service; a random suffix makes the name unique."""
        path = self._adapter.save(f"{name}-{uuid.uuid4().hex[:8]}")
        return StoredPolicy(path, self._stored.base, self._stored.rank, self._stored.service)

    def load(self, stored: StoredPolicy) -> None:
        """Continue from a saved state, including its optimizer."""
        before, self._adapter = self._adapter, self._service.adapter_from(stored.path, True)
        before.close()

    def close(self) -> None:
        """Ask the service to drop the policy's adapters."""
        self._adapter.close()


class RemoteAdam(Optimizer):
    """A torch optimizer whose steps are Adam steps at the service."""

    def __init__(self, policy: RemotePolicy, settings: Mapping[str, float]) -> None:
        """Make the optimizer; no step is made yet.

        Args:
            policy: The policy to train.
            settings: Settings of `tinker.AdamParams`. `learning_rate` is the initial value; the schedule changes it.
        """
        self.measured: dict[str, float] = {}
        """Metrics of the last step from the service, by name."""
        self._policy = policy
        self._settings = {key: value for key, value in settings.items() if key != "learning_rate"}
        super().__init__([policy.stands_in], {"lr": settings["learning_rate"]})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make an optimizer step at the service, with the current learning rate."""
        self.measured = self._policy.step(learning_rate=self.param_groups[0]["lr"], **self._settings)
