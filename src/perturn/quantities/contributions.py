"""Contributions of turns: a linear head on a policy's last hidden states that adds up to the score of an episode.

The state is that at the last token of the turn's action, so it has seen the action, and not yet the reply. Heads are
cross-fitted as those of `perturn.policy.values`: that of an episode learns from other episodes alone. So what the turns
before a turn contributed depends on the past alone, and may stand in a baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from perturn.credit.spa import Shares
from perturn.policy.logprobs import hidden_states, pack_by_pack
from perturn.policy.tokens import NO_TURN, Encoded
from perturn.policy.values import cross_fit_sums
from perturn.settings.sections import TOKEN_BUDGET


def turn_contributions(
    model: object, sequences: Sequence[Encoded], scores: Sequence[float], token_budget: int = TOKEN_BUDGET
) -> list[Shares]:
    """Contributions of each turn to the score of its episode, by heads that are each fitted on other episodes.

    Args:
        model: A causal language model on the device to compute on.
        sequences: Episodes as tokens, with all of their turns; an episode's part depends on its index.
        scores: S of each episode, in units of reward.
        token_budget: Tokens of one pass.

    Returns:
        By each head, and which one has not learned from the episode; 0 for an episode that is the only one.
    """
    features = action_features(model, sequences, token_budget)
    found = cross_fit_sums(features, scores)
    return [Shares(heads.tolist(), index % len(heads)) for index, heads in enumerate(found)]


def action_features(
    model: object, sequences: Sequence[Encoded], token_budget: int = TOKEN_BUDGET
) -> list[Tensor]:
    """Last hidden states at the last token of each turn's action, computed pack by pack.

    Args:
        model: A causal language model on the device to compute on.
        sequences: Episodes as tokens.
        token_budget: Tokens of one pass.

    Returns:
        One tensor an episode, float32 on the CPU [turns, features].
    """
    with torch.no_grad():
        return pack_by_pack(hidden_states, model, [_behind(one) for one in sequences], token_budget)


def _behind(encoded: Encoded) -> Encoded:
    """The episode with loss on the token behind each turn alone: where that is predicted, the turn is seen whole.

    A sequence that ends with a turn has one token more, which no other sees.
    """
    ids: list[int] = []
    behind: list[int] = []
    starts = []
    for span in encoded.sequences:
        starts.append(len(ids))
        ids += [*encoded.ids[span], encoded.ids[span.stop - 1]]
        turns = [*encoded.turn[span], NO_TURN]
        behind += [NO_TURN, *(own if own != after else NO_TURN for own, after in pairwise(turns))]
    return Encoded(tuple(ids), tuple(behind), ("user",) * len(ids), starts=tuple(starts))
