import copy
import json

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close

from perturn.chat.tokens import NO_TURN, Encoded
from perturn.errors import ModelError
from perturn.policy.logprobs import action_logprobs, prepare
from perturn.policy.packing import lay_out

peft_warns = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
"""peft 0.21 asks transformers 5.23 a question by its old name."""
VOCABULARY = 97
SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA = SIZE | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 128}
KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
MULTIPLIERS = {"attention_multiplier": 0.2, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}
TIED = {"tie_word_embeddings": True, "attention_bias": True}
CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": 3.0}
MODELS = {
    "llama": ("LlamaForCausalLM", SIZE),
    "llama, tied, with biases": ("LlamaForCausalLM", SIZE | TIED),
    "qwen2": ("Qwen2ForCausalLM", SIZE),
    "qwen3": ("Qwen3ForCausalLM", SIZE | {"head_dim": 16}),
    "gemma3": ("Gemma3ForCausalLM", GEMMA | KINDS),
    "gemma2 without attention softcap": ("Gemma2ForCausalLM", GEMMA | KINDS | CAPS),
    "mistral": ("MistralForCausalLM", SIZE | {"sliding_window": None}),
    "mistral with a window": ("MistralForCausalLM", SIZE | {"sliding_window": 128}),
    "granite": ("GraniteForCausalLM", SIZE | MULTIPLIERS | {"logits_scaling": 3.0}),
    "cohere": ("CohereForCausalLM", SIZE | {"logit_scale": 0.25}),
    "phi3": ("Phi3ForCausalLM", SIZE),
    "smollm3": ("SmolLM3ForCausalLM", SIZE | {"no_rope_layers": [1, 0]}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
}
"""Class and the settings of its configuration."""


def make(name="llama", dtype=torch.float64, **changes):
    """A tiny model with random weights, norms and biases among them."""
    class_name, settings = MODELS[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**settings | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model.to(dtype)


def tokens(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


def sequence(ids, loss):
    """`loss` maps places to turns."""
    turn = tuple(loss.get(place, NO_TURN) for place in range(len(ids)))
    return Encoded(tuple(ids), turn, ("user",) * len(ids))


def span(start, end, turn):
    return dict.fromkeys(range(start, end), turn)


PROMPT, ANSWER = tokens(36, 1), tokens(34, 2)
GROUP = [
    sequence(PROMPT + ANSWER + tokens(9, 3), span(30, 40, 0) | span(70, 79, 1)),
    sequence(PROMPT + ANSWER + tokens(5, 4), span(30, 40, 0) | span(70, 75, 1)),
    sequence(PROMPT + tokens(12, 5), span(30, 48, 0)),
    sequence(tokens(20, 6), span(1, 20, 0)),
]
"""Three share a prompt of 36 tokens, two of them an answer of 34 more; the last one shares nothing."""
BATCH = lay_out(GROUP)


def plain(model, rows=GROUP):
    """The definition: each sequence alone through the model's own forward."""
    found = []
    for row in rows:
        ids = torch.tensor(row.ids)
        logprobs = model(input_ids=ids[None], use_cache=False).logits[0]
        logprobs = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32)).log_softmax(-1)
        places = [place for place, turn in enumerate(row.turn) if turn != NO_TURN]
        found.append(torch.stack([logprobs[place - 1, ids[place]] for place in places]))
    return torch.cat(found)


WEIGHTS = torch.linspace(-1, 2, int(sum(len(row.turn) - row.turn.count(NO_TURN) for row in GROUP)))
"""Of the log-probabilities in the sum whose gradient is compared."""


def gradients(model, logprobs):
    """By name of the parameter, of those that train."""
    model.zero_grad()
    (logprobs * WEIGHTS.to(logprobs.dtype)).sum().backward()
    return {name: each.grad for name, each in model.named_parameters() if each.requires_grad}


def assert_same_gradients(found, expected, share):
    """Differences are measured in shares of the largest element of each tensor's gradient."""
    assert found.keys() == expected.keys()
    for name, theirs in expected.items():
        atol = share * float(theirs.abs().max()) + 1e-12
        assert_close(found[name], theirs, atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def test_the_group_is_packed_as_its_docstring_says():
    """36 + 34 shared tokens, 8 + 4 + 11 of their own, and 19 apart: each input ends before its last token."""
    assert len(BATCH["ids"]) == 36 + 34 + 8 + 4 + 11 + 19
    assert len(BATCH["segments"]) == 6


def assert_as_alone(model, untouched, share=1e-5):
    """Log-probabilities and gradients are those of a copy that was never prepared; returns them."""
    found, expected = action_logprobs(model, BATCH), plain(untouched)
    theirs = gradients(untouched, expected)

    assert_close(found, expected, atol=share, rtol=0)
    assert_same_gradients(gradients(model, found), theirs, share)
    return found, theirs


@pytest.mark.parametrize(
    ("name", "dtype", "share"),
    [(name, torch.float64, 1e-5) for name in MODELS]
    + [(name, torch.float32, 1e-4) for name in ("llama", "gemma3", "cohere")],
)
def test_packed_equals_each_sequence_alone(name, dtype, share):
    """Log-probabilities and the gradient of every parameter, against a copy that was never prepared.

    float64 but for norms and rotations, which these models compute in float32: 1e-5 of the size at hand. In float32,
    log-probabilities of size 10 through two layers: 1e-4; gradients to 1e-4 of their size.
    """
    found, _ = assert_as_alone(make(name, dtype), make(name, dtype), share)

    assert found.dtype == dtype
    assert found.std() > 0.2


def test_sharing_changes_nothing():
    """The same batch laid out without it has more tokens and the same values and gradients, float32 in between."""
    model = make()
    alone = lay_out(GROUP, share=False)
    shared, repeated = (action_logprobs(model, batch) for batch in (BATCH, alone))

    assert len(alone["ids"]) == 78 + 74 + 47 + 19
    assert_close(shared, repeated, atol=1e-5, rtol=0)
    assert_same_gradients(gradients(model, shared), gradients(model, repeated), 1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_gradient_checkpointing_gives_the_same_gradients(name, reentrant):
    """Activations are computed again from the same inputs: equal to the last bit."""
    model = make(name).train()
    expected = gradients(model, action_logprobs(model, BATCH))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    found = gradients(model, action_logprobs(model, BATCH))

    assert_same_gradients(found, expected, 0.0)


def adapt(model, **how):
    """The model with LoRA matrices, which do not begin at zero unless so asked; equal calls give equal ones."""
    how = {"target_modules": "all-linear", "init_lora_weights": False} | how
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **how)).double()


@pytest.fixture(params=[False, True], ids=["new", "prepared"])
def model(request):
    """A model that was prepared, or is not yet."""
    model = make()
    if request.param:
        prepare(model)
    return model


@peft_warns
def test_adapters_packed_equal_each_sequence_alone(model):
    """LoRA by peft, around a model that was prepared or is not yet: values, and gradients of the adapters alone."""
    found, theirs = assert_as_alone(adapt(model), adapt(make()))

    assert not torch.allclose(found, plain(make()), atol=1e-2)
    assert all("lora_" in name for name in theirs)


@peft_warns
def test_an_adapter_of_the_output_layer_is_refused(model):
    """The layer's weight is not all it computes; a matrix that begins at zero passes any comparison, never to learn."""
    model = adapt(model, target_modules=["q_proj", "lm_head"], init_lora_weights=True)

    with pytest.raises(ModelError, match=r"the output layer has an adapter.*modules_to_save"):
        action_logprobs(model, BATCH)


@peft_warns
def test_an_output_layer_that_is_trained_whole_learns():
    """modules_to_save holds a copy of it, which is used in its place and gets the gradient."""
    model, untouched = (adapt(make(), modules_to_save=["lm_head"]) for _ in range(2))
    with torch.no_grad():
        for one in (model, untouched):
            one.get_output_embeddings().modules_to_save["default"].weight.mul_(1.1)
    _, theirs = assert_as_alone(model, untouched)

    assert any("lm_head" in name for name in theirs)


def test_bfloat16_autocast_is_close():
    """Activations with 8 bits: two layers are off by 0.06 nats here, as the plain computation is.

    Gradients stay float32.
    """
    model = make(dtype=torch.float32)
    exact = action_logprobs(model, BATCH).detach()
    with torch.autocast("cpu", torch.bfloat16):
        found = action_logprobs(model, BATCH)
        expected = plain(model)
    grads = gradients(model, found)

    assert found.dtype == torch.float32
    assert_close(found, exact, atol=0.15, rtol=0)
    assert (found - exact).square().mean() < 2 * (expected - exact).square().mean()
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads.values())


