"""KTO's rows in the trainer: labels, mismatched rows, and one reference point for the whole optimizer step."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from perturn.errors import DataError
from perturn.losses import LOSSES, TurnLogprobs
from perturn.policy.logprobs import action_logprobs
from perturn.policy.packing import lay_out
from perturn.training.row_intake import mismatched
from perturn.types import WeightedTrajectory

from .training import PAIRS, WORDS, assert_same_training, descend, history, scaled, trajectory

ROWS = [
    WeightedTrajectory(one, (label,) * len(one.turns))
    for n, pair in enumerate(PAIRS)
    for one, label in [(pair.chosen, 1.0) if n % 3 else (pair.rejected, -1.0)]
]
"""Six episodes, two of them undesirable: `PAIRS[0]` and `PAIRS[3]` by their rejected sides."""
PROMPTS = WORDS[:6]


def posing(episode, prompt):
    """The episode after another text that poses its task."""
    first = replace(episode.turns[0], observation=({"role": "user", "content": prompt},))
    return replace(episode, turns=(first, *episode.turns[1:]))


ROWS = [
    replace(row, trajectory=posing(row.trajectory, prompt)) for row, prompt in zip(ROWS, PROMPTS, strict=True)
]
KTO = {"name": "kto", "beta": 0.5, "undesirable_weight": 2.0}


def test_a_mismatched_row_has_the_prompt_of_one_and_the_actions_of_another():
    """All that posed the task is of the first; what was observed later is of the second."""
    one, other = trajectory("north", "lamp", task="a"), trajectory("south", "key", "door", task="b")
    posed = [{"role": "user", "content": "another room"}]
    one = one.__class__(
        **{**vars(one), "turns": (one.turns[0].__class__(tuple(posed), one.turns[0].action),)}
    )

    found = mismatched(one, other)

    assert [message["content"] for message in found.messages] == [
        *("Play.", "another room", "south", "room 1", "key", "room 2", "door")
    ]


def by_hand(policy, reference, renderer, rows):
    """The loss of rows that are one step: z0 over all, each row's pass by itself."""

    def side(episode, weight=None):
        batch = lay_out([renderer.encode(episode)])
        with torch.no_grad():
            both = [action_logprobs(model, batch) for model in (policy, reference)]
        return TurnLogprobs(*both, batch["turn"], batch["trajectory"], weight)

    loss = LOSSES["kto"](beta=0.5, undesirable_weight=2.0)
    others = [side(mismatched(row.trajectory, rows[n - 1].trajectory)) for n, row in enumerate(rows)]
    step = torch.cat([loss.mismatch(one) for one in others])
    losses = [loss(side(row.trajectory, torch.tensor(row.weight)), None, step=step) for row in rows]
    return torch.cat(losses), step


@pytest.mark.parametrize("budget", [4096, 1])
def test_the_first_step_is_the_loss_worked_row_by_row(train, tiny_model, budget):
    """The policy is not its reference, so z0 is above 0; one pass for all rows, or one for each."""
    reference = scaled(tiny_model, 1.3)
    trainer = train(ROWS, loss=KTO, ref_model=reference, per_device_train_batch_size=6, token_budget=budget)
    expected, step = by_hand(tiny_model, reference, trainer.renderer, ROWS)
    trainer.train()

    assert step.mean() > 0
    assert_close(torch.tensor(history(trainer)[0]), expected.mean(), rtol=1e-5, atol=1e-6)
    assert history(trainer, "kl")[0] == pytest.approx(max(0.0, float(step.mean())), rel=1e-4, abs=1e-6)
    assert history(trainer, "rewards/chosen")[0] != history(trainer, "rewards/rejected")[0]
    for name, label in (("logps/chosen", 1.0), ("logps/rejected", -1.0)):
        own = [row.trajectory for row in ROWS if row.weight[0] == label]
        with torch.no_grad():
            said = action_logprobs(tiny_model, lay_out([trainer.renderer.encode(one) for one in own]))
        assert history(trainer, name)[0] == pytest.approx(float(said.sum()) / len(own), rel=1e-4)


def test_how_a_step_is_divided_does_not_move_the_loss_curve(train, tiny_model):
    """1x4, 2x2 and 4x1 rows, and passes of one row: z0 is that of all rows of the step. SGD, as with others."""
    curves, finals = [], []
    for micro, steps, budget in [(4, 1, 4096), (2, 2, 4096), (1, 4, 4096), (4, 1, 1)]:
        trainer = descend(
            lambda **settings: train(ROWS, ref_model=scaled(tiny_model, 1.3), **settings),
            KTO,
            micro,
            steps,
            token_budget=budget,
        )
        curves.append(torch.tensor(history(trainer)))
        finals.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))

    assert_same_training(curves, finals)


