"""What a dry run says of models beside the policy."""

from dataclasses import replace

import pytest

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.config.sections import User
from perturn.estimate.episode_lengths import Episodes
from perturn.estimate.side_model_costs import side_model_costs

FOUND = Episodes(explore=10, evaluate=5, limit=3.0, turns=3.0, prompt=100.0, heard=40.0, said=10.0)
PRICED = {"name": "api", "prompt_price": 2.0, "completion_price": 10.0}


def recipe(**judge):
    """Two iterations, whose judge has a rubric of 40 characters."""
    return parse(
        Recipe,
        {
            "name": "judged",
            "model": {"name": "tiny"},
            "environment": {"name": "alfworld-like"},
            "iterations": 2,
            "explore": {"samples": 2},
            "rows": {"name": "groups"},
            "credit": {"name": "rloo"},
            "align": {"loss": {"name": "ppo-clip"}},
            "reward": {
                "judge": {"model": "m", "rubric": "r" * 40, "sampling": {"max_new_tokens": 90}, **judge}
            },
        },
    )


@pytest.mark.parametrize(
    ("judge", "asked", "length", "tokens"),
    [({"samples": 3}, 60, 260, 21), ({"of": "turn"}, 60, 210, 18)],
    ids=["episodes", "turns"],
)
def test_a_judge_is_asked_of_all_explored_episodes(judge, asked, length, tokens):
    """2 x 10 episodes of 3 turns of 50 tokens, after 10 of the rubric and 100: 260 in all, 210 at the mean turn."""
    (said,) = side_model_costs(recipe(sampling={"max_new_tokens": 90, "temperature": 1.0}, **judge), FOUND)

    assert said == (
        f"The judge is asked about {asked} questions of {length} tokens, and answers each with at most 90: "
        f"{tokens}k tokens. What it may spend: no bound: set reward.judge.engine.max_cost or "
        "reward.judge.engine.max_tokens_total."
    )


def test_prices_of_the_engine_are_used():
    """20 questions: 20 * (260 * 2 + 90 * 10) / 1e6 = 0.0284."""
    (said,) = side_model_costs(recipe(engine=PRICED), FOUND)

    assert "7k tokens, which cost about 0.03 at the prices of its engine." in said


def test_all_samples_of_an_evaluation_are_counted():
    """2 x 10 explored episodes, and 4 x 3 x 5 scored ones."""
    given = replace(recipe(), reward=None, user=User("m"))
    given = replace(given, evaluate=replace(given.evaluate, samples=4))

    (said,) = side_model_costs(given, FOUND)

    assert said.startswith("The user is asked about 240 questions of 200 tokens")


def test_a_simulated_user_is_asked_in_each_turn():
    """2 x 10 explored episodes and 3 x 5 scored ones, of 3 turns each."""
    (said,) = side_model_costs(replace(recipe(), reward=None, user=User("m")), FOUND)

    assert said.startswith("The user is asked about 105 questions of 200 tokens")
