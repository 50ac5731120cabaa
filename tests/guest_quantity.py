"""A package of someone else's: a quantity with a setting, and a credit that needs it."""

from pathlib import Path

import guest

CODE = '''
from dataclasses import dataclass
from math import fsum, log
from typing import ClassVar

import torch

from perturn.credit.group_statistics import GroupCredit, as_tensors, turn_numbers
from perturn.credit.rloo import RLOO
from perturn.needs import Need, Needs
from perturn.policy.logprobs import logprobs_and_entropy, pack_by_pack
from perturn.policy.reference import frozen
from perturn.chat.tokens import NO_TURN
from perturn.quantities import Computed, Quantity, QuantityTraits
from perturn.quantities.readers import encoded


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
        reader = source.policy("acted")
        rows = encoded(episodes, reader.renderer)

        def entropy(model, batch):
            return logprobs_and_entropy(model, batch)[1]

        with frozen(reader.model):
            found = pack_by_pack(entropy, reader.model, [row.chosen for row in rows.values()], reader.token_budget)
        scale, means = log(2) if request.unit == "bits" else 1.0, {}
        for (index, row), values in zip(rows.items(), found, strict=True):
            turn = torch.tensor([each for each in row.chosen.turn if each != NO_TURN])
            sums = torch.zeros(row.chosen.turns).index_add_(0, turn, values)
            means[index] = (sums / turn.bincount() / scale).tolist()
        entries = [means.get(index, []) for index in range(len(episodes))]
        return Computed(entries, counts={"mean_entropy": fsum(map(fsum, entries)) / sum(map(len, entries))})

    def exact(self, request, ground):
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
        return (TokenEntropy(self.unit),)

    def __call__(self, group, *, guest_token_entropy=None, **_):
        entropies = turn_numbers("guest_token_entropy", guest_token_entropy, group, "how uncertain the policy was")
        advantages = [one.tolist() for one in RLOO(returns=self.returns)(group)]
        return as_tensors(
            [
                [each * own * len(its) / sum(its) for each, own in zip(of_one, its, strict=True)]
                for of_one, its in zip(advantages, entropies, strict=True)
            ]
        )
'''
ENTRIES = {
    "perturn.quantities": {"guest-token-entropy": "guest_quantity_code:MeanTokenEntropy"},
    "perturn.credits": {"guest-entropy-rloo": "guest_quantity_code:EntropyRLOO"},
}


def install(site: Path) -> None:
    """Write the package as it lies where it is installed."""
    info = site / "guest_quantity-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: guest-quantity\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(guest.entry_points(ENTRIES))
    (site / "guest_quantity_code.py").write_text(CODE)
