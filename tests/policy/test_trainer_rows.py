"""What the trainer takes: rows, models, adapters, references."""

import copy
import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch.testing import assert_close
from transformers import MistralConfig, MistralForCausalLM

from perturn import TurnTrainer
from perturn.data.store import write_pairs
from perturn.errors import ConfigError, DataError
from perturn.policy.logprobs import action_logprobs
from perturn.policy.models import add_adapters, load_model
from perturn.policy.packing import lay_out
from perturn.types import Status

from .training import PAIRS, as_implicit, history, scaled, trajectory


def test_sft_trains_on_trajectories(train):
    """One side, no reference: the loss falls and the cache stays empty."""
    rows = [pair.chosen for pair in PAIRS]
    trainer = train(rows, loss="sft", num_train_epochs=3)
    trainer.train()

    assert history(trainer)[-1] < history(trainer)[0]
    assert not Path(trainer.turn_args.reference_cache).exists()
    assert "rewards/chosen" not in trainer.state.log_history[0]


def test_sft_takes_the_chosen_side_of_a_pair(train):
    """Pairs and their chosen sides give one curve, and the rejected sides are not computed."""
    curves = []
    for rows in (PAIRS, [pair.chosen for pair in PAIRS]):
        trainer = train(rows, loss="sft")
        trainer.train()
        curves.append(history(trainer))
        assert all(trainer.train_dataset[i].rejected is None for i in range(len(PAIRS)))

    assert curves[0] == curves[1]


def as_explicit(pair):
    """A TRL row: what comes before the first action is the prompt."""
    messages = [pair.chosen.messages, pair.rejected.messages]
    return {"prompt": messages[0][:2], "chosen": messages[0][2:], "rejected": messages[1][2:]}


@pytest.mark.parametrize("loss", ["dpo", "tlm-dre"])
@pytest.mark.parametrize("form", [as_explicit, as_implicit])
def test_trl_rows_train_as_the_pairs_they_are(train, loss, form):
    """Lists of rows and a `datasets.Dataset` of them give the curve of the Perturn pairs."""
    rows = [form(pair) for pair in PAIRS]
    curves = []
    for data in (PAIRS, rows, Dataset.from_list(rows)):
        trainer = train(data, loss=loss)
        trainer.train()
        curves.append(history(trainer))

    assert curves[0] == curves[1] == curves[2]


TOOLS_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% for call in m['tool_calls'] or [] %}{{ '<tool_call>' + (call['function'] | tojson) }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_trl_rows_with_tools_train_on_the_calls_alone(train, tokenizer):
    """Schemas and tool results are read, not learned; calls are learned."""
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "door"}}}
    row = {
        "prompt": [{"role": "user", "content": "what is there?"}],
        "chosen": [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "a red door"},
            {"role": "assistant", "content": "A door."},
        ],
        "rejected": [{"role": "assistant", "content": "Nothing."}],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}],
    }
    trainer = train([row], loss="tlm-dre", chat_template=TOOLS_TEMPLATE)
    side = trainer.train_dataset[0].chosen
    learned = tokenizer.decode([i for i, t in zip(side.ids, side.turn, strict=True) if t >= 0])
    trainer.train()

    assert learned.startswith("<tool_call>")
    assert learned.endswith("<|im_end|>A door.<|im_end|>")
    assert "red" not in learned
    assert '"parameters"' in tokenizer.decode(side.ids)
    assert torch.isfinite(torch.tensor(history(trainer))).all()


@pytest.mark.parametrize("modules", ["lm_head", ["q_proj", "lm_head"], ".*(lm_head|q_proj)"], ids=str)
def test_an_adapter_of_the_output_layer_is_refused_when_adapters_are_added(tiny_model, modules):
    """Which is what a dry run does, upon a model without weights; training would refuse it hours later."""
    model = copy.deepcopy(tiny_model).to("meta")
    with pytest.raises(ConfigError, match="the output layer gets an adapter"):
        add_adapters(model, LoraConfig(r=2, target_modules=modules), seed=0)


def test_adapters_alone_are_trained(train):
    """Every weight that needs a gradient is LoRA's, the base is as it was, and rewards begin at 0."""
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = train(loss="dpo", peft_config=config)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}

    assert moved
    assert all("lora_" in name for name in moved)
    assert all("lora_" in n for n, p in trainer.model.named_parameters() if p.requires_grad)
    assert history(trainer, "rewards/chosen")[0] == pytest.approx(0, abs=1e-5)
    assert history(trainer, "rewards/margins")[-1] != 0


