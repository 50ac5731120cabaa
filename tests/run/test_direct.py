"""The stages as functions: on objects, without a folder, equal to what a run does."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch.testing import assert_close

import perturn
from perturn.credit import CREDITS
from perturn.errors import ConfigError
from perturn.policy.models import load_policy
from perturn.quantities.readers import open_reader
from perturn.quantities.reference_logprobs import reference_of
from perturn.rows.group_pairs import GroupPairs
from perturn.types import EpisodeProtocol, Sampling
from support.models import make_tiny_model
from support.weights import weights_of

OWN = "own_environment:GuessNumber"
RULES = EpisodeProtocol("guess", format="action", system="Guess.", max_turns=3)
SHORT = Sampling(temperature=1.0, max_new_tokens=4)


@pytest.fixture(scope="module")
def experts(own_environment):
    """The expert's episodes of four numbers."""
    return perturn.collect("expert", own_environment.GuessNumber, n=4, protocol=RULES)


@pytest.fixture(scope="module")
def explored(own_environment, tokenizer):
    """What a model that knows nothing does on the same four."""
    made, model = own_environment.GuessNumber, make_tiny_model()
    return perturn.collect(model, made, n=4, protocol=RULES, sampling=SHORT, tokenizer=tokenizer)


def test_episodes_come_in_the_order_of_their_tasks(own_environment, experts, explored):
    """Both of the same task list, whoever ended first."""
    assert [one.key for one in experts] == [one.key for one in explored]
    assert all(one.success for one in experts)
    assert {one.policy.partition("@")[0] for one in explored} == {"policy"}


def test_a_maker_of_worlds_will_do(own_environment):
    """Such as a class of a notebook, which no process could import."""
    found = perturn.collect("expert", own_environment.GuessNumber, n=2, protocol=RULES)

    assert [one.success for one in found] == [True, True]


def test_an_expert_that_is_not_there_is_no_failed_episode(own_environment, monkeypatch):
    """A fault of the call, said once, before anything is played."""
    monkeypatch.delattr(own_environment.GuessNumber, "expert")

    with pytest.raises(ConfigError, match=r"has no expert; give a model as policy\."):
        perturn.collect("expert", own_environment.GuessNumber, n=2, protocol=RULES)


def test_pairs_put_the_expert_first(experts, explored):
    """Each gap is 1, so all four are kept."""
    pairs = perturn.make_rows(explored, experts=experts)

    keys = sorted(one.key for one in experts)
    assert [(pair.chosen.key, pair.rejected.key) for pair in pairs] == [(key, key) for key in keys]


def test_a_credit_without_a_model_is_the_credit(explored):
    """By name, by section and as an object, for each trajectory by itself."""
    expected = [CREDITS["discount"](gamma=0.5)([one])[0] for one in explored]

    for credit in ({"name": "discount", "gamma": 0.5}, CREDITS["discount"](gamma=0.5)):
        assert_close(weights_of(explored, credit, dtype=expected[0].dtype), expected, rtol=0, atol=0)


def test_a_credit_that_reads_a_reference_weighs_as_training_does(
    experts, explored, tokenizer, tiny_model, tmp_path
):
    """The trainer's own rows of the same pairs hold the same numbers."""
    pairs = perturn.make_rows(explored, experts=experts)
    trainer = perturn.TurnTrainer(
        tiny_model,
        perturn.TurnConfig(
            output_dir=str(tmp_path), report_to="none", reference_cache=str(tmp_path / "cache")
        ),
        train_dataset=pairs,
        processing_class=tokenizer,
    )

    weights = weights_of(
        [pair.rejected for pair in pairs],
        "confidence",
        model=tiny_model,
        tokenizer=tokenizer,
        dtype=torch.float32,
    )

    assert_close(weights, [row.weight[1] for row in trainer.train_dataset.rows], rtol=0, atol=0)


