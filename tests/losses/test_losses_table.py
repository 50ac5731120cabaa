"""The table of losses: names, defaults, and what each offers to a trainer."""

import dataclasses
import inspect

import pytest

from perturn.losses import LOSSES, TurnLogprobs

TURN_WEIGHTS = {"pivot": 0.9, "low": 0.2, "high": 1.0}
DENSITY_RATIO = {"kernel": "ukl", "alpha": 0.5, "reduction": "token_mean", "max_log_ratio": 20.0}
DEFAULTS = {
    "sft": {},
    "dpo": {"beta": 0.1, "reduction": "sum", "sft": 0.0},
    "dmpo": {"beta": 0.1, "gamma": 0.7, "discount": "derived"},
    "dil": DENSITY_RATIO,
    "tlm-dpo": {"beta": 0.1} | TURN_WEIGHTS,
    "tlm-dre": DENSITY_RATIO | TURN_WEIGHTS | {"coefficient": "reference"},
    "w-dpo": {"beta": 0.1, "base": 1.0},
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    "ppo-clip": {"clip_low": 0.2, "clip_high": 0.2, "ratio": "token", "aggregate": "token_mean"}
    | {"ratio_gradient": "token"}
    | {"kl": 0.0, "kl_estimator": "k3", "dual_clip": None}
    | {"importance": "none", "importance_cap": 2.0},
}
"""The test of a new loss holds its own."""
every_loss = pytest.mark.parametrize("name", LOSSES)


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_the_documented_ones(name):
    assert dataclasses.asdict(LOSSES[name]()) == DEFAULTS[name]


@every_loss
def test_a_loss_is_immutable_and_refuses_unknown_settings(name):
    with pytest.raises(dataclasses.FrozenInstanceError):
        LOSSES[name]().beta = 1.0
    with pytest.raises(TypeError, match="bata"):
        LOSSES[name](bata=1.0)


@every_loss
def test_every_setting_has_a_docstring_under_it(name):
    """The docstring is the help text of the setting: a string expression after the field."""
    lines = [line.strip() for line in inspect.getsource(LOSSES[name]).splitlines()]

    for setting in dataclasses.fields(LOSSES[name]):
        (at,) = [i for i, line in enumerate(lines) if line.startswith(f"{setting.name}: ")]
        assert lines[at + 1].startswith('"""')


@pytest.mark.parametrize("name", DEFAULTS)
def test_facts_tell_which_inputs_are_read(name):
    """A loss that needs neither works without; the others say what is missing."""
    loss = LOSSES[name]()
    bare = TurnLogprobs.from_nested([[[-1.0]]], weight=[[-1.0]], behavior=[[[-1.0]]])
    alone = name in ("sft", "kto", "ppo-clip")

    assert loss.traits.needs_reference == (name not in ("sft", "ppo-clip"))
    assert loss.traits.needs_rejected == (not alone)
    assert loss.traits.needs_mismatched == (name == "kto")
    assert loss.traits.needs_behavior == (name == "ppo-clip")
    if loss.traits.needs_reference:
        with pytest.raises(ValueError, match="reference=None"):
            loss(bare, bare)
    else:
        assert loss(bare, None).tolist() == [-1.0 if name == "sft" else 1.0]


@every_loss
def test_losses_compare_by_their_settings(name):
    assert LOSSES[name]() == LOSSES[name]()
    assert dataclasses.replace(LOSSES[name]()) == LOSSES[name]()
