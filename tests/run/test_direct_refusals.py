"""Calls of the loop on objects in memory that are rejected, and why."""

import pytest

import perturn
from perturn.errors import ConfigError, DataError
from perturn.types import EpisodeProtocol, Sampling
from support.models import make_tiny_model
from support.scripted import Scripted

OWN = "own_environment:GuessNumber"
RULES = EpisodeProtocol("guess", format="action", system="Guess.", max_turns=3)


@pytest.mark.parametrize(
    ("environment", "settings", "says"),
    [
        (7, {}, "environment must be a name, a section with a name, or what makes a world, got 7"),
        ({"size": 3}, {}, "got {'size': 3}. `perturn list environments`"),
        (OWN, {"samples": 0}, "samples must be >= 1, got 0"),
        (OWN, {"concurrency": 0}, "concurrency must be >= 1, got 0"),
    ],
)
def test_what_nothing_can_be_played_by_is_refused(own_environment, environment, settings, says):
    """Not zero episodes as if they had been played."""
    with pytest.raises(ConfigError) as refused:
        perturn.collect("expert", environment, **settings)

    assert says in str(refused.value)


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


def test_episodes_of_a_sharpened_policy_do_not_train_a_loss_of_groups(own_environment, tokenizer):
    """Their log-probabilities are at temperature 1, so the first ratio would be 1 and wrong."""
    how = Sampling(temperature=0.5, max_new_tokens=4)
    played = perturn.collect(make_tiny_model(), OWN, n=2, protocol=RULES, sampling=how, tokenizer=tokenizer)
    trainer = perturn.Trainer(make_tiny_model(), loss="ppo-clip", tokenizer=tokenizer, use_cpu=True)

    assert all(one.sharpened for one in played)
    with pytest.raises(DataError, match="sampled at another temperature or top_p than 1"):
        trainer.train(perturn.weigh(played, "rloo"))


def test_what_makes_no_world_is_refused():
    """With what would."""
    with pytest.raises(ConfigError, match=r"environment must be a name, .* got 3"):
        perturn.collect("expert", 3)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (None, "a model must be a Hub id, a folder or a transformers model, or to play an Engine"),
        (7, "got 7"),
        ("tiny", "tokenizer="),
    ],
)
def test_a_policy_that_is_none_is_refused(own_environment, policy, says):
    """And a model that does not say where its tokenizer is."""
    with pytest.raises(ConfigError, match=says):
        perturn.collect(make_tiny_model() if policy == "tiny" else policy, OWN, n=1, protocol=RULES)


@pytest.mark.parametrize(
    ("explore", "says"),
    [
        (
            {"name": "branches", "policy": "sft"},
            "plays with policy 'sft' of a run, and collect has no run; leave out explore.policy",
        ),
        ("wrong-branches", "distance, which collect does not provide"),
        ("expert-branches", "give experts="),
        ({"name": "window", "samples": 2}, "explore.samples belongs to collect itself; give collect"),
        ("branch", "did you mean|Did you mean"),
        (None, "explore must be a name, a section with a name, or an object of a class, got None"),
        ([], r"explore must be a name.*got \[\]"),
        ({"every": 2}, "every is a setting of explore.name=branches"),
    ],
)
def test_an_explorer_that_needs_a_run_is_rejected(own_environment, tiny_model, explore, says):
    """Before anything is played."""
    with pytest.raises(ConfigError, match=says):
        perturn.collect(tiny_model, OWN, n=2, protocol=RULES, explore=explore)


@pytest.mark.parametrize("wrong", [None, 3, "abc", {}, [1], [None]], ids=repr)
def test_what_are_no_episodes_is_rejected(tiny_model, wrong):
    """By every function that takes episodes, with the name of the argument."""
    calls = {
        "explored": lambda: perturn.make_rows(wrong),
        "experts": lambda: perturn.make_rows([], experts=wrong),
        "branches": lambda: perturn.make_rows([], branches=wrong),
        "trajectories": lambda: perturn.weigh(wrong, "uniform"),
        "earlier": lambda: perturn.collect(tiny_model, OWN, earlier=wrong),
    }
    for name, call in calls.items():
        if (name, wrong) != ("branches", None):
            with pytest.raises(
                ConfigError, match=f"^{name} must be a list of trajectories, as collect returns them"
            ):
                call()


