"""What a run trains of its groups: one gradient with KL, at its limit and without; and by hand as in the loop."""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from tests.policy.sampled.episodes import WORDS, history, play, weights
from torch.testing import assert_close

import perturn
from perturn.config.stages import stages
from perturn.credit import CREDITS
from perturn.data.group_account import write_credits
from perturn.data.run_folder import Run
from perturn.data.store import TrajectoryStore, read_records, write_records
from perturn.run.stages.credit_stage import credit_groups
from perturn.run.stages.group_stage import own_credit, read_groups
from perturn.types import WeightedTrajectory

from .online import GROUPS, recipe_of

AGGREGATES = ["token_mean", "turn_mean", "trajectory_mean", "token_sum"]
SGD = {"learning_rate": 0.1, "num_train_epochs": 1, "optim": "sgd", "max_grad_norm": 0.0}
SGD |= {"lr_scheduler_type": "constant", "per_device_train_batch_size": 8}


@pytest.fixture
def episodes(tiny_model, renderer):
    """A task whose two rewards differ, of one turn each; and one of equal rewards, of three longer turns each."""
    said = [["north"], ["south east"], [" ".join(WORDS)] * 3, [" ".join(WORDS[::-1])] * 3]
    played = [
        play(tiny_model, renderer, words, task="tb"[index < 2], reward=float(index == 0), noise=0.1)
        for index, words in enumerate(said)
    ]
    return [replace(one, sample=index % 2) for index, one in enumerate(played)]


@pytest.fixture
def rows_of(place, monkeypatch):
    """Rows of the first training of a run that has explored these episodes, and of a loss on them."""
    monkeypatch.chdir(place)

    @contextmanager
    def run_of(recipe, explored, branches):
        with Run(recipe) as run:
            for name, found in (("explore-001", explored), ("branch-001", branches)):
                file = run.paths.trajectories(name)
                with run.stage(name, file), TrajectoryStore(file) as store:
                    for one in found:
                        store.append(one)
            yield run

    def rows(name, explored, branches=(), *words):
        recipe = recipe_of(place, *GROUPS, *words, f"name={name}")
        label, credit = own_credit(recipe)
        with run_of(recipe, explored, branches) as run:
            write_credits(run.paths.credit(label, "-001"), credit_groups([*explored, *branches], credit))
            stage = next(stage for stage in stages(recipe) if stage.name == "align-001")
            return *read_groups(run, stage), recipe.align.loss

    return rows


@pytest.fixture
def gradient_of(make_trainer):
    """Minus the move of the weights in one step of gradient descent, over its learning rate."""

    def gradient(rows, loss, **settings):
        trainer = make_trainer(rows, loss=loss, **SGD | settings)
        before = weights(trainer)
        trainer.train()
        return (before - weights(trainer)) / 0.1, trainer

    return gradient


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_the_gradient_is_continuous_where_kl_is_zero(rows_of, gradient_of, episodes, aggregate):
    """Without KL a run leaves out the group without spread; with KL of 1e-12 it is there, and changes nothing.

    Of all four rows as if each had a spread, the mean over tokens and over turns would be another one: the clipped
    term has 5 tokens or 2 turns of 2 rows, times 2 of 4 rows; and not 71 tokens, or 8 turns.
    """
    found = {}
    for name, kl in (("none", 0), ("limit", 1e-12)):
        loss = f"align.loss={{name: ppo-clip, kl: {kl}, aggregate: {aggregate}}}"
        rows, asked, section = rows_of(f"{name}-{aggregate}", episodes, (), "credit.name=rloo", loss)
        found[name], trainer = gradient_of(rows, section, episodes=asked)
    counted = [replace(row, has_spread=None) for row in rows]
    as_if, _ = gradient_of(counted, section, episodes=asked)
    size = {"token_mean": tokens(trainer, 4) / (2 * tokens(trainer, 2)), "turn_mean": 8 / (2 * 2)}

    assert [row.has_spread for row in rows] == [None, None, False, False]
    assert found["none"].norm() > 0.01
    assert_close(found["limit"], found["none"], rtol=1e-4, atol=1e-5)
    assert float(found["limit"].norm() / as_if.norm()) == pytest.approx(size.get(aggregate, 1.0), rel=1e-3)


def tokens(trainer, rows):
    """Loss tokens of the first rows, in the order in which they were read."""
    return sum(len(row.chosen.loss_turns) for row in trainer.train_dataset.rows[:rows])


@pytest.mark.parametrize("aggregate", ["token_mean", "turn_mean"])
def test_passes_and_micro_batches_do_not_move_the_gradient(rows_of, gradient_of, episodes, aggregate):
    """One pass, a pass for each row, and steps of accumulated batches, of rows with and without spread."""
    loss = f"align.loss={{name: ppo-clip, kl: 0.3, aggregate: {aggregate}}}"
    rows, asked, section = rows_of(f"packed-{aggregate}", episodes, (), "credit.name=rloo", loss)
    divided = [
        {},
        {"token_budget": 1},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "token_budget": 20},
    ]
    found = [gradient_of(rows, section, episodes=asked, **each)[0] for each in divided]

    assert found[0].norm() > 0.01
    for other in found[1:]:
        assert_close(other, found[0], rtol=1e-4, atol=1e-5)


