"""Mistakes of a user's own loss or credit have messages that name it, and a trained model is whole."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig

from perturn.errors import ConfigError, RunError
from perturn.types import WeightedTrajectory

from .training import PAIRS, WORDS


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"loss": "guest_mistakes:Detached"}, ConfigError, "loss Detached has no gradient"),
        (
            {"loss": "guest_mistakes:Noted"},
            ConfigError,
            "rows of the diagnostics of loss Noted must be a tensor",
        ),
        ({"loss": "guest_mistakes:Undefined"}, RunError, "the loss is nan at step 1; no update came before"),
        (
            {"loss": "guest_mistakes:Undefined", "logging_steps": 50},
            RunError,
            "the mean loss is nan at step 3; lower the learning rate",
        ),
    ],
)
def test_a_mistake_of_a_loss_is_named(settings, error, says, train):
    trainer = train(**{"logging_steps": 1, **settings})

    with pytest.raises(error, match=says):
        trainer.train()


def test_a_mistake_of_a_credit_is_named(train):
    says = r"credit Broken cannot weigh one trajectory of task 't/0': KeyError: 'state' \(at .*guest_mistakes"
    with pytest.raises(ConfigError, match=says):
        train(loss="tlm-dre", credit="guest_mistakes:Broken")


def test_evaluation_draws_no_dropout_for_a_statistic(train):
    """Kto's z0 is computed before the rows, and evaluation may come between two steps."""
    adapters = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.5)
    asked = [
        replace(one.chosen, prompt=({"role": "user", "content": word},))
        for one, word in zip(PAIRS, WORDS, strict=False)
    ]
    rows = [WeightedTrajectory(one, ((-1.0) ** n,) * len(one.turns)) for n, one in enumerate(asked)]
    settings = {"eval_dataset": rows[:4], "peft_config": adapters, "learning_rate": 0.05}
    trainer = train(rows, loss="kto", disable_dropout=False, **settings)
    trainer.train()
    trainer.model.train()

    first = trainer.evaluate()["eval_loss"]

    assert trainer.evaluate()["eval_loss"] == first


def test_a_trained_model_is_whole_again(train):
    """In training, the last layer computes the predicting tokens alone; a caller of the decoder wants all."""
    trainer = train()
    trainer.train()
    decoder, ids = trainer.model.get_decoder(), torch.arange(9)[None]

    with torch.no_grad():
        found = decoder(ids).last_hidden_state
        trainer.model(ids)
        assert torch.equal(found, decoder(ids).last_hidden_state)