WINDOWED = [("mistral with a window", {}), ("gemma3", {}), ("qwen2", {"use_sliding_window": True} | KINDS)]


@pytest.mark.parametrize(("name", "changes"), WINDOWED, ids=[name for name, _ in WINDOWED])
def test_a_sequence_longer_than_the_window_is_refused(name, changes):
    """78 tokens are fed, the last one is only predicted: 78 are seen by a window of 78, but not by one of 77."""
    wide, narrow = (make(name, sliding_window=window, **changes) for window in (78, 77))

    assert_close(action_logprobs(wide, BATCH), plain(wide), atol=1e-5, rtol=0)
    with pytest.raises(
        ModelError, match=r"a sequence has 78 tokens, .* see only the last 77; .* max_length to"
    ):
        action_logprobs(narrow, BATCH)


def test_a_window_that_no_layer_uses_is_no_limit():
    """The configuration names one, and all layers have full attention."""
    model = make("gemma3", sliding_window=8, layer_types=["full_attention"] * 2)

    assert_close(action_logprobs(model, BATCH), plain(model), atol=1e-5, rtol=0)


class TimesThree(transformers.LlamaForCausalLM):
    """Its logits are three times the output layer's."""

    def forward(self, *args, **others):
        """Scale what the class above returns."""
        out = super().forward(*args, **others)
        out.logits = out.logits * 3
        return out


