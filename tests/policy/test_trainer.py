import copy
import gc
import logging
import weakref
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from perturn import TurnConfig, TurnTrainer
from perturn.errors import ConfigError, DataError, ModelError
from perturn.losses import LOSSES, TurnLogprobs
from perturn.policy.logprobs import action_logprobs, logprobs_and_entropy
from perturn.policy.models import add_adapters, load_model
from perturn.policy.names import load_tokenizer
from perturn.policy.packing import lay_out
from perturn.policy.reference import turn_logprobs
from perturn.policy.tokens import Renderer
from perturn.types import Action, PreferencePair, Task, Trajectory, Turn

TRL_METRICS = [
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
]
WEIGHTS = ["weight/chosen", "weight/rejected"]
DENSITY_METRICS = [
    "log_ratio/chosen",
    "log_ratio/rejected",
    "clamped",
    "coefficient",
    "gradient_weight/chosen",
    "gradient_weight/rejected",
    "effective_batch_size",
]
WORDS = ["north", "south", "east", "west", "up", "down", "lamp", "door", "key", "box"]


def trajectory(*said, task="t/0"):
    turns = [Turn(({"role": "user", "content": f"room {i}"},), Action(text)) for i, text in enumerate(said)]
    return Trajectory(Task(task), tuple(turns), prompt=({"role": "system", "content": "Play."},))


def make_pairs(n=6):
    """Pairs of different length: 1 to 3 turns, actions of 1 to 4 words."""
    return [
        PreferencePair(
            trajectory(*[" ".join(WORDS[i : i + 1 + (i + k) % 4]) for k in range(1 + i % 3)], task=f"t/{i}"),
            trajectory(*[" ".join(WORDS[i + 1 : i + 2 + k % 3]) for k in range(1 + (i + 1) % 3)]),
        )
        for i in range(n)
    ]


PAIRS = make_pairs()


@pytest.fixture
def train(make_trainer):
    """Make a trainer of the pairs, two at a time; as `make_trainer`."""
    usual = {"learning_rate": 1e-3, "per_device_train_batch_size": 2, "num_train_epochs": 1}
    return lambda rows=PAIRS, model=None, **settings: make_trainer(rows, model, **{**usual, **settings})


def history(trainer, name="loss"):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def scaled(model, by=1.05):
    """A policy that differs from the model."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(by)
    return model


def loss_by_pair(policy, reference, renderer, pairs, loss):
    """Each pair's loss computed on its own."""

    def side(row):
        batch = lay_out([renderer.encode(row)])
        with torch.no_grad():
            return TurnLogprobs(
                action_logprobs(policy, batch),
                action_logprobs(reference, batch),
                batch["turn"],
                batch["trajectory"],
            )

    return torch.cat([loss(side(pair.chosen), side(pair.rejected)) for pair in pairs])


def descend(train, loss, micro, steps, **settings):
    """Two epochs of gradient descent without a moment, in batches of `micro` rows, `steps` of them accumulated."""
    trainer = train(
        loss=loss,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=steps,
        num_train_epochs=2,
        optim="sgd",
        learning_rate=0.1,
        **settings,
    )
    trainer.train()
    return trainer


COUPLED = {"name": "tlm-dre", "coefficient": "self_normalized", "pivot": 0, "reduction": "turn_mean"}
"""A loss in which each pair's coefficient depends on the other pairs, and every coefficient is another."""


@pytest.mark.parametrize("loss", ["tlm-dre", COUPLED, "dpo", "sft"], ids=str)
def test_micro_batches_do_not_move_the_loss_curve(train, loss):
    """1x4, 2x2 and 4x1 over six rows: the last optimizer step has two pairs in each shape.

    One loss curve and one final policy to 1e-5 relative, for float32 adds the gradients in another order.
    SGD, since Adam turns a rounding error of a vanishing gradient into a whole step.
    """
    curves, finals = [], []
    for micro, steps in [(1, 4), (2, 2), (4, 1)]:
        trainer = descend(train, loss, micro, steps)
        curves.append(torch.tensor(history(trainer)))
        finals.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))

    assert len(curves[0]) == 4
    assert curves[0].std() > 0
    for curve, final in zip(curves[1:], finals[1:], strict=True):
        assert_close(curve, curves[0], rtol=1e-5, atol=1e-6)
        assert_close(final, finals[0], rtol=1e-4, atol=1e-6)


