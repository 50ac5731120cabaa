"""The reference that training reads, through the trainer and its cache: what was changed is never read back."""

import copy
import math
from functools import partial

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM

from perturn.errors import DataError
from perturn.policy.logprobs import action_logprobs, prepare
from perturn.policy.packing import lay_out
from perturn.policy.reference import reference_identity
from perturn.types import Action, PreferencePair, Task, Trajectory, Turn
from support.models import VOCABULARY


def trajectory(*said):
    turns = [Turn(({"role": "user", "content": f"room {i}"},), Action(text)) for i, text in enumerate(said)]
    return Trajectory(Task("t/0"), tuple(turns))


PAIR = PreferencePair(trajectory("go north", "take the lamp"), trajectory("go up"))


@pytest.fixture
def train(make_trainer):
    """Make a trainer of one pair."""
    return lambda ref_model=None, model=None, rows=(PAIR,), **settings: make_trainer(
        rows, model, ref_model=ref_model, **{"max_steps": 1, **settings}
    )


def adapted(model):
    """Two adapters that move its answers, the first of them active."""
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(0)
    model = get_peft_model(copy.deepcopy(model), config, "one")
    model.add_adapter("two", config)
    return model.eval()


def rotary(model):
    return model.get_decoder().rotary_emb


def other_alpha(model):
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["one"] *= 3


def other_eps(model):
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon *= 100


def slower(model):
    rotary(model).inv_freq.mul_(0.5)


def sharper(model):
    rotary(model).attention_scaling = 1.3


def hooked(model):
    model.get_decoder().layers[0].register_forward_hook(lambda layer, ids, output: output * 1.1)


def other_weights(model):
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.1)


CHANGES = {
    "lora_alpha": other_alpha,
    "another active adapter": lambda model: model.set_adapter("two"),
    "adapters disabled": lambda model: model.base_model.disable_adapter_layers(),
    "eps": other_eps,
    "inv_freq": slower,
    "attention scaling": sharper,
    "hook": hooked,
    "weights": other_weights,
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_a_reference_that_was_changed_is_computed_again(train, tiny_model, renderer, name):
    """The second trainer has what the changed reference says, not what the first one left in the cache."""
    reference = adapted(tiny_model)
    prepare(reference)  # as the first trainer does: nothing but the change differs
    before = train(reference).train_dataset[0].reference[0]
    CHANGES[name](reference)
    found = train(reference).train_dataset[0].reference[0]
    with torch.no_grad():
        expected = action_logprobs(reference, lay_out([renderer.encode(PAIR.chosen)]))

    assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not torch.equal(found, before)


@pytest.mark.parametrize("library", [torch, transformers], ids=["torch", "transformers"])
def test_another_version_computes_its_own_reference(train, tmp_path, monkeypatch, library):
    """Kernels change between versions: two files."""
    train()
    monkeypatch.setattr(library, "__version__", "99.0")
    train()

    assert len(list((tmp_path / "reference").iterdir())) == 2


def test_equal_references_have_one_identity(tiny_model, tmp_path):
    """A copy, one that trains, one that was prepared, and one that was saved and loaded: the cache serves all."""
    expected = reference_identity(copy.deepcopy(tiny_model))
    tiny_model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)

    assert reference_identity(tiny_model) == expected
    assert reference_identity(tiny_model) == expected
    assert reference_identity(loaded.train()) == expected
    assert loaded.training


def test_the_identity_knows_the_precision(tiny_model):
    """Three precisions, three references."""
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)

    found = [reference_identity(tiny_model), reference_identity(tiny_model, autocast)]
    found.append(reference_identity(tiny_model.bfloat16()))

    assert len(set(found)) == 3


def test_a_setting_that_the_probe_cannot_see_is_part_of_the_identity(tiny_model):
    """An eps that differs by one part in a million moves nothing in bfloat16, and other tokens perhaps."""
    tiny_model.bfloat16()
    before = reference_identity(tiny_model)
    tiny_model.model.norm.variance_epsilon *= 1.000001

    assert reference_identity(tiny_model) != before


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_reference_model_is_taken_in_mixed_precision(train, tiny_model, precision):
    """The policy is its own reference: the log-ratio is 0 and the loss ln 2. fp16 training itself needs a GPU."""
    reference = copy.deepcopy(tiny_model)
    if precision == "fp16":
        trainer = train(reference, fp16=True)
        assert trainer.train_dataset[0].reference[0].isfinite().all()
        return
    trainer = train(reference, bf16=True)
    trainer.train()

    assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert trainer.state.log_history[0]["rewards/chosen"] == pytest.approx(0, abs=1e-6)


def test_a_model_whose_positions_depend_on_the_length_starts_at_its_reference(train, tokenizer):
    """Phi-3-128k's kind, whose positions change beyond 96 tokens: longer pairs are refused, cut ones start at ln 2."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 4.0, 8.0, 16.0],
    }
    config = Phi3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2048,
        original_max_position_embeddings=96,
        rope_parameters=rope,
        initializer_range=0.2,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    model = Phi3ForCausalLM(config).eval()
    long = trajectory("go north", *["take the lamp, the key and the box"] * 20)
    rows = [PreferencePair(long, PAIR.rejected), PAIR]

    with pytest.raises(DataError, match="exact only up to 96; set max_length to 96 or less"):
        train(model=model, rows=rows)
    trainer = train(model=model, rows=rows, max_length=96)
    trainer.train()

    assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