def test_a_credit_that_reads_a_reference_asks_for_one(explored):
    """There is no default policy."""
    with pytest.raises(
        ConfigError, match="model is missing, and credit Confidence reads a reference policy; give model="
    ):
        weights_of(explored)
    with pytest.raises(
        ConfigError, match=r"needs tool-matches, which weigh does not provide; run `perturn credit"
    ):
        weights_of(explored, "matchtir")
    for answer in (None, 5, "no mark"):
        with pytest.raises(ConfigError, match="answer must be the text of a turn that gives an answer"):
            weights_of(explored, "igpo", model="unread", answer=answer)


def test_a_model_that_trains_is_asked_without_dropout(experts, tokenizer):
    """Twice the same weights, and it goes on training."""
    model = make_tiny_model()
    model.train()
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, _, out: torch.dropout(out, 0.5, module.training))

    found = [weights_of(experts, "confidence", model=model, tokenizer=tokenizer) for _ in range(2)]
    logprobs = [reference_of(experts, open_reader(model, tokenizer)) for _ in range(2)]

    assert_close(*found, rtol=0, atol=0)
    assert_close(*logprobs, rtol=0, atol=0)
    assert model.training


def test_training_changes_the_model_and_writes_nothing(experts, tokenizer, tmp_path, monkeypatch):
    """A high learning rate for one epoch."""
    monkeypatch.chdir(tmp_path)
    model = make_tiny_model()
    before = {name: weight.clone() for name, weight in model.named_parameters()}

    trained = perturn.train(
        model, experts, loss="sft", tokenizer=tokenizer, learning_rate=1e-2, use_cpu=True, disable_tqdm=True
    )

    assert trained is model
    assert not trained.training
    assert any(not torch.equal(before[name], weight) for name, weight in model.named_parameters())
    assert not list(tmp_path.iterdir())


def test_a_score_has_n_interval_and_protocol(own_environment, tiny_model, tokenizer):
    """Four tasks, none solved: 0 with the Wilson interval of 0 of 4, whose end is z^2/(4 + z^2) = 0.490."""
    found = perturn.evaluate(tiny_model, OWN, protocol=RULES, tokenizer=tokenizer, sampling=SHORT)

    assert (found.n, found.mean_score, found.failed) == (4, 0.0, 0)
    assert_close(found.success_interval[1], 0.490, atol=1e-3, rtol=0)
    assert (found.protocol["environment"], found.protocol["split"]) == ("guess-number-1.0", "test")
    assert found.protocol["name"] == "guess-action"
    assert found.against(found).ties == 4


def test_a_folder_is_served_under_its_name(own_environment, tiny_folder):
    """Loaded from disk, as a run does it; the name has a digest of the weights."""
    found = perturn.collect(str(tiny_folder), OWN, n=2, protocol=RULES, sampling=SHORT)

    assert [one.status for one in found] == ["completed", "completed"]
    assert {one.policy.partition("@")[0] for one in found} == {tiny_folder.name}


def test_the_public_names_are_shown():
    """And each is there."""
    assert {"collect", "make_rows", "weigh", "Trainer", "Group", "train", "evaluate", "TurnTrainer"} <= set(
        dir(perturn)
    )
    assert all(hasattr(perturn, name) for name in dir(perturn))


def test_a_world_that_is_given_plays_one_episode_at_a_time_and_stays_open(own_environment):
    """Whoever made it closes it."""
    world = own_environment.GuessNumber()
    closed = []
    world.close = lambda: closed.append(True)

    found = perturn.collect("expert", world, n=3, protocol=RULES)

    assert [one.success for one in found] == [True] * 3
    assert not closed


def test_an_explorer_plays_its_branches(own_environment, tiny_model, tokenizer):
    """An explored episode of three turns is resumed at two of them, once each, and pairs find these."""
    settings = {"protocol": RULES, "sampling": SHORT, "tokenizer": tokenizer}
    found = perturn.collect(
        tiny_model, OWN, n=1, explore={"name": "branches", "every": 1, "branches": 1}, **settings
    )
    explored, branches = (
        [one for one in found if (one.origin is None) == rollout] for rollout in (True, False)
    )

    assert len(explored) == 1
    assert [one.taken_over for one in branches] == [1, 2]
    assert perturn.make_rows(found, "branch-pairs") == []
    with pytest.raises(ConfigError, match=r"an episode that resumes another is missing, .*'branches'"):
        perturn.make_rows(explored, "branch-pairs")


