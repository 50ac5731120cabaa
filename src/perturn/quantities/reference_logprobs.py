"""Quantity `reference`: log-probabilities of each turn's tokens under the reference policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log
from typing import ClassVar

import torch
from torch import Tensor

from perturn.needs import Need
from perturn.needs import Reference as Request
from perturn.policy.credit_weights import turn_logprobs
from perturn.policy.reference import compute_logprobs, frozen
from perturn.quantities.protocol import REFERENCE, Computed, Ground, Quantity, QuantityTraits, Source
from perturn.quantities.readers import Reader, encoded
from perturn.types import Trajectory


def reference_of(trajectories: Sequence[Trajectory], reader: Reader) -> list[list[Tensor]]:
    """Return the log-probability of each token of each turn under a policy.

    Returns:
        Log-probabilities, in nats `[trajectories][turns]`, each a tensor [tokens].
    """
    rows = encoded(trajectories, reader.renderer)
    with frozen(reader.model, reader.precision):
        logprobs = compute_logprobs(reader.model, [row.chosen for row in rows.values()], reader.token_budget)
    found = dict(zip(rows, logprobs, strict=True))
    return [
        turn_logprobs(replace(rows[i], reference=(found[i],)), 0) if i in rows else []
        for i in range(len(trajectories))
    ]


class ReferenceLogprobs(Quantity):
    """Log-probabilities of the tokens of each turn under the reference policy.

    The credit gets them as argument `reference`, in nats `[trajectories][turns]`, each a tensor [tokens].
    """

    traits: ClassVar[QuantityTraits] = QuantityTraits(
        "a pass of the reference over the rows, kept", passes=1, policies=frozenset({REFERENCE}), of_rows=True
    )
    request: ClassVar[type[Need]] = Request

    def compute(self, request: Need, episodes: Sequence[Trajectory], source: Source) -> Computed:
        """Compute the log-probabilities under the reference policy."""
        return Computed(reference_of(episodes, source.policy(REFERENCE)))

    def exact(self, request: Need, ground: Ground) -> list[list[Tensor]]:
        """Return log pi of each turn under the policy of the process, in nats `[episodes][turns]`, each [1]."""
        process = ground.episodes.process
        return [
            [
                torch.tensor([log(process.policy(step.state)[step.action])], dtype=torch.float64)
                for step in steps
            ]
            for steps in ground.episodes.steps
        ]