def test_a_step_that_has_no_row_with_a_spread_has_a_gradient_of_zero(rows_of, gradient_of, episodes):
    """Its clipped term is a mean over nothing, which is no NaN here: the term is absent."""
    loss = "align.loss={name: ppo-clip, kl: 1.0e-12}"
    rows, *_ = rows_of("still", episodes[2:], (), "credit.name=rloo", loss)
    found, trainer = gradient_of(rows, {"name": "ppo-clip"})

    assert [row.has_spread for row in rows] == [False, False]
    assert history(trainer) == [0.0]
    assert not found.any()


def branched(model, renderer):
    """Two explored episodes of three turns, and a branch of the first one from its second turn on."""
    said = [["north", "south", "east"], ["up", "down", "lamp"], ["north", "door", "key box"]]
    rewards = (1.0, 0.0, 0.25)
    played = [
        play(model, renderer, words, reward=reward, noise=0.1)
        for words, reward in zip(said, rewards, strict=True)
    ]
    first, second, branch = (replace(one, sample=index) for index, one in enumerate(played))
    branch = replace(branch, origin=0, taken_over=1, turns=(first.turns[0], *branch.turns[1:]))
    return [first, second], [branch]


@pytest.mark.parametrize(
    ("credit", "aggregate"),
    [
        ({"name": "portool"}, "token_mean"),
        ({"name": "arpo"}, "turn_mean"),
        ({"name": "portool", "value": "leaves", "count": "leaves"}, "trajectory_mean"),
        ({"name": "portool", "baseline": "group"}, "token_sum"),
    ],
    ids=["portool", "arpo", "leaves", "sum"],
)
def test_rows_that_are_weighed_by_hand_train_as_in_the_loop(
    rows_of, gradient_of, tiny_model, renderer, credit, aggregate
):
    """The trainer is told no credit: each row says which of its turns carry loss. The branch has two, and not three.

    Where all three had loss, a mean would count the first turn again; a sum would not, for it has a weight of 0 there.
    """
    explored, branches = branched(tiny_model, renderer)
    words = [f"credit={json.dumps(credit)}", "explore.name=branches", "explore.every=1", "explore.branches=1"]
    loss = f"align.loss={{name: ppo-clip, aggregate: {aggregate}}}"
    looped, asked, section = rows_of(f"by-hand-{aggregate}", explored, branches, *words, loss)
    by_hand = perturn.weigh([*explored, *branches], credit)
    found, trainer = gradient_of(by_hand, section)
    expected, _ = gradient_of(looped, section, episodes=asked)
    twice, _ = gradient_of([replace(row, own_turns=False) for row in by_hand], section)

    assert by_hand == looped
    assert [row.own_turns for row in by_hand] == [None, None, True]
    assert [len(row.weight[0]) for row in trainer.train_dataset.rows] == [3, 3, 2]
    assert_close(found, expected, rtol=0, atol=0)
    assert aggregate == "token_sum" or (found - twice).norm() > 0.01 * twice.norm()


def test_a_row_says_more_than_the_credit_of_the_training(make_trainer, tiny_model, renderer):
    """A row that says nothing, as in an older file, is as the credit has it; another credit trains all turns."""
    explored, branches = branched(tiny_model, renderer)
    rows = perturn.weigh([*explored, *branches], "portool")
    unsaid = [replace(row, own_turns=None) for row in rows]
    whole = perturn.weigh([*explored, *branches], "rloo")

    def turns(rows, credit):
        found = make_trainer(rows, loss="ppo-clip", credit=credit).train_dataset.rows
        return [len(row.weight[0]) for row in found]

    assert turns(rows, None) == turns(rows, "rloo") == turns(unsaid, "portool") == [3, 3, 2]
    assert turns(unsaid, None) == turns(whole, None) == turns(whole, "portool") == [3, 3, 3]


def test_what_a_row_says_is_kept_in_a_file_and_older_files_are_read(tmp_path, tiny_model, renderer):
    """Fields that say nothing are on no line, so files of rows without branches are as they were."""
    explored, branches = branched(tiny_model, renderer)
    rows = perturn.weigh([*explored, *branches], CREDITS["portool"]())
    rows.append(WeightedTrajectory(explored[0], (0.0,) * 3, has_spread=False))
    write_records(tmp_path / "rows.jsonl", rows)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()

    assert list(read_records(tmp_path / "rows.jsonl", WeightedTrajectory)) == rows
    assert ["own_turns" in line for line in lines] == [False, False, True, False]
    assert ["has_spread" in line for line in lines] == [False, False, False, True]
    assert torch.tensor(rows[2].weight).abs().sum() > 0
