"""A checkpointed layer attends once and computes all else again."""

import copy

import pytest
import torch
from torch.testing import assert_close

from perturn.chat.tokens import Encoded
from perturn.errors import ModelError
from perturn.policy import attention
from perturn.policy.logprobs import action_logprobs, prepare
from perturn.policy.packing import lay_out

from .training import CHECKPOINTING, switch_checkpointing_on

BATCH = lay_out([Encoded(tuple(range(3, 40)), (-1,) * 20 + (0,) * 17, ("user",) * 37)])


@pytest.fixture
def model(tiny_model):
    prepare(tiny_model)
    return tiny_model.train()


@pytest.fixture
def calls(monkeypatch):
    """One entry for each time that a layer attends."""
    attend, made = attention._attend, []
    monkeypatch.setattr(attention, "_attend", lambda *given: made.append(True) or attend(*given))
    return made


def gradients(model, **how):
    return torch.autograd.grad(action_logprobs(model, BATCH).sum(), list(model.parameters()), **how)


@pytest.mark.parametrize(
    ("how", "times"),
    [(None, 1), ({}, 1), ({"use_reentrant": False}, 1), ({"use_reentrant": True}, 2)],
)
def test_a_layer_attends_once_and_its_gradients_are_the_same_to_the_bit(model, calls, how, times):
    """Twice with the reentrant kind, which knows no contexts."""
    expected = [each.clone() for each in gradients(model)]
    calls.clear()
    switch_checkpointing_on(model, how)
    model.enable_input_require_grads()
    action_logprobs(model, BATCH).sum().backward()

    assert len(calls) == times * len(model.model.layers)
    for parameter, other in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, other)


def test_a_second_backward_pass_attends_again(model, calls):
    """What was kept is gone after the first."""
    switch_checkpointing_on(model)
    total, parameters = action_logprobs(model, BATCH).sum(), list(model.parameters())
    first = torch.autograd.grad(total, parameters, retain_graph=True)
    second = torch.autograd.grad(total, parameters)

    assert len(calls) == 2 * len(model.model.layers)
    for mine, other in zip(first, second, strict=True):
        assert_close(mine, other)


def test_nothing_is_kept_without_a_backward_pass_or_after_it(model, monkeypatch):
    """Passes without gradient do not checkpoint; those with it take all that they kept."""
    layers, plain = [], attention._contexts
    monkeypatch.setattr(attention, "_contexts", lambda: layers.append(plain()) or layers[-1])
    switch_checkpointing_on(model)
    gradients(model)
    model.eval()
    with torch.no_grad():
        action_logprobs(model, BATCH)

    assert len(layers) == len(model.model.layers)
    assert all(first.kept == again.kept == [] for first, again in layers)
    assert attention._open == []


def test_a_callers_own_contexts_come_first(model, calls):
    """Torch's empty ones: the layer attends again."""
    switch_checkpointing_on(model, {"context_fn": torch.utils.checkpoint.noop_context_fn})
    gradients(model)

    assert len(calls) == 2 * len(model.model.layers)


def test_a_copy_of_the_model_switches_its_own_layers(model):
    other = copy.deepcopy(model)
    switch_checkpointing_on(other)

    assert getattr(other, f"is_{CHECKPOINTING}")
    assert not getattr(model, f"is_{CHECKPOINTING}")


def test_a_refused_model_keeps_its_own_method(tiny_model, monkeypatch):
    monkeypatch.setattr("perturn.policy.logprobs._TOLERANCE", {})
    tiny_model.model.layers[0].register_forward_hook(
        lambda module, inputs, output: output + output.mean(1, True)
    )
    with pytest.raises(ModelError, match="other log-probabilities packed"):
        prepare(tiny_model)

    assert f"{CHECKPOINTING}_enable" not in vars(tiny_model)
    assert not hasattr(tiny_model, "perturn_plain_checkpointing")


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_the_old_name_of_the_method_keeps_attention_too(tiny_model, calls, monkeypatch):
    """As transformers 5.19 calls it, which vLLM brings."""
    monkeypatch.setattr(attention, "_method", lambda model: "gradient_checkpointing_enable")
    prepare(tiny_model)
    tiny_model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls.clear()
    gradients(tiny_model)

    assert len(calls) == len(tiny_model.model.layers)
