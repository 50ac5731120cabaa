"""Check that two runs have equal episodes, losses, scores and policies."""

import json

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from perturn.data.store import read_trajectories

EPISODES = {
    "trajectories/expert.jsonl": 2 * 6,
    "trajectories/explore.jsonl": 2 * 2 * 2,
    "evaluation/base.jsonl": 2 * 3,
    "evaluation/sft.jsonl": 2 * 3,
    "evaluation/tlm-dre.jsonl": 2 * 3,
}
STEPS = {"metrics/sft.jsonl": 4 * 8 // 4, "metrics/align.jsonl": 2 * 8 // 2}


def episodes(file):
    """Return the content of each episode by key, without log-probabilities, whose rounding depends on the batch."""
    found = {}
    for one in read_trajectories(file):
        assert one.key not in found
        acts = [(turn.observation_text, turn.action.text, turn.action.token_ids) for turn in one.turns]
        found[one.key] = (acts, one.total_reward, one.success, one.seed, one.status, one.policy)
    return found


def losses(file):
    """Return the loss of each optimizer step in a metrics file. Each step must occur once."""
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [entry["step"] for entry in entries]
    assert steps == sorted(set(steps))
    return {entry["step"]: entry["loss"] for entry in entries}


def assert_equal_runs(one, other):
    """Check that two runs have equal episodes, training and weights."""
    for file, count in EPISODES.items():
        assert len(episodes(one / file)) == count
        assert episodes(one / file) == episodes(other / file)
    for file, count in STEPS.items():
        assert list(losses(one / file)) == list(range(1, count + 1))
        assert losses(one / file) == pytest.approx(losses(other / file), abs=1e-4)
    for policy in ("sft", "tlm-dre"):
        assert_close(*(load_file(run / "checkpoints" / policy / "model.safetensors") for run in (one, other)))


def without_time(summary):
    """Return a summary without times, and without numbers of training, whose rounding depends on the batches."""
    left_out = ("seconds", "iterations")
    return {key: value for key, value in json.loads(summary.read_text()).items() if key not in left_out}