def test_groups_are_weighed_and_those_without_spread_are_left_out(experts):
    """Two policies of one task are two groups, each of one; with equal policies they are compared."""
    failures = [
        replace(
            one,
            turns=tuple(replace(turn, reward=0.0) for turn in one.turns),
            total_reward=0.0,
            success=False,
            sample=1,
        )
        for one in experts
    ]
    both, others = [*experts, *failures], [replace(one, policy="other") for one in failures]

    rows = perturn.make_rows(both, "groups", credit="rloo")

    assert perturn.make_rows([*experts, *others], "groups", credit="rloo") == []
    assert len(rows) == len(both)
    assert {row.weight[0] > 0 for row in rows if row.trajectory.success} == {True}
    still = perturn.make_rows([*experts, *others], "groups", credit="rloo", keep_no_spread=True)
    assert {(row.has_spread, *row.weight) for row in still} == {(False, 0.0)}


def test_a_trainer_keeps_its_optimizer_between_iterations(experts, tokenizer):
    """Two iterations of one step are two steps of one training; a fresh optimizer takes another second step."""
    how = {"loss": "sft", "tokenizer": tokenizer, "learning_rate": 1e-3, "use_cpu": True, "weight_decay": 0.0}
    kept, whole, fresh = make_tiny_model(), make_tiny_model(), make_tiny_model()
    trainer = perturn.Trainer(kept, **how)
    metrics = [trainer.train(experts) for _ in range(2)]
    assert trainer.train([]) == {}
    perturn.Trainer(whole, epochs=2, **how).train(experts)
    for _ in range(2):
        perturn.Trainer(fresh, **how).train(experts)

    first, second, other = (model.state_dict()["lm_head.weight"] for model in (kept, whole, fresh))
    assert trainer.model is kept
    assert metrics[1]["loss"] < metrics[0]["loss"]
    assert_close(first, second, rtol=0, atol=1e-6)
    assert (first - other).abs().max() > 1e-5


def test_a_trainer_has_the_tokenizer_that_it_trains_with(tokenizer):
    """Rollouts with another template than training would be scored as if another policy had played them."""
    trainer = perturn.Trainer(Path("tiny-agent"), loss="sft", tokenizer=tokenizer, chat_template="qwen2.5")

    assert trainer.tokenizer.chat_template != tokenizer.chat_template


def test_a_trainer_with_a_constant_learning_rate_warms_up_over_iterations(experts, tokenizer):
    """One optimizer step for each call. Of two warm-up steps, the first has a half of the peak."""
    how = {"loss": "sft", "tokenizer": tokenizer, "learning_rate": 1e-3, "use_cpu": True}
    trainer = perturn.Trainer(make_tiny_model(), warmup_steps=2, **how)

    rates = [trainer.train(experts)["learning_rate"] for _ in range(4)]

    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3, 1e-3])


def test_weights_of_zero_change_nothing_and_a_schedule_has_an_end(explored, tokenizer):
    """The optimizer's momentum would move the policy without a gradient."""
    still = perturn.weigh(explored, "rloo")  # groups of one trajectory
    moving = [replace(row, weight=(1.0,) * len(row.weight)) for row in still]
    how = {"loss": "ppo-clip", "tokenizer": tokenizer, "learning_rate": 1e-3, "use_cpu": True}
    trainer = perturn.Trainer(make_tiny_model(), iterations=2, **how)
    trainer.train(moving)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}

    assert trainer.train(still) == {}
    assert_close(trainer.model.state_dict(), before, rtol=0, atol=0)
    assert trainer.train(moving)["learning_rate"] > 0
    with pytest.raises(ConfigError, match=r"schedule_steps must be >= 3, .* got 2\. .*: raise iterations"):
        trainer.train(moving)