class Reversed(transformers.LlamaForCausalLM):
    """Its positions are not those it is given."""

    def __init__(self, config):
        super().__init__(config)
        self.model.register_forward_pre_hook(self._reverse, with_kwargs=True)

    def _reverse(self, model, args, inputs):
        return args, inputs | {"position_ids": torch.arange(inputs["input_ids"].shape[1])[None]}


class NoInterface(transformers.LlamaForCausalLM):
    """Attends in a way of its own."""

    _supports_attention_backend = False


class NoPositions(transformers.LlamaForCausalLM):
    """Counts positions itself."""

    def get_decoder(self):
        """The layers, behind a forward without position_ids."""
        inner = self.model

        class Decoder(torch.nn.Module):
            def forward(self, input_ids, attention_mask=None, use_cache=None):
                return inner(input_ids, attention_mask, use_cache=use_cache)

        return Decoder()


BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 1, "n_head": 2}
CONVOLUTION = SIZE | {"layer_types": ["conv", "full_attention"]}
EXPERTS = SIZE | KINDS | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
REFUSED = {
    "logits times 3": (TimesThree, SIZE, r"^TimesThree gives other log-probabilities"),
    "own positions": (Reversed, SIZE, r"^Reversed gives other log-probabilities"),
    "no interface": (NoInterface, SIZE, r"^NoInterface does not attend through"),
    "no positions": (NoPositions, SIZE, r"^NoPositions takes no position_ids"),
    "bloom": (transformers.BloomForCausalLM, BLOOM, r"^BloomForCausalLM .*; take another model"),
    "convolutions": (transformers.Lfm2ForCausalLM, CONVOLUTION, r"has layers of type conv; packed"),
    "softcap": (transformers.Gemma2ForCausalLM, GEMMA | KINDS, r"^Gemma2Attention asks for softcap"),
    "sinks": (transformers.GptOssForCausalLM, EXPERTS, r"^GptOssAttention asks for s_aux"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_packed_is_refused(name):
    """Each time it is asked; and the model is left as it was, with its attention and in training mode."""
    model_class, settings, message = REFUSED[name]
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**settings)).train()
    ids = torch.tensor([tokens(12, 7)])
    attention, forward = model.config._attn_implementation, model.forward
    before = model(input_ids=ids).logits
    for _ in range(2):
        with pytest.raises(ModelError, match=message):
            action_logprobs(model, BATCH)

    assert model.config._attn_implementation == attention
    assert model.forward == forward
    assert torch.equal(model(input_ids=ids).logits, before)
    assert model.training


@pytest.mark.parametrize("name", MODELS)
def test_the_models_own_forward_and_generate_stay(name):
    """Logits of a padded batch, and greedy answers, before and after `prepare`; Gemma 2's own attention is eager.

    Positions of GPT-2 are absolute: with padding, `generate` has to find `position_ids` among the arguments.
    """
    model = make(name, torch.float32)
    ids = torch.tensor([tokens(12, 8), [0, 0, 0, *tokens(9, 9)]])
    mask = (torch.arange(12) >= torch.tensor([[0], [3]])).long()

    def own():
        logits = model(input_ids=ids, attention_mask=mask).logits
        made = model.generate(
            ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return logits, made

    before = own()
    prepare(model)
    after = own()

    assert before[1].shape == (2, 20)
    assert torch.equal(after[1], before[1])
    assert_close(after[0][mask.bool()], before[0][mask.bool()], atol=1e-5, rtol=0)


def test_what_is_saved_knows_nothing_of_us(tmp_path):
    """config.json names no implementation, and what is loaded again computes the same, plain and packed."""
    model = make(dtype=torch.float32)
    expected = action_logprobs(model, BATCH)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)

    assert "perturn" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    assert loaded.config._attn_implementation == "sdpa"
    assert_close(plain(loaded), expected, atol=1e-4, rtol=0)
    assert torch.equal(action_logprobs(loaded, BATCH), expected)


def test_a_copy_of_a_prepared_model_is_a_model_of_its_own():
    """Its forward reads its own weights."""
    model = make()
    expected = action_logprobs(model, BATCH)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()

    assert torch.equal(action_logprobs(other, BATCH), expected)
    assert not torch.allclose(action_logprobs(model, BATCH), expected)