def count_passes(monkeypatch):
    """A list that grows by the number of pairs of each pass through the model."""
    passes = []

    def counting(model, batch):
        passes.append(int(batch["pairs"]))
        return logprobs_and_entropy(model, batch)

    monkeypatch.setattr("perturn.policy.trainer.logprobs_and_entropy", counting)
    return passes


@pytest.mark.parametrize(
    ("loss", "few"), [("tlm-dre", 150), (COUPLED, 150), ("dpo", 150), ("sft", 75)], ids=str
)
def test_the_token_budget_does_not_move_the_loss_curve(train, monkeypatch, loss, few):
    """Six pairs, four to a step: one pass a step, a few, one a pair, and one a pair by accumulation.

    One loss curve, gradient norm and final policy to 1e-5 relative, for float32 adds the gradients in another order.
    SGD, since Adam turns a rounding error of a vanishing gradient into a whole step.
    """
    passes = count_passes(monkeypatch)
    curves, norms, finals, counts = [], [], [], []
    for budget, micro, steps in [(4096, 4, 1), (few, 4, 1), (1, 4, 1), (1, 1, 4)]:
        passes.clear()
        trainer = descend(train, loss, micro, steps, token_budget=budget)
        counts.append(len(passes))
        assert sum(passes) == 12
        curves.append(torch.tensor(history(trainer)))
        norms.append(torch.tensor(history(trainer, "grad_norm")))
        finals.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))

    assert counts[0] == 4
    assert 4 < counts[1] < 12
    assert counts[2:] == [12, 12]
    assert curves[0].std() > 0
    for curve, norm, final in zip(curves[1:], norms[1:], finals[1:], strict=True):
        assert_close(curve, curves[0], rtol=1e-5, atol=1e-6)
        assert_close(norm, norms[0], rtol=1e-4, atol=1e-6)
        assert_close(final, finals[0], rtol=1e-4, atol=1e-6)


def test_the_token_budget_does_not_move_the_evaluation(train, tiny_model, monkeypatch):
    """Five pairs in one pass, and in five: the same loss and rewards, each pair counted once, and as `predict` says."""
    passes = count_passes(monkeypatch)
    found = []
    for budget in (4096, 1):
        trainer = train(
            PAIRS[:2],
            eval_dataset=PAIRS[1:],
            ref_model=scaled(tiny_model),
            token_budget=budget,
            per_device_eval_batch_size=5,
        )
        found.append([trainer.evaluate()["eval_loss"]])
        found[-1] += [trainer.state.log_history[-1][f"eval_{name}"] for name in TRL_METRICS]
        found[-1].append(trainer.predict(trainer.eval_dataset).metrics["test_loss"])

    assert passes == [5] * 2 + [1] * 10
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)
    assert found[0][-1] == pytest.approx(found[0][0], rel=1e-4)


def test_the_first_loss_is_the_mean_over_the_pairs(train, renderer, tiny_model):
    """Four pairs in one optimizer step: the logged loss is the mean of the pairs computed one at a time."""
    reference = scaled(tiny_model)
    trainer = train(PAIRS[:4], ref_model=reference, loss="tlm-dre", per_device_train_batch_size=4)
    expected = loss_by_pair(tiny_model, reference, renderer, PAIRS[:4], LOSSES["tlm-dre"]())
    trainer.train()

    assert expected.std() > 1e-3
    assert_close(torch.tensor(history(trainer)[0]), expected.mean(), rtol=1e-4, atol=1e-5)


