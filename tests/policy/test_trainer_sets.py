"""Rows to evaluate on: several sets by name, rows that come after the trainer was made, and the values of each row."""

import gc

import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import LoraConfig

from perturn.errors import ConfigError, DataError
from perturn.losses import LOSSES

from .training import COUPLED, PAIRS, as_implicit, history, loss_by_pair, scaled

SEEN, UNSEEN = PAIRS[:2], PAIRS[2:5]
BY_REFERENCE = {"name": "tlm-dre", "pivot": 0.3}
"""Reads the reference in the loss and in the weights."""


def numbers(metrics, prefix):
    """The metrics under a prefix that a second evaluation repeats."""
    timing = ("runtime", "second", "preparation", "epoch")
    return {
        name.removeprefix(f"{prefix}_"): value
        for name, value in metrics.items()
        if name.startswith(f"{prefix}_") and not any(word in name for word in timing)
    }


@pytest.fixture
def lora():
    return LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.mark.parametrize("kind", [dict, DatasetDict])
def test_each_set_is_evaluated_as_by_itself(train, tiny_model, kind):
    """Metrics of each begin with its name, as transformers' Trainer writes them."""
    alike = {"loss": COUPLED, "ref_model": scaled(tiny_model)}
    sets = {"seen": SEEN, "unseen": UNSEEN}
    if kind is DatasetDict:
        sets = DatasetDict(
            {key: Dataset.from_list(list(map(as_implicit, rows))) for key, rows in sets.items()}
        )
    found = train(PAIRS[:2], eval_dataset=sets, **alike).evaluate()

    for name, rows in sets.items():
        alone = train(PAIRS[:2], eval_dataset=rows, **alike).evaluate()
        assert numbers(found, f"eval_{name}") == pytest.approx(numbers(alone, "eval"), rel=1e-5)
    assert found["eval_seen_loss"] != pytest.approx(found["eval_unseen_loss"], rel=1e-3)


def test_sets_are_evaluated_while_training_and_one_chooses_the_best(train):
    """At the start, at each step, and the best by one of the sets; training changes what is said of both."""
    trainer = train(
        eval_dataset={"seen": SEEN, "unseen": UNSEEN},
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
        eval_on_start=True,
        load_best_model_at_end=True,
        metric_for_best_model="eval_unseen_loss",
        greater_is_better=False,
    )
    trainer.train()
    losses = history(trainer, "eval_unseen_loss")

    assert len(losses) == len(history(trainer, "eval_seen_loss")) == 4
    assert trainer.state.best_metric == min(losses[1:])
    assert trainer.evaluate("unseen")["eval_loss"] == pytest.approx(min(losses[1:]), rel=1e-5)


@pytest.mark.parametrize("loss", ["sft", "dpo", COUPLED, BY_REFERENCE], ids=str)
@pytest.mark.parametrize("adapters", [False, True])
def test_rows_that_come_later_say_what_those_of_the_beginning_say(train, tiny_model, lora, loss, adapters):
    """Before and after training, with the reference that the training has: the model beneath the adapters, or given."""
    settings = {"loss": loss, "learning_rate": 0.01}
    settings |= {"peft_config": lora} if adapters else {"ref_model": scaled(tiny_model)}
    trainer = train(PAIRS[:3], eval_dataset=UNSEEN, **settings)
    rows = [as_implicit(pair) for pair in UNSEEN]
    before = trainer.evaluate()
    assert numbers(trainer.evaluate(rows), "eval") == pytest.approx(
        numbers(before, "eval"), rel=1e-5, abs=1e-6
    )
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] != pytest.approx(before["eval_loss"], rel=1e-4)

    assert numbers(trainer.evaluate(rows), "eval") == pytest.approx(
        numbers(after, "eval"), rel=1e-5, abs=1e-6
    )
    by_name = trainer.evaluate({"a": rows, "b": SEEN}, metric_key_prefix="test")
    assert numbers(by_name, "test_a") == pytest.approx(numbers(after, "eval"), rel=1e-5, abs=1e-6)
    assert numbers(trainer.predict(rows).metrics, "test") == pytest.approx(
        numbers(after, "eval"), rel=1e-5, abs=1e-6
    )


def test_a_moved_policy_is_not_its_own_reference(train, tiny_folder):
    """Its rewards would be 0. A model that was given by its folder is read again; one that was given whole is gone."""
    by_folder, whole = train(model=str(tiny_folder), learning_rate=0.01), train(learning_rate=0.01)
    assert whole.evaluate(SEEN)["eval_rewards/margins"] == 0
    for trainer in (by_folder, whole):
        trainer.train()

    assert by_folder.evaluate(SEEN)["eval_rewards/margins"] != 0
    with pytest.raises(
        ConfigError, match=r"Pass the rows as eval_dataset to the trainer, or give .* a ref_model"
    ):
        whole.evaluate(SEEN)


def test_a_reference_that_has_changed_is_refused(train, tiny_model):
    """The trainer's own rows hold what it said before."""
    reference = scaled(tiny_model)
    trainer = train(ref_model=reference, eval_dataset=SEEN)
    with torch.no_grad():
        reference.lm_head.weight.mul_(2)

    with pytest.raises(ConfigError, match="Pass the rows as eval_dataset"):
        trainer.evaluate(UNSEEN)


