"""Entropy of the policy at each token, with gradient."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from perturn.losses.token_inputs import Chunk, TokenInputTraits


@dataclass(frozen=True)
class TokenEntropy:
    """Entropy of the policy's distribution over the whole vocabulary, at each token.

        H = -sum_k p_k log p_k

    Source: Shannon 1948, "A Mathematical Theory of Communication", Section 6; as a bonus in a policy-gradient loss,
    Williams and Peng 1991, "Function Optimization using Connectionist Reinforcement Learning Algorithms".
    Differs: nothing. A vocabulary entry with probability 0 adds 0.
    """

    name: ClassVar[str] = "entropy"
    traits: ClassVar[TokenInputTraits] = TokenInputTraits()

    def __call__(self, chunk: Chunk) -> Tensor:
        """Return H, in nats [tokens]."""
        finite = chunk.logprobs.masked_fill(chunk.logprobs == -math.inf, 0.0)  # 0 log 0: no NaN gradient
        return -(chunk.logprobs.exp() * finite).sum(-1)
