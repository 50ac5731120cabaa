"""20 of 20: killed at any moment and started again, a run ends as the one that nothing interrupted, to the bit."""

import pytest

from .kills import Forks, differing, kill_at_random
from .test_loop import place  # noqa: F401  a fixture

FILES = ["trajectories/explore*.jsonl", "evaluation/*.jsonl", "pairs*.jsonl", "metrics/*.jsonl"]
FILES += ["checkpoints/*/model.safetensors"]
TWICE = [
    "tiny.yaml",
    "iterations=2",
    "align.loss.name=dpo",
    "align.epochs=1",
    "sft.epochs=1",
    "worlds.processes=0",
]
TWICE += ["explore.concurrency=3", "evaluate.concurrency=4", "deterministic=true"]
TWICE += ["evaluate.tasks.per_kind=2", "sft.save_steps=4", "align.save_steps=4"]


@pytest.fixture
def forks(place):  # noqa: F811
    """Starts `perturn` in the folder of the corridor."""
    found = Forks(place)
    yield found
    found.close()


@pytest.mark.slow
def test_two_iterations_survive_twenty_kills(forks):
    """One kill in each twentieth of the run; episodes with log-probabilities, pairs, metrics and weights."""
    killed = kill_at_random(forks, "kills", TWICE, kills=20)

    runs = forks.place / "runs"
    assert len(killed) >= 18, "the uninterrupted run took longer than the others"
    assert {name: differing(runs / "kills", runs / name, FILES) for name in killed} == {
        name: [] for name in killed
    }
