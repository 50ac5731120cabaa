"""Loss curves of the trainer: equal however rows are divided, and what is logged of them."""

import pytest
import torch
from torch.testing import assert_close

from perturn.losses import LOSSES
from perturn.policy.credit_weights import turn_logprobs
from perturn.policy.logprobs import action_logprobs, logprobs_and_inputs
from perturn.policy.packing import lay_out

from .training import (
    COUPLED,
    DENSITY_METRICS,
    PAIRS,
    TRL_METRICS,
    assert_same_training,
    descend,
    history,
    loss_by_pair,
    scaled,
)

WEIGHTS = ["weight/chosen", "weight/rejected"]


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

    assert_same_training(curves, finals)


def count_passes(monkeypatch):
    """A list that grows by the number of pairs of each pass through the model."""
    passes = []

    def counting(model, batch, inputs):
        passes.append(int(batch["pairs"]))
        return logprobs_and_inputs(model, batch, inputs)

    monkeypatch.setattr("perturn.training.turn_trainer.logprobs_and_inputs", counting)
    return passes


@pytest.mark.parametrize(
    ("loss", "few"), [("tlm-dre", 150), (COUPLED, 150), ("dpo", 150), ("sft", 75)], ids=str
)
def test_the_token_budget_does_not_move_the_loss_curve(train, monkeypatch, loss, few):
    """Six pairs, four to a step: one pass a step, a few, one per pair, and one per pair by accumulation.

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


def test_a_finished_training_takes_no_further_step_when_it_resumes(train, tmp_path):
    """Six rows, two to a step, one and a half epochs: five steps, and the second epoch is left unfinished."""
    settings = {"loss": "dpo", "num_train_epochs": 1.5, "save_strategy": "steps", "save_steps": 100}
    settings["lr_scheduler_type"] = "constant"  # a further step would have a learning rate
    whole, resumed = (train(**settings, output_dir=str(tmp_path / "out")) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-5"))

    assert (whole.state.global_step, resumed.state.global_step) == (5, 5)
    for mine, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("loss", ["dpo", "tlm-dre"])
def test_rewards_are_zero_before_the_first_update(train, loss):
    """The policy is its own reference, so every log-ratio is 0, in training mode too."""
    trainer = train(loss=loss)
    trainer.train()

    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
        assert history(trainer, name)[0] == pytest.approx(0, abs=1e-5)
        assert history(trainer, name)[-1] != pytest.approx(0, abs=1e-5)


def test_a_training_of_one_step_moves_the_policy(train):
    """Four pairs in one step, warmup 0.03: ceil(0.03) is 1 step of rise, whose learning rate would be 0."""
    trainer = train(PAIRS[:4], per_device_train_batch_size=4, warmup_steps=0.03, learning_rate=1e-3)
    before = [each.clone() for each in trainer.model.parameters()]
    trainer.train()

    assert history(trainer, "learning_rate") == [pytest.approx(1e-3)]
    assert any(not torch.equal(*both) for both in zip(before, trainer.model.parameters(), strict=True))


def test_iterations_of_one_step_begin_with_a_step_up(train):
    """Of three, warmup 0.4: ceil(1.6) = 2 steps of rise, so the first has a half of the peak, the next all of it."""
    settings = {
        "per_device_train_batch_size": 4,
        "warmup_steps": 0.4,
        "learning_rate": 1e-3,
        "schedule_steps": 3,
    }
    first = train(PAIRS[:4], **settings)
    first.train()
    first.save_model()
    first._save_optimizer_and_scheduler(first.args.output_dir)

    second = train(PAIRS[:4], **settings, optimizer_from=first.args.output_dir)
    second.train()

    assert history(first, "learning_rate") == [pytest.approx(5e-4)]
    assert history(second, "learning_rate") == [pytest.approx(1e-3)]


def test_training_prefers_the_chosen_side(train):
    """A few epochs on six pairs: the margin grows and the loss falls."""
    trainer = train(num_train_epochs=4, lr_scheduler_type="constant")
    trainer.train()

    assert history(trainer)[-1] < history(trainer)[0]
    assert history(trainer, "rewards/margins")[-1] > 0.1
    assert history(trainer, "rewards/accuracies")[-1] == 1.0
    assert history(trainer, "logps/accuracies")[-1] >= history(trainer, "logps/accuracies")[0]


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