@pytest.mark.parametrize("wrong", [None, 3, {}], ids=repr)
def test_what_are_no_rows_is_rejected(tiny_model, tokenizer, wrong):
    with pytest.raises(
        ConfigError, match=r"^rows must be pairs or trajectories, as make_rows and weigh return them"
    ):
        perturn.train(tiny_model, wrong, tokenizer=tokenizer)
    with pytest.raises(
        ConfigError, match=r"^rows must be pairs or trajectories, as make_rows and weigh return them"
    ):
        perturn.Trainer(tiny_model, tokenizer=tokenizer).train(wrong)


def test_what_is_no_model_or_credit_is_rejected(tmp_path):
    """By the classes too, before anything is loaded or read."""
    for call in (lambda: perturn.train(None, []), lambda: perturn.Trainer(None), lambda: perturn.Trainer(3)):
        with pytest.raises(ConfigError, match=r"^a model must be a Hub id, a folder or a transformers model"):
            call()
    with pytest.raises(ConfigError, match=r"^a model must be a Hub id, .* got None"):
        perturn.TurnTrainer(None, perturn.TurnConfig(str(tmp_path), use_cpu=True), train_dataset=[])
    with pytest.raises(ConfigError, match=r"^credit must be a name, a section with a name, .* got None"):
        perturn.weigh([], None)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"iteration": 0}, "iteration must be a number >= 1, got 0"),
        ({"sampling": {"temperature": 1.0}}, "sampling must be a perturn.types.Sampling"),
        (
            {"protocol": {"name": "guess"}},
            "protocol must be the name of rules or a perturn.types.EpisodeProtocol",
        ),
    ],
)
def test_arguments_of_a_wrong_kind_are_rejected(own_environment, tiny_model, given, says):
    """In one line, before anything is played."""
    with pytest.raises(ConfigError, match=says):
        perturn.collect(tiny_model, OWN, **{"n": 1, "protocol": RULES, **given})
    if "iteration" not in given:
        with pytest.raises(ConfigError, match=says):
            perturn.evaluate(tiny_model, OWN, **{"n": 1, "protocol": RULES, **given})


def test_what_an_engine_object_does_not_read_is_rejected(own_environment, tokenizer):
    """It has a tokenizer, and it is an engine."""
    given = {"engine": {"name": "local"}, "tokenizer": tokenizer}
    with pytest.raises(ConfigError, match="engine and tokenizer belong to a policy that is a model"):
        perturn.collect(Scripted(), OWN, n=1, protocol=RULES, **given)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"minibatches": 0}, "minibatches must be >= 1"),
        ({"iterations": 0}, "iterations must be >= 1"),
        ({"reference": "average"}, "previous or start"),
        ({"output_dir": "x"}, "save trainer.model"),
        ({"learning_rat": 1}, "learning_rate"),
        ({"warmup_steps": 0.1}, "warmup_steps must be a number of steps without iterations, got 0.1"),
        ({"lr_scheduler_type": "linear"}, "lr_scheduler_type must be constant or constant_with_warmup"),
        ({"minibatches": 1.5}, "minibatches must be >= 1 and whole, got 1.5"),
        ({"loss": "tlm-der"}, "Did you mean 'tlm-dre'"),
        ({"loss": None}, "loss must name a loss"),
        ({"loss": "ppo-clip", "credit": "rlo"}, "Did you mean 'rloo'"),
        ({"loss": "tlm-dre", "credit": "rloo"}, "compares the trajectories of a group"),
        ({"loss": "kto", "credit": "discount"}, "has no effect with loss 'kto'"),
    ],
)
def test_wrong_settings_of_a_trainer_are_rejected_at_once(settings, says):
    """Before an episode is played."""
    with pytest.raises(ConfigError, match=says):
        perturn.Trainer(make_tiny_model(), **settings)
