"""Which models the local engine serves: architectures, those it refuses, and types."""

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from perturn.engines.local.engine import LocalEngine
from perturn.errors import ModelError
from perturn.policy.models import load_model
from perturn.types import Prompt, Sampling, Turn

from .playing import Numbers

SAMPLED = Sampling(temperature=1.0, max_new_tokens=6)


def prompt(name, heard, turns=(), seed=0):
    return Prompt((), tuple(turns), ({"role": "user", "content": heard},), seed, name)


CONFIG = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
WINDOW = {"sliding_window": 8}
MODELS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], **WINDOW},
    "mistral": WINDOW,
    "phi3": {"pad_token_id": 0},
    "olmo2": {},
    "smollm3": {"pad_token_id": 0},
}


@pytest.mark.parametrize("kind", MODELS)
def test_architectures_answer_as_they_do_alone(kind):
    """Three conversations of two turns, longer than the windows, against a plain pass over the whole: 1e-4 nats."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **CONFIG | MODELS[kind]))
    engine, tokens = LocalEngine(model, Numbers()), Numbers()
    texts = [" ".join(str(n * 7 % 90) for n in range(k, k + 6 + 9 * k)) for k in range(3)]
    turns = [[], [], []]
    for _ in range(2):
        asked = [prompt(str(k), texts[k], turns[k], seed=k) for k in range(3)]
        for k, answer in enumerate(engine.generate(asked, SAMPLED)):
            turns[k].append(Turn(asked[k].observation, answer))
    engine.close()

    for k, one in enumerate(asked):
        action = turns[k][-1].action
        ids = torch.tensor([[*tokens.prompt_ids(one), *action.token_ids]])
        with torch.no_grad():
            plain = model(ids, use_cache=False).logits[0, -len(action.token_ids) - 1 : -1].log_softmax(-1)
        plain = plain.gather(-1, ids[0, -len(action.token_ids) :, None]).squeeze(-1)
        assert_close(torch.tensor(action.logprobs), plain, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("gemma2", {"head_dim": 8, "attn_logit_softcapping": 5.0}, "asks for softcap"),
        ("qwen3_next", {"num_experts": 2, "head_dim": 8}, "layers of type linear_attention"),
        ("bloom", {"n_layer": 1, "n_head": 2}, "its attention is its own"),
    ],
)
def test_a_model_that_keeps_or_asks_for_more_is_refused(kind, changes, says):
    """What is kept would be wrong without a word; the model keeps the attention it had."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **CONFIG | changes))
    before = model.config._attn_implementation

    with pytest.raises(ModelError, match=says):
        LocalEngine(model, Numbers())
    assert model.config._attn_implementation == before


def test_a_model_that_would_answer_otherwise_is_refused(tiny_model, renderer, monkeypatch):
    """A wrong position is seen on the tokens that are compared."""
    plain = tiny_model.forward
    monkeypatch.setattr(
        tiny_model,
        "forward",
        lambda *args, position_ids=None, **others: plain(
            *args, position_ids=None if position_ids is None else position_ids // 2, **others
        ),
    )

    with pytest.raises(
        ModelError, match=r"other log-probabilities with kept keys and values than alone \(by "
    ):
        LocalEngine(tiny_model, renderer)


TURNS = {
    "phi3": {
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 4.0, 8.0, 16.0],
        },
    },
    "llama": {
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    },
}
"""Positions that turn otherwise once a sequence has more than 64 tokens."""


@pytest.mark.parametrize("kind", TURNS)
def test_a_conversation_ends_where_its_positions_would_change(kind):
    """Beside one that is too long, another grows over two turns up to 64 tokens: as a plain pass over it, to 1e-4 nats.

    What was sampled at 30 tokens would have another log-probability in a sequence of 65.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **CONFIG | {"pad_token_id": 0, "initializer_range": 0.2} | TURNS[kind])
    ).eval()
    tokens = Numbers()
    tokens.end_ids = frozenset()  # no answer ends by itself
    engine = LocalEngine(model, tokens)
    words = " ".join(str(3 + 7 * k % 80) for k in range(30))
    (first,) = engine.generate([prompt("a", words)], Sampling(temperature=1.0, max_new_tokens=20))
    turn = Turn(({"role": "user", "content": words},), first)
    asked = [prompt("a", "7 8 9", [turn]), prompt("b", f"{words} {words} 4 5 6 7")]
    second, refused = engine.generate(asked, Sampling(temperature=1.0, max_new_tokens=20))
    engine.close()
    whole = torch.tensor(tokens.prompt_ids(asked[0]) + list(second.token_ids))
    with torch.no_grad():
        logprobs = model(whole[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    logprobs = logprobs.gather(-1, whole[1:, None]).squeeze(-1)

    assert len(whole) == 64
    assert_close(torch.tensor(first.logprobs), logprobs[29:49], atol=1e-4, rtol=0)
    assert_close(torch.tensor(second.logprobs), logprobs[52:], atol=1e-4, rtol=0)
    assert "no room for an answer in the model's 64" in str(refused)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pretrained_model_is_served_in_the_types_it_comes_in(dtype):
    """Rounding in bfloat16 moves SmolLM2's log-probabilities by 0.06 nats on average, by 0.4 at most."""
    engine = LocalEngine(load_model("smollm2-135m", dtype=dtype), Numbers())

    assert engine.generate([prompt("a", "1 2 3")], SAMPLED)[0].token_ids