def test_the_reference_of_adapters_is_the_base(train, renderer, tiny_model):
    """Adapters that do not begin at zero: the policy starts elsewhere, the reference is the model as given."""
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    trainer = train(peft_config=config)
    side = trainer.train_dataset[0].chosen
    with torch.no_grad():
        base = action_logprobs(tiny_model, lay_out([side]))
        started = action_logprobs(trainer.model, lay_out([side]))

    assert_close(trainer.train_dataset[0].reference[0], base, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(started, base, atol=1e-3)


def test_a_model_is_given_by_its_folder(train, tiny_folder):
    """Also without a tokenizer, which is then the folder's own."""
    trainer = train(model=str(tiny_folder))
    trainer.train()
    args = trainer.turn_args
    bare = TurnTrainer(Path(tiny_folder), args=args, train_dataset=PAIRS[:1], ref_model=Path(tiny_folder))
    by_object = TurnTrainer(load_model(str(tiny_folder)), args=args, train_dataset=PAIRS[:1])

    assert len(history(trainer)) == 3
    assert bare.train_dataset[0].chosen == trainer.train_dataset[0].chosen
    assert by_object.train_dataset[0].chosen == bare.train_dataset[0].chosen


def test_the_reference_model_is_not_kept(train, tiny_model):
    """Once its log-probabilities are known, nothing refers to it."""
    reference = scaled(tiny_model)
    alive = weakref.ref(reference)
    trainer = train(ref_model=reference)
    del reference
    gc.collect()

    assert alive() is None
    assert len(trainer.train_dataset[0].reference) == 2


def test_a_reference_model_is_the_reference(train, tiny_model, renderer):
    """Its log-probabilities, not the policy's, and rewards that do not begin at 0."""
    reference = scaled(tiny_model)
    trainer = train(ref_model=reference)
    with torch.no_grad():
        expected = action_logprobs(reference, lay_out([renderer.encode(PAIRS[0].chosen)]))
    trainer.train()

    assert_close(trainer.train_dataset[0].reference[0], expected, atol=1e-5, rtol=1e-5)
    assert abs(history(trainer, "rewards/chosen")[0]) > 1e-4


def test_a_second_trainer_reads_the_reference_back(train, monkeypatch):
    """The same weights and rows: until training, one pass that tells which reference it is, over 256 fixed tokens."""
    first, asked = train(), []

    def ask(model, batch):
        asked.append(len(batch["prediction"]))
        return action_logprobs(model, batch)

    monkeypatch.setattr("perturn.policy.reference.action_logprobs", ask)
    second = train()

    assert asked == [255]
    assert torch.equal(first.train_dataset[3].reference[1], second.train_dataset[3].reference[1])


def test_mixed_precision_starts_at_ratio_one(train):
    """The reference runs under the same autocast as training, so the log-ratio is 0 to the last bit."""
    trainer = train(loss="tlm-dre", bf16=True)
    trainer.train()

    assert history(trainer, "log_ratio/chosen")[0] == pytest.approx(0, abs=1e-6)
    assert all(torch.isfinite(torch.tensor(history(trainer))))


def test_mixed_precision_has_a_reference_of_its_own(train):
    """float32's is not read back for bfloat16."""
    exact, rounded = train(), train(bf16=True)

    assert not torch.equal(exact.train_dataset[0].reference[0], rounded.train_dataset[0].reference[0])


def test_mixed_precision_takes_a_reference_model(train, tiny_model):
    """A model of its own is checked in the precision of its weights, as the policy is, and then rounded."""
    trainer = train(bf16=True, ref_model=scaled(tiny_model))
    trainer.train()

    assert all(torch.isfinite(torch.tensor(history(trainer))))


def test_dropout_is_disabled(train, tiny_model):
    """Attention dropout of a Llama is a number in its layers, not a module: that is 0 too."""
    tiny_model.config.attention_dropout = 0.5
    model = type(tiny_model)(tiny_model.config)
    model.add_module("extra", torch.nn.Dropout(0.5))
    trainer = train(model=model)
    trainer.train()

    assert trainer.model.extra.p == 0
    assert history(trainer, "rewards/chosen")[0] == pytest.approx(0, abs=1e-5)


def refusing(number):
    """Twenty rows, one of which has no text where the template wants one, and one a mark that is none."""
    rows = [{"messages": [USER | {"content": f"room {n}"}, SAID]} for n in range(20)]
    rows[number] = {"messages": [USER, SAID, {"role": "tool", "content": "a"}, SAID]}
    rows[3] = {"messages": [USER, SAID | {"weight": 0.5}]}
    return rows


USER, SAID = {"role": "user", "content": "u"}, {"role": "assistant", "content": "go"}
STRICT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("which", ["train", "eval"])
def test_a_row_that_the_template_refuses_is_named_with_other_bad_rows(train, which):
    """In the training data and in the evaluation data, in one message."""
    good = [{"messages": [USER, SAID]}]
    rows, held = (refusing(17), None) if which == "train" else (good, refusing(17))

    with pytest.raises(DataError) as caught:
        train(rows, loss="sft", chat_template=STRICT, eval_dataset=held)

    assert f"{which} row 3: row: messages[1].weight: expected 0 or 1" in str(caught.value)
    assert f"{which} row 17: the chat template cannot render this conversation: no tools here" in str(
        caught.value
    )


def test_a_row_too_long_has_its_number_in_the_dataset(train):
    """Rows of FAILED episodes, which are left out, are counted too."""
    failed = replace(PAIRS[0].chosen, status=Status.FAILED, error="a crash")
    long = trajectory(*["north"] * 400)

    with pytest.raises(DataError, match=r"tokens \(train row 3\)"):
        train([failed, PAIRS[1].chosen, failed, long], loss="sft")


def test_what_nothing_reads_is_said_aloud(train, caplog):
    """Once, with the number of rows."""
    rows = [{"messages": [USER, SAID | {"mood": "glad"}], "plan": [1]} for _ in range(3)]
    train(rows, loss="sft")

    said = [record.message for record in caplog.records if "nothing reads" in record.message]
    assert said == ["train: keys that nothing reads: column plan (3 rows), mood (3 rows)"]


def test_rows_come_from_a_source(train, tmp_path):
    """A file of Parquet, and one of Perturn's own pairs, give the curve of the pairs; bad rows are named by line."""
    Dataset.from_list([as_implicit(pair) for pair in PAIRS]).to_parquet(tmp_path / "rows")
    same = [replace(one, rejected=replace(one.rejected, task=one.chosen.task)) for one in PAIRS]
    write_pairs(tmp_path / "own", same)
    (tmp_path / "bad").write_text(f"\n{json.dumps(as_implicit(PAIRS[0]))}\n7\n")
    curves = []
    for data in (PAIRS, str(tmp_path / "rows"), tmp_path / "own"):
        trainer = train(data, loss="dpo")
        trainer.train()
        curves.append(history(trainer))

    assert curves[0] == curves[1] == curves[2]
    with pytest.raises(DataError, match=r"train \(.*bad\) line 3: row: expected a JSON object"):
        train(tmp_path / "bad", loss="dpo")


def test_labelled_rows_of_a_file_are_for_kto_alone(train, tmp_path):
    rows = [{"prompt": f"q {n}", "completion": "a", "label": n % 2 == 0} for n in range(4)]
    (tmp_path / "rows").write_text("\n".join(map(json.dumps, rows)))

    trainer = train(tmp_path / "rows", loss="kto")

    assert [example.weight[0].tolist() for example in trainer.train_dataset.rows] == [[1.0], [-1.0]] * 2
    with pytest.raises(DataError, match="label: unpaired preferences are read by the loss kto alone"):
        train(tmp_path / "rows", loss="sft")


def test_a_row_longer_than_a_sliding_window_is_refused_before_training(train):
    """The context would have room for it, but packed layers would see past the window of 64."""
    kind = MistralConfig(
        vocab_size=2048, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, sliding_window=64, max_position_embeddings=2048,
    )  # fmt: skip

    with pytest.raises(
        DataError, match=r"tokens \(train row 1\), but .* exact only up to 64; set max_length to 64"
    ):
        train([PAIRS[0].chosen, trajectory(*["north"] * 40)], model=MistralForCausalLM(kind), loss="sft")
