"""The stages as functions: on objects, without a folder, equal to what a run does."""

import pytest
import torch
from torch.testing import assert_close

import perturn
from perturn.credit import CREDITS
from perturn.errors import ConfigError
from perturn.quantities.readers import open_reader
from perturn.quantities.reference_logprobs import reference_of
from perturn.types import EpisodeProtocol, Sampling
from support.models import make_tiny_model

OWN = "own_environment:GuessNumber"
RULES = EpisodeProtocol("guess", format="action", system="Guess.", max_turns=3)
SHORT = Sampling(temperature=1.0, max_new_tokens=4)


@pytest.fixture(scope="module")
def experts(own_environment):
    """The expert's episodes of four numbers."""
    return perturn.collect("expert", OWN, n=4, protocol=RULES)


@pytest.fixture(scope="module")
def explored(own_environment, tokenizer):
    """What a model that knows nothing does on the same four."""
    return perturn.collect(make_tiny_model(), OWN, n=4, protocol=RULES, sampling=SHORT, tokenizer=tokenizer)


def test_episodes_come_in_the_order_of_their_tasks(own_environment, experts, explored):
    """Both of the same panel, whoever ended first."""
    assert [one.key for one in experts] == [one.key for one in explored]
    assert all(one.success for one in experts)
    assert {one.policy.partition("@")[0] for one in explored} == {"policy"}


def test_a_maker_of_worlds_will_do(own_environment):
    """Such as a class of a notebook, which no process could import."""
    found = perturn.collect("expert", own_environment.GuessNumber, n=2, protocol=RULES)

    assert [one.success for one in found] == [True, True]


@pytest.mark.parametrize(
    ("environment", "settings", "says"),
    [
        (7, {}, "environment must be a name, a section with a name, or what makes a world, got 7"),
        ({"size": 3}, {}, "got {'size': 3}; `perturn list environments`"),
        (OWN, {"samples": 0}, "samples must be >= 1, got 0"),
        (OWN, {"concurrency": 0}, "concurrency must be >= 1, got 0"),
    ],
)
def test_what_nothing_can_be_played_by_is_refused(own_environment, environment, settings, says):
    """Not zero episodes as if they had been played."""
    with pytest.raises(ConfigError) as refused:
        perturn.collect("expert", environment, **settings)

    assert says in str(refused.value)


def test_an_expert_that_is_not_there_is_no_failed_episode(own_environment, monkeypatch):
    """A fault of the call, said once, before anything is played."""
    monkeypatch.delattr(own_environment.GuessNumber, "expert")

    with pytest.raises(ConfigError, match=r"has no expert; give a model as policy\."):
        perturn.collect("expert", own_environment.GuessNumber, n=2, protocol=RULES)


def test_pairs_put_the_expert_first(experts, explored):
    """Each gap is 1, so all four are kept."""
    pairs = perturn.make_pairs(experts, explored)

    assert [(pair.chosen.key, pair.rejected.key) for pair in pairs] == [(one.key, one.key) for one in experts]


def test_a_credit_without_a_model_is_the_credit(explored):
    """By name, by section and as an object, for each trajectory by itself."""
    expected = [CREDITS["discount"](gamma=0.5)([one])[0] for one in explored]

    for credit in ({"name": "discount", "gamma": 0.5}, CREDITS["discount"](gamma=0.5)):
        assert_close(perturn.assign_credit(explored, credit), expected, rtol=0, atol=0)


def test_a_credit_that_reads_a_reference_weighs_as_training_does(
    experts, explored, tokenizer, tiny_model, tmp_path
):
    """The trainer's own rows of the same pairs hold the same numbers."""
    pairs = perturn.make_pairs(experts, explored)
    trainer = perturn.TurnTrainer(
        tiny_model,
        perturn.TurnConfig(
            output_dir=str(tmp_path), report_to="none", reference_cache=str(tmp_path / "cache")
        ),
        train_dataset=pairs,
        processing_class=tokenizer,
    )

    weights = perturn.assign_credit(
        [pair.rejected for pair in pairs], "confidence", model=tiny_model, tokenizer=tokenizer
    )

    assert_close(weights, [row.weight[1] for row in trainer.train_dataset.rows], rtol=0, atol=0)


def test_a_credit_that_reads_a_reference_asks_for_one(explored):
    """There is no default policy."""
    with pytest.raises(ConfigError, match="credit Confidence reads a reference policy; give model="):
        perturn.assign_credit(explored)
    with pytest.raises(
        ConfigError, match=r"needs matches, which are computed of a run.s episodes; give `perturn"
    ):
        perturn.assign_credit(explored, "matchtir")
    for answer in (None, 5, "no mark"):
        with pytest.raises(ConfigError, match="give answer=, the text of a turn that gives one"):
            perturn.assign_credit(explored, "igpo", model="unread", answer=answer)


def test_a_model_that_trains_is_asked_without_dropout(experts, tokenizer):
    """Twice the same weights, and it goes on training."""
    model = make_tiny_model()
    model.train()
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, _, out: torch.dropout(out, 0.5, module.training))

    found = [perturn.assign_credit(experts, "confidence", model=model, tokenizer=tokenizer) for _ in range(2)]
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


@pytest.mark.parametrize("call", [perturn.collect, perturn.evaluate])
def test_a_wrong_number_of_tasks_is_an_error_of_ours(own_environment, tiny_model, call):
    """As everywhere else, so that one `except PerturnError` is enough."""
    with pytest.raises(ConfigError, match="n must be >= 1, got 0"):
        call(tiny_model, OWN, n=0)


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"concurrency": 0}])
def test_episodes_that_nobody_would_play_are_refused(own_environment, wrong):
    """Else no episode comes back, and nothing says why."""
    with pytest.raises(ConfigError, match="must be >= 1, got 0"):
        perturn.collect("expert", OWN, n=2, protocol=RULES, **wrong)


def test_what_makes_no_world_is_refused():
    """With what would."""
    with pytest.raises(ConfigError, match=r"environment must be a name, .* got 3"):
        perturn.collect("expert", 3)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (None, "a policy must be a Hub id, a folder, a transformers model or an Engine"),
        (7, "got 7"),
        ("tiny", "tokenizer="),
    ],
)
def test_a_policy_that_is_none_is_refused(own_environment, policy, says):
    """And a model that does not say where its tokenizer is."""
    with pytest.raises(ConfigError, match=says):
        perturn.collect(make_tiny_model() if policy == "tiny" else policy, OWN, n=1, protocol=RULES)


def test_the_public_names_are_shown():
    """And each is there."""
    assert {"collect", "make_pairs", "assign_credit", "train", "evaluate", "TurnTrainer"} <= set(dir(perturn))
    assert all(hasattr(perturn, name) for name in dir(perturn))


def test_a_credit_that_does_not_say_what_it_reads_is_refused(experts):
    """An object of a class without needs."""
    with pytest.raises(ConfigError, match="credit 'object' must have needs, a set of the names"):
        perturn.assign_credit(experts, object())