def test_resuming_continues_the_same_curve(train, tmp_path):
    """Stopped after two of six steps and resumed in a new trainer: the same losses and the same policy."""
    settings = {"loss": "tlm-dre", "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2}
    whole = train(**settings, output_dir=str(tmp_path / "whole"))
    whole.train()
    resumed = train(**settings, output_dir=str(tmp_path / "resumed"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))

    assert len(history(whole)) == 6
    assert history(resumed) == pytest.approx(history(whole), rel=1e-6)
    assert history(resumed, "rewards/margins")[2:] == pytest.approx(
        history(whole, "rewards/margins")[2:], rel=1e-4, abs=1e-7
    )
    for mine, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert_close(mine, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("loss", ["dpo", "tlm-dre"])
def test_rewards_are_zero_before_the_first_update(train, loss):
    """The policy is its own reference, so every log-ratio is 0, in training mode too."""
    trainer = train(loss=loss)
    trainer.train()

    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
        assert history(trainer, name)[0] == pytest.approx(0, abs=1e-5)
        assert history(trainer, name)[-1] != pytest.approx(0, abs=1e-5)


def test_training_prefers_the_chosen_side(train):
    """A few epochs on six pairs: the margin grows and the loss falls."""
    trainer = train(num_train_epochs=4, lr_scheduler_type="constant")
    trainer.train()

    assert history(trainer)[-1] < history(trainer)[0]
    assert history(trainer, "rewards/margins")[-1] > 0.1
    assert history(trainer, "rewards/accuracies")[-1] == 1.0


def test_metrics_have_trls_names(train):
    """Every entry of the log has them, beside the loss and the gradient norm."""
    trainer = train(loss="dpo")
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]

    assert len(entries) == 3
    assert all(set(TRL_METRICS + WEIGHTS) <= set(entry) for entry in entries)
    assert not set(DENSITY_METRICS) & set(entries[0])


def test_density_ratio_losses_log_their_diagnostics(train):
    """So that a vanishing coefficient or a clamped ratio is seen."""
    trainer = train(loss="tlm-dre")
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]

    assert all(set(TRL_METRICS + WEIGHTS + DENSITY_METRICS) <= set(entry) for entry in entries)


SURE = {"name": "confidence", "pivot": 0.0}


@pytest.mark.parametrize(("loss", "credit"), [("dpo", SURE), ("tlm-dre", "discount"), ("sft", SURE)])
def test_a_credit_replaces_that_of_the_loss(train, loss, credit):
    """The weights of the rows are the credit's, the logged ones are theirs, and the loss is another than by itself."""
    own = train(loss=loss, num_train_epochs=1)
    other = train(loss=loss, credit=credit, num_train_epochs=1)
    rows = other.train_dataset.rows
    for trainer in (own, other):
        trainer.train()
    weights = [weight for row in rows for weight in row.weight[0].tolist()]

    assert all(
        torch.equal(row.weight[0], other.credit([row.trajectories[0]], reference=[turn_logprobs(row, 0)])[0])
        for row in rows
    )
    assert min(weights) < 1.0
    assert history(own)[-1] != pytest.approx(history(other)[-1], rel=1e-4)


def test_metrics_are_those_of_the_batch(train, renderer, tiny_model):
    """logps/chosen is the mean over the pairs of the summed log-probability."""
    trainer = train(PAIRS[:2])
    trainer.train()
    with torch.no_grad():
        sums = [action_logprobs(tiny_model, lay_out([renderer.encode(p.chosen)])).sum() for p in PAIRS[:2]]

    assert history(trainer, "logps/chosen")[0] == pytest.approx(float(sum(sums) / 2), rel=1e-5)


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


def as_implicit(pair):
    """A TRL row whose sides hold the whole conversation."""
    return {"chosen": pair.chosen.messages, "rejected": pair.rejected.messages}


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
    bare = TurnTrainer(str(tiny_folder), args=args, train_dataset=PAIRS[:1])
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


def test_evaluation_reports_the_mean_over_its_pairs(train, renderer, tiny_model):
    """Three pairs in batches of two: eval_loss is their mean, not the mean of the batches' means."""
    reference = scaled(tiny_model)
    trainer = train(
        PAIRS[:2],
        eval_dataset=PAIRS[2:5],
        ref_model=reference,
        loss="tlm-dre",
        per_device_eval_batch_size=2,
    )
    expected = loss_by_pair(tiny_model, reference, renderer, PAIRS[2:5], LOSSES["tlm-dre"]())

    assert expected.std() > 1e-3
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected.mean()), rel=1e-4)