def test_a_reference_model_that_is_gone_is_asked_for_again(train, tiny_model):
    """The trainer does not keep it, which would keep its memory."""
    trainer = train(ref_model=scaled(tiny_model))
    gc.collect()

    with pytest.raises(ConfigError, match="give the trainer a ref_model and keep it"):
        trainer.evaluate(UNSEEN)


def test_a_prediction_has_the_values_of_each_row_in_their_order(train, renderer, tiny_model):
    """Packs order rows by their text; batches of two, and each row in a pack of its own or not."""
    reference, rows = scaled(tiny_model), PAIRS[::-1][:5]
    expected = loss_by_pair(tiny_model, reference, renderer, rows, LOSSES["dpo"]())
    for budget in (1, 4096):
        trainer = train(PAIRS, ref_model=reference, per_device_eval_batch_size=2, token_budget=budget)
        predicted = trainer.predict(rows)

        assert predicted.predictions["loss"] == pytest.approx(expected.numpy(), rel=1e-4)
        assert set(predicted.predictions) >= {"logps/chosen", "logps/rejected", "rewards/chosen"}
        for name, values in predicted.predictions.items():
            assert values.shape == (5,)
            assert predicted.metrics[f"test_{name}"] == pytest.approx(values.mean(), rel=1e-4, abs=1e-6)


def test_own_metrics_read_the_values_of_the_rows(train):
    """Called once for each set, and not at all where only metrics are wanted of a trainer without such a function."""
    calls = []

    def worst(found):
        calls.append(found.label_ids)
        return {"worst": found.predictions["loss"].max()}

    trainer = train(
        eval_dataset={"seen": SEEN, "unseen": UNSEEN}, trainer={"compute_metrics": worst}, loss="sft"
    )
    metrics = trainer.evaluate()

    assert calls == [None, None]
    assert type(metrics["eval_seen_worst"]) is float  # a checkpoint cannot store numpy's numbers
    assert metrics["eval_seen_worst"] == pytest.approx(trainer.predict("seen").predictions["loss"].max())
    assert metrics["eval_seen_worst"] > metrics["eval_seen_loss"]


def test_workers_that_persist_do_not_mix_rows(train):
    """Transformers keeps one loader for all rows that come without a name."""
    trainer = train(
        loss="sft", dataloader_num_workers=1, dataloader_persistent_workers=True, eval_dataset=SEEN
    )

    assert trainer.evaluate(UNSEEN)["eval_loss"] != pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-3)
    assert trainer.evaluate(SEEN)["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)


REFUSED = [
    (lambda train: train(eval_dataset={}), "the eval dataset is a dict without a set"),
    (lambda train: train(eval_dataset={"seen": []}), "the eval 'seen' dataset is empty"),
    (lambda train: train(eval_dataset={1: SEEN}), "must be named by texts, got 1"),
    (
        lambda train: train(eval_dataset={"seen": [PAIRS[0].chosen]}),
        "eval 'seen' row 0: the loss compares two",
    ),
    (lambda train: train(eval_dataset={"seen": SEEN}).evaluate("sen"), "named 'sen'. Did you mean 'seen'?"),
    (lambda train: train(eval_dataset=SEEN).evaluate("seen"), "no set of eval_dataset is named 'seen'"),
    (lambda train: train(eval_dataset=SEEN).evaluate({}), "a dict without a set"),
    (lambda train: train(eval_dataset=SEEN).evaluate([]), "the eval dataset is empty"),
    (lambda train: train().evaluate(), "there are no rows to evaluate on"),
    (lambda train: train().predict({"a": SEEN}), "predict takes one set of rows"),
    (lambda train: train().predict([{"text": "a"}]), "test row 0"),
    (lambda train: train().predict(None), "predict takes one set of rows, got none"),
    (lambda train: train({"train": SEEN}), "the train dataset is a dict, got the keys ['train']"),
]


@pytest.mark.parametrize(("act", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_is_no_set_of_rows_is_said(train, act, text):
    with pytest.raises(DataError) as caught:
        act(train)

    assert text in str(caught.value)


def test_a_best_metric_that_no_set_has_is_refused_before_training(train):
    """Transformers' own default is `loss`, which no set has."""
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    with pytest.raises(ConfigError, match="of one set of eval_dataset, such as 'eval_seen_loss', got 'loss'"):
        train(eval_dataset={"seen": SEEN, "unseen": UNSEEN}, load_best_model_at_end=True, **often)


@pytest.mark.parametrize(
    ("settings", "trainer"),
    [
        ({}, {"preprocess_logits_for_metrics": max}),
        ({"batch_eval_metrics": True}, {"compute_metrics": len}),
        ({"include_for_metrics": ["inputs"]}, {"compute_metrics": len}),
        ({"prediction_loss_only": True}, {"compute_metrics": len}),
    ],
    ids=str,
)
def test_metrics_that_cannot_be_kept_are_refused(train, settings, trainer):
    with pytest.raises(ConfigError, match="must be"):
        train(eval_dataset=SEEN, trainer=trainer, **settings)
