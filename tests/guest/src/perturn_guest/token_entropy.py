"""A quantity that has a setting, and a credit that reads it."""

from dataclasses import dataclass
from math import fsum, log
from typing import ClassVar

import torch

from perturn.extend import Need, Needs
from perturn.extend.quantity_tools import (
    NO_TURN,
    Computed,
    Quantity,
    QuantityTraits,
    encoded,
    frozen,
    logprobs_and_entropy,
    pack_by_pack,
)
from perturn.extend.tensors import RLOO, GroupCredit, as_tensors, turn_numbers


@dataclass(frozen=True)
class TokenEntropy(Need):
    """Mean entropy of the policy over the tokens of each turn, in a unit."""

    name: ClassVar[str] = "guest-token-entropy"
    unit: str = "nats"


class MeanTokenEntropy(Quantity):
    """Mean entropy of the policy over the tokens of each turn.

    Given as `guest_token_entropy` `[trajectories][turns]`.
    """

    traits: ClassVar[QuantityTraits] = QuantityTraits(
        "a pass of the guest over the episodes", passes=1, policies=frozenset({"acted"})
    )
    request: ClassVar[type[Need]] = TokenEntropy

    def compute(self, request, episodes, source):
        """Compute it by the policy that acted."""
        reader = source.policy("acted")
        rows = encoded(episodes, reader.renderer)

        def entropy(model, batch):
            return logprobs_and_entropy(model, batch)[1]

        with frozen(reader.model, reader.precision):
            found = pack_by_pack(
                entropy, reader.model, [row.chosen for row in rows.values()], reader.token_budget
            )
        scale, means = log(2) if request.unit == "bits" else 1.0, {}
        for (index, row), values in zip(rows.items(), found, strict=True):
            turn = torch.tensor([each for each in row.chosen.turn if each != NO_TURN])
            sums = torch.zeros(row.chosen.turns).index_add_(0, turn, values)
            means[index] = (sums / turn.bincount() / scale).tolist()
        entries = [means.get(index, []) for index in range(len(episodes))]
        return Computed(entries, counts={"mean_entropy": fsum(map(fsum, entries)) / sum(map(len, entries))})

    def exact(self, request, ground):
        """Return the entropy of the process's policy."""
        policy = ground.episodes.process.policy
        scale = log(2) if request.unit == "bits" else 1.0
        return [
            [-fsum(chance * log(chance) for chance in policy(step.state)) / scale for step in steps]
            for steps in ground.episodes.steps
        ]


@dataclass(frozen=True)
class EntropyRLOO(GroupCredit):
    """RLOO's advantage, shared among the turns by the policy's entropy."""

    unit: str = "nats"

    @property
    def needs(self) -> Needs:
        """The entropy."""
        return (TokenEntropy(self.unit),)

    def __call__(self, group, *, guest_token_entropy=None, **_):
        """Return the advantage of every turn."""
        entropies = turn_numbers("guest_token_entropy", guest_token_entropy, group, "how uncertain it was")
        advantages = [one.tolist() for one in RLOO(returns=self.returns)(group)]
        return as_tensors(
            [
                [each * own * len(its) / sum(its) for each, own in zip(of_one, its, strict=True)]
                for of_one, its in zip(advantages, entropies, strict=True)
            ]
        )