def test_evaluation_metrics_do_not_depend_on_the_batch_size(train, tiny_model):
    """Three pairs one by one, as two and one, and together: every pair, and every turn, counts alike."""
    found = []
    for size in (1, 2, 3):
        trainer = train(
            PAIRS[:2],
            eval_dataset=PAIRS[2:5],
            ref_model=scaled(tiny_model),
            loss=COUPLED,
            per_device_eval_batch_size=size,
            token_budget=4096 if size < 3 else 1,
            dataloader_drop_last=size == 2,
        )
        trainer.evaluate()
        entry = trainer.state.log_history[-1]
        found.append([entry[f"eval_{name}"] for name in ["loss", *TRL_METRICS, *DENSITY_METRICS]])

    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-4, abs=1e-6)


def test_metrics_of_several_steps_do_not_depend_on_the_passes(train, tiny_model):
    """Six pairs in steps of four and two, logged once: one pass a step, or one a pair, and the same entry."""
    found = []
    for budget in (4096, 1):
        reference = scaled(tiny_model)
        trainer = descend(train, COUPLED, 4, 1, token_budget=budget, logging_steps=4, ref_model=reference)
        found.append([history(trainer, name)[0] for name in TRL_METRICS + DENSITY_METRICS])

    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-5)


def test_what_predict_saw_is_not_in_the_next_evaluation(train):
    """Each gives its own metrics, by its own prefix."""
    trainer = train(PAIRS[:2], eval_dataset=PAIRS[2:5], loss="sft")
    alone = trainer.evaluate()
    predicted = trainer.predict(trainer.train_dataset, metric_key_prefix="seen").metrics
    again = trainer.evaluate(metric_key_prefix="held_out")

    assert predicted["seen_logps/chosen"] != pytest.approx(alone["eval_logps/chosen"], rel=1e-3)
    assert again["held_out_logps/chosen"] == alone["eval_logps/chosen"]
    assert again["held_out_loss"] == alone["eval_loss"]


def test_evaluation_of_a_loss_that_differs_by_pair(train, renderer, tiny_model):
    """The same with SFT, whose loss is different for each row."""
    rows = [pair.chosen for pair in PAIRS[:3]]
    trainer = train(rows[:1], eval_dataset=rows, loss="sft", per_device_eval_batch_size=2)
    with torch.no_grad():
        each = [-action_logprobs(tiny_model, lay_out([renderer.encode(row)])).mean() for row in rows]

    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(sum(each) / 3), rel=1e-5)


def test_evaluating_while_training_keeps_the_metrics_apart(train):
    """eval_ entries stand beside train entries; neither holds the other's."""
    trainer = train(eval_dataset=PAIRS[:2], eval_strategy="steps", eval_steps=1)
    trainer.train()
    logs = trainer.state.log_history

    assert sum("eval_rewards/chosen" in entry for entry in logs) == 3
    assert sum("rewards/chosen" in entry for entry in logs) == 3
    assert not any("rewards/chosen" in entry and "eval_loss" in entry for entry in logs)


BAD = [
    ({"loss": "tlm-dra"}, ConfigError, "unknown loss.name 'tlm-dra'. Did you mean 'tlm-dre'?"),
    ({"loss": {"name": "dpo", "bata": 1}}, ConfigError, "unknown key 'loss.bata'. Did you mean 'loss.beta'?"),
    ({"loss": {"name": "dpo", "beta": -1}}, ConfigError, "loss.beta must be > 0, got -1"),
    ({"loss": {"beta": 1}}, ConfigError, "loss must name a loss"),
    ({"credit": "discoun"}, ConfigError, "unknown credit.name 'discoun'. Did you mean 'discount'?"),
    ({"credit": {"name": "discount", "gamma": 2}}, ConfigError, "credit.gamma must be between 0 and 1"),
    ({"credit": {"gamma": 1}}, ConfigError, "credit must name a credit"),
    (
        {"loss": {"name": "tlm-dre", "pivot": 0.5}, "credit": "discount"},
        ConfigError,
        "loss.pivot is a setting of the loss's own credit",
    ),
    (
        {"accelerator_config": {"dispatch_batches": True}},
        ConfigError,
        "accelerator_config.dispatch_batches must be off, got True",
    ),
    (
        {"train_sampling_strategy": "group_by_length"},
        ConfigError,
        "train_sampling_strategy must be random or sequential",
    ),
    ({"label_smoothing_factor": 0.1}, ConfigError, "label_smoothing_factor must be 0, got 0.1"),
    ({"token_budget": 0}, ConfigError, "token_budget must be >= 1, got 0"),
    ({"shared_prefix": "drop"}, ConfigError, "shared_prefix must be one of keep, mask, got 'drop'"),
    ({"rows": []}, DataError, "the train dataset is empty"),
    ({"eval_dataset": []}, DataError, "the eval dataset is empty"),
    ({"rows": [PAIRS[0], PAIRS[0].chosen]}, DataError, "train row 1: the loss compares two trajectories"),
    (
        {"rows": [PAIRS[0], PreferencePair(PAIRS[1].chosen, PAIRS[1].chosen)]},
        DataError,
        "train row 1: chosen equals rejected",
    ),
    ({"rows": [PAIRS[0], {"text": "a"}]}, DataError, "train row 1"),
    (
        {"rows": [as_implicit(PAIRS[0]), {"messages": [{"role": "user", "content": "a"}]}], "loss": "sft"},
        DataError,
        "train row 1",
    ),
    (
        {"rows": [Trajectory(Task("t/9"), ())], "loss": "sft"},
        DataError,
        "train row 0: trajectory of task 't/9' has no assistant turn",
    ),
    ({"max_length": 5}, DataError, "max_length is 5"),
    ({"rows": [trajectory("up " * 3000)], "loss": "sft"}, DataError, "the model's context is 2048"),
]