def test_an_evaluation_is_one_step_of_all_its_rows(train, tiny_model):
    reference = scaled(tiny_model, 1.3)
    trainer = train(ROWS, loss=KTO, ref_model=reference, eval_dataset=ROWS, per_device_eval_batch_size=2)
    expected, step = by_hand(tiny_model, reference, trainer.renderer, ROWS)
    found = trainer.evaluate()

    assert found["eval_loss"] == pytest.approx(float(expected.mean()), rel=1e-5)
    assert found["eval_kl"] == pytest.approx(max(0.0, float(step.mean())), rel=1e-4, abs=1e-6)


def test_a_prediction_has_the_values_of_desirable_and_other_rows(train):
    """What is logged as chosen and rejected are the desirable rows and the others; a prediction has each row's own."""
    predicted = train(ROWS, loss=KTO).predict(ROWS)

    assert {name: values.shape for name, values in predicted.predictions.items()} == {
        "loss": (6,),
        "logps/chosen": (6,),
    }
    desirable = [row.weight[0] > 0 for row in ROWS]
    assert predicted.metrics["test_logps/chosen"] == pytest.approx(
        predicted.predictions["logps/chosen"][desirable].mean(), rel=1e-4
    )
    assert predicted.metrics["test_logps/rejected"] == pytest.approx(
        predicted.predictions["logps/chosen"][[not each for each in desirable]].mean(), rel=1e-4
    )


def test_a_turn_without_loss_may_have_a_weight_of_0(train):
    """As where a label was written on the other turns alone."""
    found = []
    for silent in (0.0, 1.0):
        first = replace(ROWS[1].trajectory.turns[0], trained=False)
        turns = (first, *ROWS[1].trajectory.turns[1:])
        episode = replace(ROWS[1].trajectory, turns=turns)
        weight = (silent, *(1.0,) * (len(turns) - 1))
        trainer = train([WeightedTrajectory(episode, weight), *ROWS[2:]], loss=KTO)
        trainer.train()
        found.append(history(trainer, "grad_norm"))

    assert len(turns) > 1
    assert found[0] == found[1]


def test_actions_that_do_not_fit_after_another_prompt_are_named(train):
    """Of the short row's actions only the first fits after the long prompt, and it carries no loss."""
    long = WeightedTrajectory(posing(trajectory("go", task="long"), "north " * 50), (-1.0,))
    turns = trajectory("go", *["south"] * 3, task="short").turns
    short = trajectory("go", task="short")
    short = replace(short, turns=(replace(turns[0], trained=False), *turns[1:]))
    rows = [long, WeightedTrajectory(short, (1.0,) * 4)]

    with pytest.raises(
        DataError, match="actions of task 'short' after the prompt of task 'long', and no turn"
    ):
        train(rows, loss=KTO, max_length=75)


def test_rows_of_trl_say_by_their_label_what_they_are(train):
    """`prompt`, `completion` and `label` are read as the same rows with weights 1 or -1."""
    trl = [
        {
            "prompt": row.trajectory.messages[:2],
            "completion": row.trajectory.messages[2:],
            "label": row.weight[0] > 0,
        }
        for row in ROWS
    ]
    theirs, ours = (train(rows, loss=KTO).train_dataset.rows for rows in (trl, ROWS))

    assert [row.weight[0].tolist() for row in theirs] == [row.weight[0].tolist() for row in ours]
    assert [row.chosen for row in theirs] == [row.chosen for row in ours]
    assert [row.mismatched for row in theirs] == [row.mismatched for row in ours]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([row.trajectory for row in ROWS], "desirable or not, and the row does not say"),
        (PAIRS, "desirable or not, and the row is a pair; make two rows"),
        ([ROWS[0], ROWS[0]], "rows with at least two prompts"),
        ([replace(ROWS[0], weight=(1.0, -1.0)), ROWS[1]], r"task 't/0': .* got \(1\.0, -1\.0\)"),
        ([replace(ROWS[0], weight=(1.0, 0.0)), ROWS[1]], r"task 't/0': .* got \(1\.0, 0\.0\)"),
    ],
)
def test_rows_without_labels_or_of_one_task_are_refused(train, rows, says):
    with pytest.raises(DataError, match=says):
        train(rows, loss=KTO)


def test_answers_to_one_prompt_are_no_mismatch(train):
    """Rows 0, 1 and 4 of five have one prompt: the partner is the last row before that has another, around the end."""
    posed = ["a", "a", "b", "c", "a"]
    rows = [
        {
            "prompt": [{"role": "user", "content": text}],
            "completion": [{"role": "assistant", "content": WORDS[n]}],
            "label": n % 2 == 0,
        }
        for n, text in enumerate(posed)
    ]
    trainer = train(rows, loss=KTO)
    said = [
        trainer.renderer.tokenizer.decode(row.mismatched.ids).removesuffix("<|im_end|>")
        for row in trainer.train_dataset.rows
    ]

    assert [WORDS.index(text.split()[-1]) for text in said] == [3, 3, 1, 2, 3]
    with pytest.raises(DataError, match="at least two prompts"):
        train([rows[0], rows[1], rows[4]], loss=KTO)
