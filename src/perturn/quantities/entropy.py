"""Quantity `entropy`: entropy of the policy's distribution at the first token of each turn."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, log
from typing import Any, ClassVar

import torch
from torch import Tensor

from perturn.chat.tokens import Encoded
from perturn.config.sections import TOKEN_BUDGET
from perturn.needs import Need
from perturn.policy.logprobs import logprobs_and_entropy, pack_by_pack
from perturn.policy.packing import Batch
from perturn.policy.reference import frozen
from perturn.policy.value_heads import first_tokens
from perturn.quantities.protocol import ACTED, Computed, Ground, Quantity, QuantityTraits, Source
from perturn.quantities.readers import Reader, encoded
from perturn.types import Trajectory


def turn_entropies(
    model: Any, sequences: Sequence[Encoded], token_budget: int = TOKEN_BUDGET
) -> list[list[float]]:
    """Return the entropy at each turn's first token, divided by the entropy of the uniform distribution.

        H(pi(. | prompt)) / log(vocabulary)

    It is computed at the last token of the turn's prompt, so it does not depend on the action.

    Source: Dong et al. 2025, "Agentic Reinforced Policy Optimization", arXiv:2507.19849, by its abstract and notes on
    its code.
    Differs: ARPO averages over the first sampled tokens of a turn, so its entropy depends on these tokens.

    Args:
        model: Causal language model on the device to compute on.
        sequences: Episodes as tokens, with all of their turns.
        token_budget: Maximum number of tokens of one pass.

    Returns:
        Relative entropy, without unit, from 0 (certain) to 1 (uniform) `[trajectories][turns]`.
    """
    most = log(model.get_output_embeddings().weight.shape[0])

    def entropy(model: Any, batch: Batch) -> Tensor:
        return logprobs_and_entropy(model, batch)[1]

    with torch.no_grad():
        found = pack_by_pack(
            entropy, model, [first_tokens(one, [1] * one.turns) for one in sequences], token_budget
        )
    return [(one.double() / most).tolist() for one in found]


def entropies_of(trajectories: Sequence[Trajectory], reader: Reader) -> list[list[float]]:
    """Return `turn_entropies` of episodes under a loaded policy, without unit `[trajectories][turns]`."""
    rows = encoded(trajectories, reader.renderer)
    with frozen(reader.model, reader.precision):
        entropies = turn_entropies(reader.model, [row.chosen for row in rows.values()], reader.token_budget)
    found = dict(zip(rows, entropies, strict=True))
    return [found.get(i, []) for i in range(len(trajectories))]


class TurnEntropy(Quantity):
    """Entropy of the policy's distribution at the first token of each turn; see `turn_entropies`.

    The credit gets it as argument `entropy`, without unit, from 0 (certain) to 1 (uniform) `[trajectories][turns]`.
    """

    traits: ClassVar[QuantityTraits] = QuantityTraits(
        "a pass of the policy that acted over the episodes", passes=1, policies=frozenset({ACTED})
    )

    def compute(self, request: Need, episodes: Sequence[Trajectory], source: Source) -> Computed:
        """Compute the entropies under the policy that acted."""
        return Computed(entropies_of(episodes, source.policy(ACTED)))

    def exact(self, request: Need, ground: Ground) -> list[list[float]]:
        """Return the policy's entropy in the state of each turn, divided by the entropy of the uniform distribution."""
        return [
            [_entropy(ground.episodes.process.policy(step.state)) for step in steps]
            for steps in ground.episodes.steps
        ]


def _entropy(chances: Sequence[float]) -> float:
    """Return the entropy divided by the entropy of the uniform distribution; 0 if there is one action."""
    return -fsum(each * log(each) for each in chances) / log(len(chances)) if len(chances) > 1 else 0.0