@pytest.mark.parametrize(("settings", "error", "text"), BAD, ids=[text[:40] for *_, text in BAD])
def test_what_is_wrong_is_said_in_one_line_before_training(train, settings, error, text):
    """Where, what was expected, what was got."""
    with pytest.raises(error) as caught:
        train(**settings)

    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_row_is_named_once(train):
    """The trainer says which dataset and row; what it calls does not repeat the number."""
    with pytest.raises(DataError) as caught:
        train([as_implicit(PAIRS[0]), {"messages": [{"role": "user", "content": "a"}]}], loss="sft")

    assert str(caught.value).count("row 1") == 1


def test_rows_that_are_refused_for_one_reason_are_one_sentence(train):
    """Every row is looked at: five equal pairs, two rows without an answer, and a good one between them."""
    equal = PreferencePair(PAIRS[1].chosen, PAIRS[1].chosen)
    silent = {"chosen": [], "rejected": []}
    with pytest.raises(DataError) as caught:
        train([equal, PAIRS[0], silent, *[equal] * 4, silent])

    message = str(caught.value)
    assert message.startswith("train row 0, 3, 4 and 2 more: chosen equals rejected for task")
    assert "train row 2, 7: " in message
    assert message.count("row ") == 2


def test_a_dataset_of_bad_rows_is_not_read_to_its_end(train):
    """Rows are tokenized as they are read, which takes its time."""
    rows = iter([{"text": "a"}] * 1004)
    with pytest.raises(DataError) as caught:
        train(rows)

    assert str(caught.value).startswith("train row 0, 1, 2 and 997 more: ")
    assert str(caught.value).endswith("No row after 1000 bad ones was looked at.")
    assert len(list(rows)) == 4


