"""The last layer computes the tokens that predict a loss token, the others all."""

import pytest
import torch
from torch.testing import assert_close

from perturn.chat.tokens import NO_TURN, Encoded
from perturn.policy.attention import forest_attention, forest_mask
from perturn.policy.logprobs import action_logprobs, prepare
from perturn.policy.packing import lay_out

from .training import switch_checkpointing_on

SEGMENTS = [[0, 6, 15], [6, 9, 9], [9, 15, 15], [15, 40, 60], [40, 45, 45], [45, 60, 60]]


def sequence(ids, loss):
    return Encoded(
        tuple(ids), tuple(0 if n in loss else NO_TURN for n in range(len(ids))), ("user",) * len(ids)
    )


PAIR = [sequence(range(3, 60), {10, 11, 40}), sequence([*range(3, 40), 7, 8, 9], {10, 11, 39})]
"""Two sequences that share 37 tokens; loss tokens are predicted at 9 and 10, and at 39 and 38 of the two branches."""


def rows_of(linear):
    """Numbers of rows that a linear layer is given, a pass each."""
    seen = []
    linear.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[1]))
    return seen


def test_the_feed_forward_block_of_the_last_layer_gets_the_predicting_tokens_alone(tiny_model):
    """Four places of 60; the first layer gets all, and so does the last in a plain pass afterwards."""
    prepare(tiny_model)
    layers = tiny_model.model.layers
    first, last = rows_of(layers[0].mlp.down_proj), rows_of(layers[-1].mlp.down_proj)
    batch = lay_out(PAIR)

    action_logprobs(tiny_model, batch)
    tiny_model(input_ids=torch.arange(9)[None])

    assert len(layers) > 1
    assert first == [len(batch["ids"]), 9]
    assert last == [4, 9]


def test_gradient_checkpointing_computes_them_again_alike(tiny_model):
    """The layer is recomputed in the backward pass, for the same tokens."""
    parameters = list(tiny_model.parameters())
    plain = torch.autograd.grad(action_logprobs(tiny_model, lay_out(PAIR)).sum(), parameters)
    tiny_model.train()
    switch_checkpointing_on(tiny_model)
    last = rows_of(tiny_model.model.layers[-1].mlp.down_proj)
    again = torch.autograd.grad(action_logprobs(tiny_model, lay_out(PAIR)).sum(), parameters)

    assert last == [4, 4]
    for mine, other in zip(again, plain, strict=True):
        assert_close(mine, other)


@pytest.mark.parametrize(
    "wanted",
    [[0], [5, 6, 14], [2, 3, 4, 8, 9, 10, 20, 21, 44, 46, 47, 59], list(range(60)), [16, 18, 20], [59]],
)
@pytest.mark.parametrize("groups", [1, 3])
def test_attention_of_wanted_tokens_is_that_of_all(wanted, groups):
    """Values and gradients; zeros elsewhere. Float64 sums in another order are 1e-12 apart."""
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(1, heads, 60, 8, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (2 * groups, 2, 2)
    ]
    layer, spared = torch.nn.Module(), torch.nn.Module()
    spared.perturn_wanted = torch.tensor(wanted)
    mask = forest_mask(torch.tensor(SEGMENTS))
    whole, found = (forest_attention(each, *inputs, mask)[0] for each in (layer, spared))
    kept = torch.zeros(60, dtype=torch.bool).index_fill(0, torch.tensor(wanted), True)
    weights = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    expected = torch.where(kept[:, None, None], whole, 0.0)

    assert_close(found, expected, atol=1e-12, rtol=0)
    for mine, other in zip(
        torch.autograd.grad(found, inputs, weights),
        torch.autograd.grad(expected, inputs, weights),
        strict=True,
    ):
        assert_close(mine, other, atol=1e-12, rtol=1e-12)
