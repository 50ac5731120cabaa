"""Evaluation by the trainer, what it refuses, saves and counts, and its peer."""

import copy
import logging

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from perturn import TurnConfig
from perturn.chat.model_names import load_tokenizer
from perturn.chat.tokens import Renderer
from perturn.errors import ConfigError, DataError
from perturn.losses import LOSSES
from perturn.policy.logprobs import action_logprobs
from perturn.policy.models import load_model
from perturn.policy.packing import lay_out
from perturn.types import PreferencePair, Task, Trajectory

from .training import (
    COUPLED,
    DENSITY_METRICS,
    PAIRS,
    TRL_METRICS,
    WORDS,
    as_implicit,
    descend,
    history,
    loss_by_pair,
    scaled,
    trajectory,
)


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
    """Six pairs in steps of four and two: one pass per step or per pair gives the same log entry."""
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
    ({"credit": {"name": "discount", "gamma": 2}}, ConfigError, "credit.gamma must be <= 1"),
    ({"credit": {"gamma": 1}}, ConfigError, "credit must name a credit"),
    (
        {"loss": {"name": "tlm-dre", "pivot": 0.5}, "credit": "discount"},
        ConfigError,
        "loss.pivot belongs to the loss's own credit",
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
    ({"rows": [trajectory("up " * 3000)], "loss": "sft"}, DataError, "exact only up to 2048"),
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
        assert_close(load_model(str(folder))(ids).logits, trained)


def test_truncation_is_counted_and_logged(train, renderer, caplog):
    """Room for two turns of three: one turn dropped from each of two sides."""
    pair = PreferencePair(trajectory("up", "up", "up"), trajectory("on", "up", "up"))
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


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"kto", "ppo-clip"}))
def test_every_loss_on_pairs_in_the_table_trains(train, name):
    """A finite loss and a policy that moved; nobody has measured progress here."""
    credit = {"name": "process-score", "by": "valid"} if name == "w-dpo" else None
    trainer = train(PAIRS[:2], loss=name, credit=credit)
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
