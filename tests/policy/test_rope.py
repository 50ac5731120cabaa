"""Position encodings that depend on the longest sequence of a pass: packed is as alone, or refused."""

import logging

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
)

from perturn.chat.tokens import NO_TURN, Encoded
from perturn.errors import ModelError
from perturn.policy.logprobs import action_logprobs, prepare
from perturn.policy.models import context_length
from perturn.policy.packing import lay_out
from perturn.policy.reference import reference_identity
from perturn.rotary import steady_length

VOCABULARY = 97
SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [2.0, 4.0, 8.0, 16.0]
STEADY = 64
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": SHORT, "long_factor": LONG}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}


def phi3(**rope):
    config = Phi3Config(
        **SIZE,
        max_position_embeddings=256,
        original_max_position_embeddings=STEADY,
        rope_parameters=LONGROPE | rope,
    )
    return Phi3ForCausalLM(config)


def llama():
    return LlamaForCausalLM(
        LlamaConfig(**SIZE, max_position_embeddings=STEADY, rope_parameters=dict(DYNAMIC))
    )


def phimoe():
    rope = LONGROPE | {"long_factor": SHORT, "short_mscale": 1.0, "long_mscale": 1.5}
    config = PhimoeConfig(
        **SIZE,
        max_position_embeddings=256,
        num_local_experts=2,
        rope_parameters=rope | {"original_max_position_embeddings": STEADY},
    )
    return PhimoeForCausalLM(config)


MODELS = {"longrope": phi3, "dynamic": llama, "longrope by its mscale": phimoe}


def make(name):
    torch.manual_seed(0)
    return MODELS[name]().eval()


def sequence(length, seed):
    ids = torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Encoded(tuple(ids), (NO_TURN, *(0,) * (length - 1)), ("user",) * length)


def alone(model, encoded):
    ids = torch.tensor([encoded.ids])
    logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1)


@pytest.mark.parametrize("name", MODELS)
def test_packed_equals_alone_up_to_the_steady_length(name):
    """The longest that is taken beside short ones, before and after a long plain pass; float32."""
    rows = [sequence(STEADY, 1), sequence(20, 2), sequence(STEADY - 1, 3)]
    plain, packing = make(name), make(name)
    expected = torch.cat([alone(plain, row) for row in rows])
    with torch.no_grad():
        first = action_logprobs(packing, lay_out(rows))
        alone(packing, sequence(2 * STEADY, 4))
        second = action_logprobs(packing, lay_out(rows))

    assert_close(first, expected, atol=1e-4, rtol=0)
    assert torch.equal(second, first)


@pytest.mark.parametrize("name", MODELS)
def test_a_longer_sequence_is_refused_and_would_be_wrong(name):
    """Beside it, the short one would get other log-probabilities: by more than 0.01 nats here, without a word."""
    model, short, long = make(name), sequence(20, 2), sequence(STEADY + 1, 3)
    places = torch.stack([torch.arange(20), torch.arange(STEADY + 1 - 20, STEADY + 1)])
    expected = alone(model, short)
    ids = torch.tensor([short.ids, long.ids[-20:]])
    mixed = model(input_ids=ids, position_ids=places, use_cache=False).logits[0, :-1].log_softmax(-1)
    mixed = mixed.gather(-1, ids[0, 1:, None]).squeeze(-1)

    assert float((mixed - expected).abs().max().detach()) > 0.01
    with pytest.raises(
        ModelError, match=rf"^a sequence has {STEADY + 1} tokens, but beyond {STEADY} tokens .* max_length"
    ):
        action_logprobs(model, lay_out([short, long]))


def test_one_set_of_factors_reaches_as_far_as_the_model(caplog):
    """The remedy of the error, short factors like the long ones: packed is as alone, and nothing is logged."""
    torch.manual_seed(0)
    model = phi3(short_factor=LONG).eval()
    rows = [sequence(200, 1), sequence(20, 2)]
    expected = torch.cat([alone(model, row) for row in rows])

    assert_close(action_logprobs(model, lay_out(rows)), expected, atol=1e-4, rtol=0)
    assert context_length(model) == 256
    assert not caplog.records


def test_the_context_is_the_steady_length_and_why_is_logged(caplog):
    """Data are cut there and conversations end there, so it is said with a remedy."""
    with caplog.at_level(logging.WARNING):
        found = context_length(make("longrope"))

    assert found == STEADY
    (record,) = caplog.records
    assert "context is 64 tokens, not 256" in record.message
    assert "give short_factor" in record.message


def test_encodings_that_depend_on_no_length_have_no_limit():
    """Linear, yarn, llama3 and plain rotations are computed once."""
    shared = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    ropes = [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", **shared},
        {"rope_type": "yarn", **shared},
        {"rope_type": "llama3", **shared, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ]
    configs = [LlamaConfig(**SIZE, max_position_embeddings=256, rope_parameters=rope) for rope in ropes]

    assert [steady_length(config) for config in configs] == [None] * 4


def test_a_dependence_that_the_config_does_not_tell_is_seen():
    """Factors that were made equal in the config alone, after the model was built: the check has far tokens too."""
    model = make("longrope")
    model.config.rope_parameters["short_factor"] = LONG

    with pytest.raises(ModelError, match="does more to positions"):
        prepare(model)


def test_the_probe_of_a_reference_keeps_to_the_length():
    """A context shorter than the probe has an identity too."""
    assert reference_identity(make("longrope")) != reference_identity(make("dynamic"))
