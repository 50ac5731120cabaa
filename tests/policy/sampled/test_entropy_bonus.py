"""A loss of someone else's that reads a per-token input with gradient: ppo-clip with an entropy bonus."""

import copy

import pytest
import torch
from torch.testing import assert_close

from guest_losses import EntropyBonus, Margin
from perturn.losses import LOSSES, TurnLogprobs
from perturn.policy import chunked_head
from perturn.policy.logprobs import logprobs_and_entropy, logprobs_and_inputs
from perturn.policy.packing import both_sides, collate, lay_out
from support.models import VOCABULARY, make_tiny_model

from ..training import assert_same_training, turn_by_turn
from .episodes import history, weighted, weights

BONUS = {"name": "entropy-bonus", "bonus": 0.5}
WEIGHTS = ([1.0, -0.5, 2.0], [-1.0, 0.3, 0.7])


@pytest.fixture(autouse=True)
def table(monkeypatch):
    """The loss is in the table, as by an entry point; a chunk has a few rows, so that there are several."""
    monkeypatch.setitem(LOSSES._own, "entropy-bonus", EntropyBonus)
    monkeypatch.setattr(chunked_head, "TILE_BYTES", 4 * VOCABULARY * 5)
    monkeypatch.setattr(chunked_head, "KEPT_BYTES", 8 * VOCABULARY * 5)


def from_all_logits(model, examples, loss):
    """The loss of each row from all logits of its sequence alone, by autograd."""
    policy, entropy, turn, trajectory = [], [], [], []
    for number, example in enumerate(examples):
        ids, of = (torch.tensor(each) for each in (example.chosen.ids, example.chosen.turn))
        logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1][of[1:] >= 0]
        policy.append(logprobs.gather(-1, ids[1:][of[1:] >= 0][:, None]).squeeze(-1))
        entropy.append(-(logprobs.exp() * logprobs).sum(-1))
        turn.append(of[of >= 0])
        trajectory.append(torch.full_like(turn[-1], number))
    policy, entropy, turn, trajectory = map(torch.cat, (policy, entropy, turn, trajectory))
    weight, behavior = (
        torch.cat([getattr(each, name)[0] for each in examples]) for name in ("weight", "behavior")
    )
    side = TurnLogprobs(policy, None, turn, trajectory, weight, behavior, inputs={"entropy": entropy})
    return loss(side)


@pytest.mark.parametrize(
    ("share", "aggregate", "most"),
    [(True, "token_mean", 1e-6), (False, "turn_mean", 1e-9)],
    ids=["packed", "alone"],
)
def test_the_gradient_is_that_of_all_logits(train, groups, share, aggregate, most):
    """In float64: losses, and the gradient of every parameter relative to its largest, from chunks of five rows.

    Sequences that begin alike are computed once, or each by itself. The norms of the model compute in float32, which
    makes a difference of 1e-16 in their input one of 1e-8 in a gradient, so that the packed bound is wider. Without
    the bonus the gradient is another one.
    """
    examples = train(weighted(groups, *WEIGHTS), loss=BONUS).train_dataset.rows
    model, loss = make_tiny_model().double(), EntropyBonus(bonus=0.5, aggregate=aggregate)
    plain = copy.deepcopy(model)
    batch = collate(examples) | lay_out([example.chosen for example in examples], share=share)
    logprobs, _, read = logprobs_and_inputs(model, batch, {"entropy": chunked_head.TokenEntropy()})
    value = loss(both_sides(batch, logprobs, read)[0])
    expected = from_all_logits(plain, examples, loss)
    value.mean().backward()
    expected.mean().backward()
    without = torch.autograd.grad(
        from_all_logits(plain, examples, EntropyBonus(bonus=0.0, aggregate=aggregate)).mean(),
        list(plain.parameters()),
    )

    assert_close(value, expected, rtol=most, atol=0)
    for found, other, bare in zip(model.parameters(), plain.parameters(), without, strict=True):
        size = other.grad.abs().max()
        assert (found.grad - other.grad).abs().max() <= most * size
        assert (bare - other.grad).abs().max() > 1e-3 * size


def test_division_of_a_step_does_not_move_the_loss_curve(train, groups):
    """One pass, a pass a row, and accumulated micro-batches of one and of two rows: one curve, one final policy."""
    curves, finals = [], []
    for budget, micro, steps in [(4096, 3, 1), (1, 3, 1), (4096, 1, 3)]:
        trainer = train(
            weighted(groups, *WEIGHTS),
            loss=BONUS,
            token_budget=budget,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=steps,
            num_train_epochs=2,
        )
        trainer.train()
        curves.append(torch.tensor(history(trainer)))
        finals.append(weights(trainer))

    assert_same_training(curves, finals)


def test_a_sequence_a_turn_trains_as_one_sequence(train, groups):
    """The policy saw the same text in both forms: one curve and one final policy."""
    found = []
    for rows in (groups, [turn_by_turn(row) for row in groups]):
        trainer = train(weighted(rows, *WEIGHTS), loss=BONUS, num_train_epochs=2)
        trainer.train()
        found.append((torch.tensor(history(trainer)), weights(trainer)))

    assert_close(*found, rtol=1e-4, atol=1e-6)


def test_the_bonus_raises_the_entropy(train, groups):
    """After the same steps the logged entropy is higher with a larger bonus; the loss has it from the first step."""
    low, high = (train(weighted(groups, *WEIGHTS), loss=BONUS | {"bonus": bonus}) for bonus in (0.0, 50.0))
    for trainer in (low, high):
        trainer.args.num_train_epochs = 5
        trainer.train()
    of_low, of_high = history(low, "entropy/chosen"), history(high, "entropy/chosen")

    assert of_high[0] == pytest.approx(of_low[0])
    assert history(high)[0] == pytest.approx(history(low)[0] - 50 * of_low[0], rel=1e-5)
    assert of_high[-1] > of_low[-1] + 1e-5


def test_rows_are_evaluated_with_what_the_loss_reads(train, groups):
    """The loss of evaluation is the loss of the first step, before anything moved."""
    rows = weighted(groups, *WEIGHTS)
    trainer = train(rows, loss=BONUS, eval_dataset=rows)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()

    assert before == pytest.approx(history(trainer)[0], rel=1e-6)


def test_a_loss_that_reads_nothing_new_is_computed_as_ever(train, groups, tiny_model, monkeypatch):
    """The chunked head is not called, and log-probabilities and entropies are equal to the last bit."""

    def fail(*_):
        raise AssertionError("called")

    examples = train(weighted(groups, *WEIGHTS)).train_dataset.rows
    batch = collate(examples)
    monkeypatch.setattr("perturn.policy.logprobs.token_inputs", fail)
    logprobs, entropy, read = logprobs_and_inputs(tiny_model, batch, {})
    expected = logprobs_and_entropy(tiny_model, batch)

    assert read == {}
    assert torch.equal(logprobs, expected[0])
    assert torch.equal(entropy, expected[1])
    with pytest.raises(AssertionError, match="called"):
        logprobs_and_inputs(tiny_model, batch, {"margin": Margin()})
