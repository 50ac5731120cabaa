"""What a loss must have to be taken: traits, members and methods, and per-token inputs that there are."""

import re
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch.testing import assert_close

from guest_losses import Margin, SecondReference, TwoReferences
from perturn.errors import ConfigError
from perturn.losses import LOSSES, TOKEN_INPUTS, LossTraits, TurnLogprobs
from perturn.losses.protocol import check_loss, default_traits
from perturn.losses.sft import SFT
from perturn.losses.token_inputs import TokenInputTraits, token_inputs
from perturn.training.credit_choice import make_loss


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_of_ours_keeps_the_protocol(name):
    check_loss(LOSSES[name]())

    assert default_traits(LOSSES[name]) == LOSSES[name]().traits


class _NearMiss(SFT):
    need_behavior = True


class _Outside(SFT):
    needs_rejected = True


class _NoTraits:
    credit = SFT.credit
    rewards = SFT.rewards


class _NoReward:
    credit = SFT.credit
    traits = LossTraits()


class _Forgotten(SFT):
    def diagnostics(self, chosen, rejected):
        return {}


class _Missing(SFT):
    traits = LossTraits(step_statistic=True)


class _MisspeltMethod(SFT):
    traits = LossTraits(turn_diagnostics=True)

    def turn_diagnostic(self, chosen):
        return {}


class _NotCallable(_NoReward):
    def rewards(self, side):
        return side.policy


class _OneSide(SFT):
    def __call__(self, chosen):
        return chosen.policy


class _NoStep(SFT):
    traits = LossTraits(step_statistic=True)

    def step_statistic(self, chosen):
        return chosen.weight


class _Unsided(SFT):
    def rewards(self):
        return 0.0


class _Mapping(SFT):
    traits = {"needs_rejected": True}  # noqa: RUF012


class _Unknown(SFT):
    traits = LossTraits(reads=frozenset({"entropi"}))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (
            _NearMiss,
            "loss _NearMiss has 'need_behavior', which is never read. Did you mean `LossTraits(needs_behavior=...)`?",
        ),
        (
            _Outside,
            "loss _Outside has 'needs_rejected', which is never read. Did you mean `LossTraits(needs_rejected=...)`?",
        ),
        (_NoTraits, "loss _NoTraits must have 'traits', and has none; see perturn.losses.Loss."),
        (_NoReward, "loss _NoReward must have 'rewards', and has none; see perturn.losses.Loss."),
        (
            _Forgotten,
            "trait diagnostics of loss _Forgotten must be True, since the loss has a method 'diagnostics', got False. "
            "Write LossTraits(diagnostics=True), or remove the method.",
        ),
        (
            _Missing,
            "trait step_statistic of loss _Missing must be False, since the loss has no method 'step_statistic', "
            "got True. Write LossTraits(step_statistic=False), or add the method.",
        ),
        (
            _MisspeltMethod,
            "loss _MisspeltMethod has 'turn_diagnostic', which is never read. Did you mean `turn_diagnostics`? "
            "Begin the name of a helper with `_`.",
        ),
        (_NotCallable, "loss _NotCallable must have '__call__', and has none; see perturn.losses.Loss."),
        (
            _OneSide,
            "__call__ of loss _OneSide cannot be called: too many positional arguments. "
            "Write def __call__(self, chosen, rejected).",
        ),
        (
            _NoStep,
            "__call__ of loss _NoStep cannot be called: got an unexpected keyword argument 'step'. "
            "Write def __call__(self, chosen, rejected, step=None).",
        ),
        (
            _Unsided,
            "rewards of loss _Unsided cannot be called: too many positional arguments. "
            "Write def rewards(self, side).",
        ),
        (
            _Mapping,
            "traits of loss _Mapping must be a perturn.losses.LossTraits, got {'needs_rejected': True}.",
        ),
        (_Unknown, "there is no token input 'entropi'. Did you mean 'entropy'? Known: entropy."),
    ],
)
def test_a_loss_that_does_not_keep_the_protocol_is_rejected_when_it_is_made(monkeypatch, kind, says):
    monkeypatch.setitem(LOSSES._own, "guest", kind)

    with pytest.raises(ConfigError, match=f"^{re.escape(says)}$"):
        make_loss({"name": "guest"})


@dataclass(frozen=True)
class _Reserved(Margin):
    name: ClassVar[str] = "behavior"


class _NoFunction:
    name = "other"
    traits = TokenInputTraits()


class _Nameless:
    traits = TokenInputTraits()


class _NearTrait(Margin):
    policy = "p"


@pytest.mark.parametrize(
    ("reads", "says"),
    [
        ([_Reserved()], "has the name 'behavior', and that name is taken"),
        ([Margin(), Margin(scale=2.0)], "token input Margin has the name 'margin', and that name is taken"),
        ([_NoFunction()], "must be callable on a Chunk, or name a frozen policy"),
        ([_Nameless()], "token input _Nameless must have 'name', and has none"),
        ([_NearTrait()], "has 'policy', which is never read. Did you mean `TokenInputTraits(policy=...)`?"),
    ],
)
def test_inputs_that_cannot_be_read_are_rejected(reads, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        token_inputs(reads)


def test_inputs_are_found_by_name_or_come_with_settings():
    """In the order of their names; a name takes the default settings."""
    found = token_inputs({SecondReference("folder"), "entropy", Margin(2.0)})

    assert list(found) == ["entropy", "margin", "second-reference"]
    assert found == {
        "entropy": TOKEN_INPUTS["entropy"](),
        "margin": Margin(2.0),
        "second-reference": SecondReference("folder"),
    }


def test_traits_of_a_loss_that_cannot_be_made_without_settings_are_not_known():
    assert default_traits(TwoReferences) is None
    assert default_traits(_NoTraits) is None
    assert TwoReferences(second="folder").traits.rows == "pairs"


def test_inputs_stay_with_their_tokens():
    """Nested as the policy is, through `replace`, in float32 at least; a name that is missing is named."""
    side = TurnLogprobs.from_nested(
        [[[-0.1, -0.2], [-1.0]], [[-0.5]]], inputs={"margin": [[[1.0, 2.0], [3.0]], [[4.0]]]}
    )
    low = replace(side, inputs={"margin": side.inputs["margin"].bfloat16()})

    assert_close(side.inputs["margin"], torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert torch.equal(replace(side, weight=torch.ones(3)).input("margin"), side.inputs["margin"])
    assert low.input("margin").dtype == torch.float32
    with pytest.raises(
        ValueError, match=r"reads 'entropy' of each token, and the batch has margin\. Name it in"
    ):
        side.input("entropy")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (torch.zeros(3), r"inputs\['margin'\] must have shape \[4\], got \[3\]"),
        (torch.zeros(4, 2), r"inputs\['margin'\] must have shape \[4\], got \[4, 2\]"),
        (torch.zeros(4, dtype=torch.long), r"inputs\['margin'\] must be floating point, got torch.int64"),
    ],
)
def test_inputs_are_one_number_a_token(values, says):
    with pytest.raises(ValueError, match=says):
        TurnLogprobs(
            torch.zeros(4), None, torch.zeros(4).long(), torch.zeros(4).long(), inputs={"margin": values}
        )


def test_nested_inputs_must_be_nested_as_the_policy_is():
    with pytest.raises(ValueError, match="turn 0: policy has 2 tokens, but margin 1"):
        TurnLogprobs.from_nested([[[-0.1, -0.2]]], inputs={"margin": [[[1.0]]]})