def test_a_policy_given_by_name_plays_with_the_template_of_the_given_tokenizer(
    own_environment, tiny_folder, monkeypatch
):
    """As in the first iteration of a `Trainer`, whose model is still a name."""
    used = []
    load = partial(_loaded_with, used)
    monkeypatch.setattr("perturn.api.collect_and_evaluate.load_policy", load)
    trained = perturn.Trainer(str(tiny_folder), loss="sft", chat_template="qwen2.5").tokenizer

    perturn.collect(str(tiny_folder), OWN, n=1, protocol=RULES, sampling=SHORT, tokenizer=trained)

    assert used == [trained.chat_template]


def _loaded_with(used, path, *, template, **settings):
    used.append(template)
    return load_policy(path, template=template, **settings)


def test_a_policy_plays_under_the_rules_of_its_training():
    """As `perturn evaluate` does; under the environment's own rules, all its turns are invalid."""
    found = perturn.evaluate("tiny-agent", "alfworld-like", n=2)
    other = perturn.evaluate("tiny-agent", "alfworld-like", n=2, protocol="alfworld-eto", sampling=SHORT)

    assert found.protocol["name"] == "alfworld-lab-action"
    assert other.protocol["name"].startswith("alfworld-eto")


def test_a_trainer_removes_the_nulls_that_a_dataset_added(tokenizer, monkeypatch):
    """Arrow gives each call the arguments of the other one; `TurnTrainer` sees that they come from a dataset."""
    rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}]
    seen = []

    class Stopped(Exception):
        pass

    def look(model, args, train_dataset, **_):
        seen.append(train_dataset)
        raise Stopped

    monkeypatch.setattr("perturn.api.trainer.TurnTrainer", look)
    trainer = perturn.Trainer(make_tiny_model(), loss="sft", tokenizer=tokenizer, use_cpu=True)
    for given in (Dataset.from_list(rows), iter(rows)):
        with pytest.raises(Stopped):
            trainer.train(given)

    assert isinstance(seen[0], Dataset)
    assert seen[1] == rows
    with pytest.raises(
        ConfigError, match=r"rows must be rows, not a path, got .*\. perturn.train takes a path"
    ):
        trainer.train("rows.jsonl")


def test_a_credit_that_does_not_say_what_it_reads_is_refused(experts):
    """An object of a class without needs."""
    with pytest.raises(ConfigError, match="credit 'object' must have needs; write needs"):
        weights_of(experts, object())


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("expert-pairs", r"give experts=collect"),
        (
            "corrections",
            "needs distance and corrections by a world's expert, which make_rows does not provide",
        ),
        ("progress-pairs", "needs distance, which make_rows does not provide"),
        ("groups", "credit is missing, and rows GroupRows are weighed by one"),
        ("group-pair", "did you mean|Did you mean"),
        (None, "rows must be a name, a section with a name, or an object of a class, got None"),
        (GroupPairs, "rows must be a name.*GroupPairs"),
    ],
)
def test_rows_that_lack_something_are_rejected(explored, rows, says):
    """With what to give."""
    with pytest.raises(ConfigError, match=says):
        perturn.make_rows(explored, rows)


@pytest.mark.parametrize(
    ("rows", "given", "says"),
    [
        (
            "group-pairs",
            {"credit": "rloo"},
            "credit belongs to rows of groups; leave it out, since rows GroupPairs are weighed in training",
        ),
        ("group-pairs", {"answer": "x"}, "answer belongs to rows of groups"),
        ("group-pairs", {"keep_no_spread": True}, "keep_no_spread belongs to rows of groups"),
        ("groups", {"credit": "rloo", "failed": "zero"}, "failed belongs to the settings of rows GroupRows"),
    ],
)
def test_arguments_that_nothing_reads_are_rejected(explored, rows, given, says):
    """Rather than left out in silence."""
    with pytest.raises(ConfigError, match=says):
        perturn.make_rows(explored, rows, **given)
