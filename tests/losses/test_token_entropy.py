"""The entropy of the policy at each token, as an input of a loss."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from guest_losses import EntropyBonus
from perturn.losses import TOKEN_INPUTS, TurnLogprobs
from perturn.losses.token_inputs import Chunk

ENTROPY = TOKEN_INPUTS["entropy"]()
CASES = json.loads((Path(__file__).parent.parent / "golden" / "token_entropy.json").read_text())


def of(logits):
    """The entropy of each row of logits."""
    return ENTROPY(Chunk(torch.zeros(len(logits), 1), logits, torch.zeros(len(logits), dtype=torch.long)))


def test_hand_worked_value():
    """Shares 1/2, 1/4, 1/4: (log 2)/2 + 2 (log 4)/4 = 1.5 log 2 = 1.039721 nats."""
    found = of(torch.tensor([[2.0, 1.0, 1.0]]).log())

    assert_close(found, torch.tensor([1.039721]), atol=1e-6, rtol=0)


@given(
    st.lists(st.floats(-30, 30), min_size=2, max_size=9),
    st.floats(-50, 50),
    st.randoms(use_true_random=False),
)
def test_it_lies_between_zero_and_an_even_distribution_and_ignores_shifts_and_order(drawn, shift, randomly):
    """0 <= H <= log K; adding a constant to all logits, or another order, changes nothing."""
    shuffled = randomly.sample(drawn, len(drawn))
    plain, shifted, other = of(
        torch.tensor([drawn, [z + shift for z in drawn], shuffled], dtype=torch.float64)
    )

    assert -1e-12 <= float(plain) <= math.log(len(drawn)) + 1e-12
    assert_close(shifted, plain, atol=1e-9, rtol=0)
    assert_close(other, plain, atol=1e-12, rtol=0)


def test_gradcheck():
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    assert torch.autograd.gradcheck(of, logits.requires_grad_())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['entropy']:.3g}")
def test_agrees_with_60_digits(case):
    """Values and gradients to 1e-12, from an even distribution to a nearly certain one."""
    logits = torch.tensor([case["logits"]], dtype=torch.float64, requires_grad=True)
    found = of(logits)
    found.sum().backward()

    assert_close(found, torch.tensor([case["entropy"]], dtype=torch.float64), atol=1e-12, rtol=1e-12)
    assert_close(logits.grad[0], torch.tensor(case["gradient"], dtype=torch.float64), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    "row",
    [[0.0] * 5, [1e4, -1e4, 0.0, 3.0, 3.0], [88.0, 87.0, -80.0, 0.0, 1.0], [0.0, 1.0] + [-math.inf] * 3],
)
def test_gradients_are_finite_at_both_ends(row):
    """Even and certain distributions, and words of probability 0, in float32."""
    logits = torch.tensor([row], requires_grad=True)
    found = of(logits)
    found.sum().backward()

    assert found.isfinite().all()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("aggregate", ["token_mean", "turn_mean", "trajectory_mean"])
def test_padding_is_inert(aggregate):
    """NaN in padded positions of the input changes neither a loss with a bonus nor its gradient."""
    turn = torch.tensor([[-1, 0, 0, -1, 1], [0, -1, 1, 1, -1]])
    generator = torch.Generator().manual_seed(0)
    flat = -torch.rand(2, 6, generator=generator, dtype=torch.float64)
    padded = torch.full((2, *turn.shape), math.nan, dtype=torch.float64)
    padded[:, turn >= 0] = flat
    flat.requires_grad_(), padded.requires_grad_()
    kept, trajectory = turn[turn >= 0], (turn >= 0).nonzero()[:, 0]
    more = {"weight": torch.tensor([1.0, -1.0, 0.5, 2.0]).double(), "behavior": flat[0].detach() + 0.1}
    loss = EntropyBonus(aggregate=aggregate, bonus=0.3)

    expected = loss(TurnLogprobs(flat[0], None, kept, trajectory, inputs={"entropy": flat[1]}, **more))
    side = TurnLogprobs.from_padded(padded[0], None, turn, inputs={"entropy": padded[1]})
    found = loss(dataclasses.replace(side, **more))
    expected.sum().backward()
    found.sum().backward()

    assert torch.equal(found, expected)
    assert torch.equal(padded.grad[:, turn >= 0], flat.grad)
    assert flat.grad[1].abs().min() > 0
    assert not padded.grad[:, turn < 0].any()
