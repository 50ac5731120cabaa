"""A score without a recipe: what is chosen where nobody says, and what the run is called."""

import pytest

from perturn.config.stages import stages
from perturn.errors import ConfigError
from perturn.run.execute import check
from perturn.run.score_recipe import scoring_recipe
from perturn.types import Observation, Task

OWN = "own_environment:GuessNumber"


class Tooled:
    """A world with tools, and many tasks in a split of its own."""

    name = "tooled-1.0"

    def tasks(self, split):
        """Eighty."""
        return [Task(f"{split}/{n}", split=split) for n in range({"validation": 80}[split])]

    def reset(self, task, seed):
        """Offer a tool."""
        return Observation("Ask.", tools=({"type": "function", "function": {"name": "ask"}},))

    def step(self, action):
        """It is over."""
        return Observation("", terminated=True)

    def close(self):
        """Nothing is held."""


def test_a_score_is_one_stage():
    """No training, no exploration: the model is evaluated, and that is all."""
    recipe = scoring_recipe("some/model", "alfworld-like")

    assert [stage.name for stage in stages(recipe)] == ["evaluate-base"]
    assert recipe.model.name == "some/model"


def test_an_environments_own_rules_are_taken():
    """alfworld-like plays by alfworld-eto, and decodes as that says."""
    recipe = scoring_recipe("m", "alfworld-like")

    assert recipe.protocol.name == "alfworld-eto"
    assert recipe.evaluate.sampling is None
    assert recipe.evaluate.tasks.split == "valid_unseen"


def test_an_environment_without_rules_gets_plain_ones(own_environment):
    """An action, twenty turns and the docstring; its split `test` has four tasks, fewer than fifty."""
    recipe = scoring_recipe("m", OWN)

    rules = recipe.protocol
    assert (rules.name, rules.format, rules.max_turns) == ("default", "action", 20)
    assert rules.system == own_environment.GuessNumber.__doc__
    assert (recipe.evaluate.tasks.split, recipe.evaluate.tasks.n) == ("test", 4)
    assert recipe.evaluate.sampling.max_new_tokens == 32


def test_a_world_with_tools_is_played_with_them():
    """Its first observation offers one; of its 80 tasks 50 are taken."""
    recipe = scoring_recipe("m", f"{__file__}:Tooled")

    assert recipe.protocol.format == "tools"
    assert (recipe.evaluate.tasks.split, recipe.evaluate.tasks.n) == ("validation", 50)


def test_words_replace_what_is_chosen(own_environment):
    """An option and a `key=value` word."""
    recipe = scoring_recipe(
        "m", OWN, split="train", n=3, overrides=["protocol.format=action", "name=mine", "seed=4"]
    )

    assert (recipe.evaluate.tasks.split, recipe.evaluate.tasks.n) == ("train", 3)
    assert (recipe.protocol.format, recipe.name, recipe.seed) == ("action", "mine", 4)


@pytest.mark.parametrize(("format", "tokens"), [("action", 32), ("react", 128)])
def test_an_action_without_a_thought_is_short(own_environment, format, tokens):
    """A policy that babbles would else take four times as long over a game of many turns."""
    recipe = scoring_recipe("m", OWN, overrides=[f"protocol.format={format}"])

    assert recipe.evaluate.sampling.max_new_tokens == tokens


def test_the_name_follows_from_the_settings(own_environment):
    """So the same command goes on, and another one does not meet its folder."""
    first, same, other = (scoring_recipe("org/m", OWN, n=n) for n in (2, 2, 3))

    assert first.name == same.name != other.name
    assert first.name.startswith("GuessNumber-m-")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"split": "tset"}, "has no tasks for split 'tset'"),
        ({"n": 0}, "n must be >= 1, got 0"),
        (
            {"overrides": ["environment=null"]},
            "the environment sets environment.name; leave environment=... out",
        ),
        ({"n": 5}, "4 tasks are in split 'test', but n=5"),
        ({"protocol": "alfworld-et"}, "Did you mean 'alfworld-eto'"),
        ({"overrides": ["sed=1"]}, "unknown key 'sed'"),
        ({"overrides": ["environment.size=1"]}, "unknown key 'environment.size'"),
    ],
)
def test_a_mistake_is_refused_before_work(own_environment, tiny_folder, settings, says):
    """By the recipe, or by the check that every run has before its folder is made."""
    with pytest.raises(ConfigError, match=says):
        check(scoring_recipe(str(tiny_folder), OWN, **settings))


def test_a_key_is_not_written_into_the_run_folder(own_environment):
    """As in a recipe of a file."""
    with pytest.raises(ConfigError, match=r"environment\.token holds what looks like a key"):
        scoring_recipe("m", "alfworld-like", overrides=["environment.token=sk-planted9f8e7d6c5b4a3928"])
