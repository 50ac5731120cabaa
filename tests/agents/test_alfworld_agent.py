"""An unchanged program of OpenAI's client plays as the built-in environment does: token for token."""

from pathlib import Path

import pytest

import perturn
from perturn.io.user_code import load_object
from perturn.types import EpisodeProtocol, Sampling

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent.py"
GREEDY, WARM = Sampling(max_new_tokens=16), Sampling(temperature=1.0, max_new_tokens=16)
RULES = EpisodeProtocol("alfworld-lab", format="action", max_turns=20)


@pytest.mark.slow
def test_the_same_games_token_for_token():
    """Two games, two samples each, at temperature 1: the same ids, log-probabilities and scores."""
    agent = {"name": "agent", "tasks": f"{EXAMPLE}:tasks", "function": f"{EXAMPLE}:rollout"}
    how = {"n": 2, "samples": 2, "sampling": WARM, "concurrency": 4, "seed": 3}

    games = {"name": "alfworld-like", "kinds": list(load_object(f"{EXAMPLE}:KINDS")), "train_games": 1800}
    built_in = perturn.collect("tiny-agent", games, protocol=RULES, **how)
    played = perturn.collect("tiny-agent", agent, **how)

    assert [one.error for one in played] == [None] * 4
    assert [one.key for one in played] == [one.key for one in built_in]
    for ours, theirs in zip(played, built_in, strict=True):
        assert [turn.action.token_ids for turn in ours.turns] == [
            turn.action.token_ids for turn in theirs.turns
        ]
        assert (ours.total_reward, ours.success) == (theirs.total_reward, theirs.success)
        assert [turn.observation for turn in ours.turns] == [turn.observation for turn in theirs.turns]
        assert ours.prompt == theirs.prompt
        assert (ours.is_linear, ours.policy, ours.seed) == (True, theirs.policy, theirs.seed)
