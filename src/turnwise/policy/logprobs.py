"""Log-probabilities of the tokens that carry loss, and nothing else of the output layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from turnwise.policy.tokens import NO_TURN, Encoded

Batch = dict[str, Tensor]
"""Sequences laid end to end, without padding: `ids` [tokens], `turn` [tokens], `lengths` [sequences]."""


def lay_out(sequences: Sequence[Encoded]) -> Batch:
    """Sequences -> one flat batch; the order is kept."""
    return {
        "ids": torch.tensor([token for sequence in sequences for token in sequence.ids]),
        "turn": torch.tensor([turn for sequence in sequences for turn in sequence.turn]),
        "lengths": torch.tensor([len(sequence.ids) for sequence in sequences]),
    }


def action_logprobs(model: Any, batch: Batch) -> Tensor:
    """Log-probability of each token that carries loss, given all tokens before it in its sequence.

    One forward pass a sequence; the output layer runs only where the next token carries loss.

    Args:
        model: A causal language model, wrapped or not.
        batch: From `lay_out`, on the model's device.

    Returns:
        Log-probabilities in nats, float32 [loss tokens], in the order of the batch.
    """
    lengths = batch["lengths"].tolist()
    sequences = zip(batch["ids"].split(lengths), batch["turn"].split(lengths), strict=True)
    return torch.cat([_sequence_logprobs(model, ids, turn) for ids, turn in sequences])


def _sequence_logprobs(model: Any, ids: Tensor, turn: Tensor) -> Tensor:
    """Log-probabilities of one sequence, in nats [loss tokens]."""
    targets = (turn != NO_TURN).nonzero().squeeze(-1)
    assert targets.numel(), "a sequence carries loss somewhere"
    assert int(targets[0]) > 0, "a sequence starts with text the policy did not write"
    # Nothing after the last target is needed.
    ids = ids[: int(targets[-1]) + 1]
    output = model(input_ids=ids[None, :-1], use_cache=False, logits_to_keep=targets - 1)
    return -F.cross_entropy(output.logits[0].float(), ids[targets], reduction="none")


def loss_turns(batch: Batch) -> tuple[Tensor, Tensor]:
    """Turn and sequence index of each token that carries loss: two [loss tokens]."""
    sequence = torch.repeat_interleave(batch["lengths"])
    kept = batch["turn"] != NO_TURN
    return batch["turn"][kept], sequence[kept]
