"""SFT: mean negative log-likelihood per token."""

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from perturn.losses import LOSSES, TurnLogprobs
from perturn.losses.sft import SFT
from perturn.losses.turn_logprobs import turn_weights

QUICK = settings(derandomize=True)
LENGTHS = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4)


def test_hand_worked_values():
    """(0.1 + 0.2 + 0.3 + 1.0) / 4 = 0.4; (2.0 + 3.0) / 2 = 2.5. Rewards are their negatives."""
    side = TurnLogprobs.from_nested([[[-0.1, -0.2, -0.3], [-1.0]], [[-2.0, -3.0]]])
    loss = LOSSES["sft"]()

    assert_close(loss(side), torch.tensor([0.4, 2.5]))
    assert_close(loss.rewards(side), torch.tensor([-0.4, -2.5]))
    assert_close(turn_weights(side, loss.credit), torch.ones(3))


@QUICK
@given(lengths=LENGTHS)
def test_turn_boundaries_and_the_rejected_side_do_not_matter(make_side, lengths):
    """Merging all turns of a trajectory into one leaves a mean over tokens as it was."""
    side = make_side(3, lengths)
    merged = dataclasses.replace(side, turn=torch.zeros_like(side.turn))

    assert_close(SFT()(side), SFT()(merged))
    assert_close(SFT()(side, merged), SFT()(side))


def test_gradcheck(assert_gradcheck):
    assert_gradcheck(SFT())


def test_golden(assert_golden):
    assert_golden("sft", SFT)


def test_nan_padding_changes_neither_loss_nor_gradient(assert_padding_is_inert):
    assert_padding_is_inert(SFT())


def test_extreme_values_have_finite_gradients(assert_finite):
    assert_finite(SFT())


def test_no_reference_is_needed():
    assert SFT.traits.needs_reference is False
    assert SFT.traits.needs_rejected is False
    assert not SFT().rewards(TurnLogprobs.from_nested([[torch.zeros(1, requires_grad=True)]])).requires_grad