@pytest.mark.parametrize("adapters", [False, True])
def test_what_is_saved_is_loaded_by_others(train, tmp_path, tokenizer, tiny_model, adapters):
    """As with TRL: checkpoints while it trains, and by `save_model` the model or its adapters, with the tokenizer."""
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM") if adapters else None
    tiny_model.save_pretrained(tmp_path / "base")
    settings = {"save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path / "out")}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    trainer = train(model=model, peft_config=lora, learning_rate=0.05, loss="dpo", **settings)
    trainer.train()
    trainer.save_model()
    said = [{"role": "user", "content": "look"}]
    ids = torch.tensor([tokenizer.apply_chat_template(said, return_dict=False)])
    trained = trainer.model.eval()(ids).logits
    assert not torch.allclose(trained, tiny_model(ids).logits, atol=1e-3)

    for folder in (tmp_path / "out", *(tmp_path / "out").glob(f"checkpoint-{trainer.state.max_steps}")):
        loaded, saved = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(str(folder))
        assert_close(loaded(ids).logits, trained)
        assert saved.apply_chat_template(said, return_dict=False) == ids[0].tolist()
        assert Renderer(saved).template == trainer.renderer.template
        if adapters:
            with pytest.raises(ModelError, match=r"holds adapters without their model.*merge_and_unload"):
                load_model(str(folder))


def test_truncation_is_counted_and_logged(train, renderer, caplog):
    """Room for two turns of three: one turn dropped from each of two sides."""
    pair = PreferencePair(trajectory("up", "up", "up"), trajectory("down", "up", "up"))
    limit = len(renderer.encode(trajectory("up", "up")).ids)
    caplog.set_level(logging.WARNING)
    trainer = train([pair], max_length=limit)

    assert trainer.train_dataset[0].chosen.turns == 2
    assert f"dropped 2 turns from the end of 2 trajectories to keep max_length={limit}" in caplog.text


def test_a_masked_prefix_is_out_of_the_loss(train):
    """The reference is kept for the loss tokens that are left."""
    pair = PreferencePair(trajectory("up", "lamp"), trajectory("up", "door"))
    kept, masked = train([pair]), train([pair], shared_prefix="mask")

    assert [kept.train_dataset[0].chosen.turns, masked.train_dataset[0].chosen.turns] == [2, 1]
    assert len(masked.train_dataset[0].reference[0]) < len(kept.train_dataset[0].reference[0])
    masked.train()
    assert len(history(masked)) == 1


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"ppo-clip"}))
def test_every_loss_on_pairs_in_the_table_trains(train, name):
    """A finite loss and a policy that moved."""
    trainer = train(PAIRS[:2], loss=name)
    before = next(trainer.model.parameters()).detach().clone()
    trainer.train()

    assert torch.isfinite(torch.tensor(history(trainer))).all()
    assert not torch.equal(next(trainer.model.parameters()), before)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_gradient_checkpointing_changes_nothing(train):
    """It computes activations again, and they are the same."""
    curves = []
    for checkpointing in (False, True):
        trainer = train(gradient_checkpointing=checkpointing)
        trainer.train()
        curves.append(history(trainer))

    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


def test_the_config_survives_its_own_dictionary():
    """`to_dict` is what the Trainer stores and logs; a loss section stays a section."""
    args = TurnConfig(output_dir="unused", loss={"name": "dpo", "beta": 0.2}, report_to="none")

    assert args.to_dict()["loss"] == {"name": "dpo", "beta": 0.2}
    assert TurnConfig(output_dir="unused", loss="dpo", report_to="none").loss == {"name": "dpo"}
    assert TurnConfig(output_dir="unused", loss='{"name": "dpo"}', report_to="none").loss == {"name": "dpo"}


BARE_CHATML = (
    "{% for m in messages %}{{ '' if loop.first else '\n' }}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML without the last newline, which TRL would count among the completion's tokens."""


@pytest.mark.filterwarnings("ignore")
def test_agrees_with_trls_dpo_trainer(train, tokenizer, tiny_model, tmp_path):
    """On pairs of one turn the definitions coincide: the completion is the assistant's alone.

    Three SGD steps of two pairs without shuffling; the losses, rewards and log-probabilities are TRL's to 1e-4.
    """
    trl = pytest.importorskip("trl")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"room {i}"}],
            "chosen": [{"role": "assistant", "content": " ".join(WORDS[i : i + 2])}],
            "rejected": [{"role": "assistant", "content": " ".join(WORDS[i + 1 : i + 4])}],
        }
        for i in range(6)
    ]
    shared = {"optim": "sgd", "train_sampling_strategy": "sequential", "learning_rate": 0.05}
    ours = train(rows, loss="dpo", chat_template=BARE_CHATML, max_grad_norm=0.0, **shared)
    ours.train()
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = BARE_CHATML
    args = trl.DPOConfig(
        output_dir=str(tmp_path / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        per_device_train_batch_size=2,
        num_train_epochs=1,
        max_grad_norm=0.0,
        **shared,
    )
    theirs = trl.DPOTrainer(
        copy.deepcopy(tiny_model),
        copy.deepcopy(tiny_model),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=plain,
    )
    theirs.train()

    assert len(history(ours)) == 3
    for name in ["loss", *TRL_METRICS]:
        assert history(ours, name) == pytest.approx(history(theirs, name), rel=1e-4, abs=1e-4), name
    assert history(ours)[-1] != pytest.approx(history(ours)[0], abs=1e-3)
