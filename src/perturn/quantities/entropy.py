"""How uncertain a policy is where each of its turns begins: entropies that are known before anything is said."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any

import torch
from torch import Tensor

from perturn.policy.logprobs import logprobs_and_entropy, pack_by_pack
from perturn.policy.packing import Batch
from perturn.policy.tokens import Encoded
from perturn.policy.values import first_tokens
from perturn.settings.sections import TOKEN_BUDGET


def turn_entropies(
    model: Any, sequences: Sequence[Encoded], token_budget: int = TOKEN_BUDGET
) -> list[list[float]]:
    """Entropy of the distribution that the first token of each turn is drawn from, over that of an even one.

        H(pi(. | prompt)) / log(vocabulary)

    It is read at the last token of the turn's prompt, so that it is the same whatever the policy then says.

    Source: Dong et al. 2025, "Agentic Reinforced Policy Optimization", arXiv:2507.19849, by its abstract and notes on
    its code.
    Differs: there it is the mean over the first tokens that were sampled, which depends on what they are.

    Args:
        model: A causal language model on the device to compute on.
        sequences: Episodes as tokens, with all of their turns.
        token_budget: Tokens of one pass.

    Returns:
        Without unit, 0 for certain and 1 for an even distribution `[trajectories][turns]`.
    """
    most = log(model.get_output_embeddings().weight.shape[0])

    def entropy(model: Any, batch: Batch) -> Tensor:
        return logprobs_and_entropy(model, batch)[1]

    with torch.no_grad():
        found = pack_by_pack(
            entropy, model, [first_tokens(one, [1] * one.turns) for one in sequences], token_budget
        )
    return [(one.double() / most).tolist() for one in found]
