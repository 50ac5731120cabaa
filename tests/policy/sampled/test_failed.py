"""Episodes that FAILED: no statistic counts them and nothing is learned from them, by whatever way they come."""

from dataclasses import replace

import pytest
from torch.testing import assert_close

import perturn
from perturn.errors import ConfigError, DataError
from perturn.remaining import wrong_turns
from perturn.types import PreferencePair, Remaining, Status, WeightedTrajectory
from support.weights import weights_of

from .episodes import weighted


@pytest.fixture
def broken(groups):
    """The groups, with the last episode of the first task broken off after it had earned 1."""
    return [
        replace(one, status=Status.FAILED, error="RuntimeError: crash") if i == 2 else one
        for i, one in enumerate(groups)
    ]


def kept(rows):
    """Those that did not FAIL."""
    return [row for row in rows if row.status is not Status.FAILED]


def test_the_trainer_leaves_them_out_of_group_and_loss(train, broken, caplog):
    """Its weights are those of the same rows without it, and a warning counts it."""
    found = train(broken, credit="rloo").train_dataset.rows
    alone = train(kept(broken), credit="rloo").train_dataset.rows

    assert [row.weight[0].tolist() for row in found] == [row.weight[0].tolist() for row in alone]
    assert [row.weight[0].tolist() for row in found][:2] == [[-1.0], [1.0, 1.0]]
    assert "train: left out 1 of 6 rows, whose episodes FAILED" in caplog.text


def test_rows_with_weights_are_left_out_too(train, broken):
    """Also one without turns, as where the world could not begin."""
    rows = weighted(broken, [1.0, -1.0, 0.5])
    rows.append(WeightedTrajectory(replace(broken[2], turns=(), total_reward=0.0), ()))

    assert len(train(rows).train_dataset.rows) == 5


def test_of_a_pair_the_side_that_the_loss_reads_counts(train, broken):
    """SFT reads the chosen side alone."""
    pairs = [PreferencePair(broken[0], broken[1]), PreferencePair(broken[1], broken[2])]

    assert len(train(pairs, loss="dpo").train_dataset.rows) == 1
    assert len(train(pairs, loss="sft").train_dataset.rows) == 2
    assert len(train([*pairs, PreferencePair(broken[2], broken[0])], loss="sft").train_dataset.rows) == 2


def test_labelled_episodes_are_left_out(train, groups, broken):
    """A crash is no failure of the policy."""
    posed = [replace(one, prompt=({"role": "system", "content": one.task.id},)) for one in broken]
    rows = weighted(posed, [1.0] * 3)[:2] + weighted(posed, [-1.0] * 3)[2:]

    assert len(train(rows, loss="kto", per_device_train_batch_size=5).train_dataset.rows) == 5


def test_a_dataset_of_nothing_else_is_an_error(train, broken):
    """It says so, and not that the dataset is empty."""
    with pytest.raises(DataError, match=r"^the train dataset has 2 rows, and the episode of each FAILED"):
        train([broken[2]] * 2)


def test_a_row_after_one_that_is_left_out_keeps_its_number(train, broken):
    """Counted from 0, as in the dataset."""
    with pytest.raises(DataError, match="train row 3: "):
        train([*broken[:3], {"strange": 1}])


@pytest.mark.parametrize("credit", ["rloo", "grpo", "gigpo", "uniform"])
def test_weigh_leaves_them_out(broken, credit):
    """Weights of 0 for what FAILED, and of the others as without it."""
    found = weights_of(broken, credit)
    alone = weights_of(kept(broken), credit)

    assert_close([*found[:2], *found[3:]], alone)
    assert found[2].tolist() == [0.0] * 3
    assert [row.weight for row in perturn.weigh(broken, credit)] == [tuple(one.tolist()) for one in found]


def test_weigh_counts_them_with_score_0_on_request(broken):
    """Scores 0, 1, 0: the second is 1 above the others; what FAILED has no weight of its own."""
    found = weights_of(broken, "rloo", failed="zero")

    assert [one.tolist() for one in found[:3]] == [[-0.5], [1.0, 1.0], [0.0] * 3]
    with pytest.raises(
        ConfigError, match=r"unknown failed 'drop'\. Did you mean 'zero'\? Known: leave_out, zero"
    ):
        weights_of(broken, "rloo", failed="drop")


def test_a_credit_that_reads_a_reference_is_given_the_others_alone(broken, tiny_model, tokenizer):
    """One entry for each that counts, in order."""
    found = weights_of(broken, "confidence", model=tiny_model, tokenizer=tokenizer)
    alone = weights_of(kept(broken), "confidence", model=tiny_model, tokenizer=tokenizer)

    assert_close([*found[:2], *found[3:]], alone)
    assert found[2].tolist() == [0.0] * 3


@pytest.mark.parametrize("credit", ["potential", "first-error", "process-score"])
def test_a_failed_episode_needs_no_distance(broken, credit):
    """The environment broke before its distance could be measured; it counts with score 0, and has no weights."""
    measured = [
        one
        if one.status is Status.FAILED
        else replace(one, turns=tuple(replace(turn, remaining=Remaining(2, 1)) for turn in one.turns))
        for one in broken
    ]

    assert weights_of(measured, credit, failed="zero")[2].tolist() == [0.0] * 3
    with pytest.raises(DataError, match="was not measured"):
        weights_of(kept(broken), credit)


def test_outside_a_group_a_failed_episode_needs_its_distance(broken):
    """Otherwise, training on a pair would take all its turns as wrong."""
    with pytest.raises(DataError, match="was not measured"):
        wrong_turns(broken[2])
