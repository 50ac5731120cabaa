"""20 of 20: killed at any moment and started again, a run ends as the one that nothing interrupted, to the bit."""

import pytest

from .kills import Forks, differing, kill_at_random
from .online import GROUPS, recipe_of

FILES = ["trajectories/explore*.jsonl", "evaluation/*.jsonl", "credits/*.jsonl", "metrics/*.jsonl"]
FILES += ["checkpoints/*/model.safetensors"]
WORDS = ["online.yaml", *GROUPS, "deterministic=true", "worlds.processes=0", "align.save_steps=1"]


@pytest.fixture
def forks(place):
    """Starts `perturn` in the folder of the world and its recipe."""
    recipe_of(place)
    return Forks(place)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_three_iterations_survive_twenty_kills(forks):
    """One kill in each twentieth of the run; episodes with log-probabilities, credits, metrics and weights."""
    killed = kill_at_random(forks, "kills", WORDS, kills=20)

    runs = forks.place / "runs"
    assert len(killed) == 20
    assert {name: differing(runs / "kills", runs / name, FILES) for name in killed} == {
        name: [] for name in killed
    }
