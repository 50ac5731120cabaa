"""A loss of someone else's that reads log-probabilities of a second frozen policy."""

from dataclasses import dataclass, replace

import pytest
import torch

from guest_losses import SecondReference, TwoReferences
from perturn.losses import LOSSES, TurnLogprobs
from perturn.losses.kto import KTO
from perturn.policy.logprobs import action_logprobs, logprobs_and_entropy
from perturn.policy.packing import lay_out
from perturn.types import WeightedTrajectory

from .training import PAIRS, assert_same_training, descend, history, scaled


@pytest.fixture
def second(tmp_path, tiny_model, monkeypatch):
    """The folder of a second reference, and the section of the loss that reads it."""
    monkeypatch.setitem(LOSSES._own, "two-references", TwoReferences)
    folder = tmp_path / "second"
    scaled(tiny_model, 0.9).save_pretrained(folder)
    return folder, {"name": "two-references", "second": str(folder)}


def by_hand(policy, first, second, renderer, pairs):
    """The loss of each pair, computed on its own."""

    def side(row):
        batch = lay_out([renderer.encode(row)])
        with torch.no_grad():
            logprobs = [action_logprobs(model, batch) for model in (policy, first, second)]
        inputs = {"second-reference": logprobs[2]}
        return TurnLogprobs(*logprobs[:2], batch["turn"], batch["trajectory"], inputs=inputs)

    loss = TwoReferences(second="")
    return torch.cat([loss(side(pair.chosen), side(pair.rejected)) for pair in pairs])


def test_the_loss_reads_both_references(train, tiny_model, renderer, second):
    """The first logged loss is the mean over the pairs, and another one than with one reference."""
    _, section = second
    first = scaled(tiny_model)
    trainer = train(PAIRS[:4], ref_model=first, loss=section, per_device_train_batch_size=4)
    expected = by_hand(tiny_model, first, scaled(tiny_model, 0.9), renderer, PAIRS[:4]).mean()
    alone = by_hand(tiny_model, first, first, renderer, PAIRS[:4]).mean()
    trainer.train()

    assert history(trainer)[0] == pytest.approx(float(expected), rel=1e-4)
    assert abs(expected - alone) > 1e-3


def test_packs_and_micro_batches_do_not_move_the_loss_curve(train, second):
    """One curve and one final policy, whatever divides a step."""
    curves, finals = [], []
    for micro, steps, budget in [(4, 1, 4096), (1, 4, 4096), (4, 1, 1)]:
        trainer = descend(train, second[1], micro, steps, token_budget=budget)
        curves.append(torch.tensor(history(trainer)))
        finals.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))

    assert_same_training(curves, finals)


def test_rows_that_come_after_training_have_it_too(train, tiny_model, renderer, second):
    """The trained policy has moved; both references are those of before."""
    first = scaled(tiny_model)
    trainer = train(PAIRS[:4], ref_model=first, loss=second[1], learning_rate=0.1, optim="sgd")
    trainer.train()
    expected = by_hand(trainer.model, first, scaled(tiny_model, 0.9), renderer, PAIRS[4:]).mean()

    assert trainer.evaluate(PAIRS[4:])["eval_loss"] == pytest.approx(float(expected), rel=1e-4)


def test_it_is_computed_once_and_kept(train, second, monkeypatch):
    """A second trainer of the same rows reads both references from the cache."""
    asked = []
    train(PAIRS[:2], loss=second[1])

    def count(*args, **kwargs):
        asked.append(args)
        return compute(*args, **kwargs)

    from perturn.policy import reference

    compute = reference.compute_logprobs
    monkeypatch.setattr(reference, "compute_logprobs", count)
    again = train(PAIRS[:2], loss=second[1])

    assert [len(each.inputs["second-reference"]) for each in again.train_dataset.rows] == [2, 2]
    assert [len(sequences) for _, sequences, *_ in asked] == [
        1,
        1,
    ]  # a probe of each policy, which tells who it is


@dataclass(frozen=True)
class _Mismatched(KTO):
    """KTO whose mismatched rows are read with inputs of both kinds."""

    second: str = ""

    @property
    def traits(self):
        return replace(super().traits, reads=frozenset({"entropy", SecondReference(self.second)}))

    @torch.no_grad()
    def mismatch(self, side):
        return side.sum_by_trajectory(side.input("entropy") + 10 * side.input("second-reference"))


def test_mismatched_rows_have_inputs_too(train, tiny_model, renderer, second, monkeypatch):
    """Numbers of the rows of a step, by hand: the policy's entropies and the second reference's log-probabilities."""
    monkeypatch.setitem(LOSSES._own, "mismatched", _Mismatched)
    rows = [
        WeightedTrajectory(
            replace(
                pair.chosen,
                turns=(
                    replace(pair.chosen.turns[0], observation=({"role": "user", "content": f"room {n}!"},)),
                ),
            ),
            (1.0,),
        )
        for n, pair in enumerate(PAIRS[:3])
    ]
    trainer = train(
        rows, loss={"name": "mismatched", "second": str(second[0])}, per_device_train_batch_size=3
    )
    examples, other = trainer.train_dataset.rows, scaled(tiny_model, 0.9)
    found = trainer._statistics(examples)
    expected = []
    for example in examples:
        batch = lay_out([example.mismatched])
        with torch.no_grad():
            entropy = logprobs_and_entropy(tiny_model, batch)[1]
            expected.append(float((entropy + 10 * action_logprobs(other, batch)).sum()))
    trainer.train()

    assert found == pytest.approx(expected, rel=1e-4)
    assert len(history(trainer)) == 1
