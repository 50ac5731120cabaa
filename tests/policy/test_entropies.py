"""Entropies at the prompts of turns: those of a plain forward, whatever the policy then said."""

from dataclasses import replace
from math import log

import pytest
import torch
from torch.testing import assert_close

from perturn.quantities.entropy import turn_entropies
from perturn.types import Action
from support.valued import EPISODES

from .training import asked


@pytest.mark.parametrize("budget", [1, 100_000])
def test_entropies_are_those_of_a_plain_forward(renderer, tiny_model, budget):
    """At the last token of what the policy saw then, over log of the vocabulary."""
    found = turn_entropies(tiny_model, [renderer.encode(one) for one in EPISODES], budget)

    for one, own in zip(EPISODES, found, strict=True):
        prompts = [torch.tensor([ids]) for ids in asked(renderer, one)]
        with torch.no_grad():
            logits = torch.stack([tiny_model(ids).logits[0, -1].double() for ids in prompts])
        logprobs = logits.log_softmax(-1)
        expected = -(logprobs.exp() * logprobs).sum(-1) / log(logits.shape[-1])
        assert_close(torch.tensor(own, dtype=torch.float64), expected, atol=1e-5, rtol=0)
        assert all(0 < each < 1 for each in own)


def test_what_is_then_said_changes_nothing(renderer, tiny_model):
    """Another last action, and one turn less."""
    one = EPISODES[0]
    other = replace(one, turns=(*one.turns[:-1], replace(one.turns[-1], action=Action("look around"))))
    short = replace(one, turns=one.turns[:-1])

    whole, changed, cut = turn_entropies(tiny_model, [renderer.encode(each) for each in (one, other, short)])

    assert changed == pytest.approx(whole, abs=1e-6)
    assert cut == pytest.approx(whole[:-1], abs=1e-6)
