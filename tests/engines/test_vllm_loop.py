"""Whole runs of `perturn run` on vLLM: offline, online, and over Ray. Run by `make test-vllm`; skipped elsewhere."""

import json
import os
import subprocess
import sys
from itertools import pairwise

import pytest
from safetensors.torch import load_file

from perturn.data.store import read_pairs, read_trajectories
from perturn.data.token_lag import lags
from perturn.types import Status
from run.online import GROUPS, recipe_of
from support.vllm import NEEDS_VLLM, serving

pytestmark = NEEDS_VLLM

PERTURN = [sys.executable, "-m", "perturn"]
ON_VLLM = ["engine={name: vllm, cache_gigabytes: 0.2, options: {enforce_eager: true}}", "sft.epochs=4"]
OFFLINE = ["iterations=1", "align.minibatches=1", "align.loss.name=tlm-dre"]
ONLINE = ["iterations=2", *GROUPS]


@pytest.fixture(scope="module")
def place(tmp_path_factory, folder):
    """A folder with a world and a recipe of many iterations, and a cache of its own."""
    found = tmp_path_factory.mktemp("loop")
    recipe_of(found)
    (found / "tiny").symlink_to(folder)
    return found


def run(place, name, *words):
    """`perturn run` of the recipe on vLLM as a process of its own; the folder of the run and what it says of itself."""
    command = [*PERTURN, "run", "online.yaml", f"name={name}", *ON_VLLM, *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PERTURN_CACHE": str(place / "cache")}
    ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = place / "runs" / name
    return found, json.loads((found / "summary.json").read_text())


def assert_played_on_vllm(found, policies):
    """Every episode is whole, each exploration is of the policy before it, and training computes what vLLM sampled."""
    files = sorted((found / "trajectories").glob("explore*.jsonl"))
    explored = [list(read_trajectories(file)) for file in files]
    assert [{one.policy.partition("@")[0] for one in part} for part in explored] == [
        {name} for name in policies
    ]
    assert {one.status for part in explored for one in part} == {Status.COMPLETED}
    for file in found.glob("metrics/agreement*.json"):
        assert json.loads(file.read_text())["max"] < 1e-4, file


def assert_moved(found, policies):
    """Each policy has other weights than the one before."""
    weights = [load_file(found / "checkpoints" / name / "model.safetensors") for name in policies]
    for before, after in pairwise(weights):
        assert any((before[name] != after[name]).any() for name in before)


@pytest.fixture(scope="module")
def offline(place):
    """SFT, exploration, pairs within groups, tlm-DRE, scores of all three policies."""
    return run(place, "offline", *OFFLINE)


def test_an_offline_run_plays_on_vllm(offline):
    """It explores with the policy after SFT, and trains on pairs of what that has played."""
    found, summary = offline

    assert [row["name"] for row in summary["policies"]] == ["base", "sft", "tlm-dre"]
    assert len(read_pairs(found / "pairs.jsonl")) > 0
    assert_played_on_vllm(found, ["sft"])
    assert_moved(found, ["sft", "tlm-dre"])


def test_a_trained_policy_is_served_by_its_folder(place, offline):
    """As docs/how-to/export.md has it: `vllm serve` knows nothing of us, and is scored as a model behind an API."""
    found, _ = offline
    with serving(found / "checkpoints" / "tlm-dre", "--served-model-name", "tlm-dre") as address:
        command = [
            *PERTURN,
            "evaluate",
            "--model",
            "tlm-dre",
            "--environment",
            "perturn_letters:Letters",
            "--n",
            "2",
        ]
        words = [
            "protocol.format=action",
            "engine.name=api",
            "engine.api_key_env=null",
            "evaluate.sampling.max_new_tokens=4",
            f"engine.base_url={address}/v1",
        ]
        ended = subprocess.run([*command, *words], cwd=place, capture_output=True, text=True, timeout=600)

    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("process", []),
        ("ray", ["cluster=local", "worlds.processes=1"]),
        ("launched", ["launch.processes=2", "align.learning_rate=1.0e-4"]),
    ],
)
def test_an_online_run_of_two_iterations_plays_on_vllm(place, name, words):
    """The second iteration is explored by the weights that the first has trained, on Ray and by two processes too."""
    if name == "ray":
        pytest.importorskip("ray", reason='needs pip install "perturn[ray]"')
    found, summary = run(place, name, *ONLINE, *words)

    assert [row["name"] for row in summary["policies"]][-1] == "ppo-clip-002"
    assert_played_on_vllm(found, ["sft", "ppo-clip-001"])
    assert_moved(found, ["sft", "ppo-clip-002"])


def test_exploration_beside_training_plays_on_vllm(place):
    """No token is more than one version older than the policy that learns from it, and all episodes are there."""
    found, summary = run(place, "stale", *ONLINE, "credit.name=rloo", "iterations=3", "staleness=1")
    files = sorted((found / "trajectories").glob("explore*.jsonl"))
    lag = [
        each
        for number, file in enumerate(files)
        for one in read_trajectories(file)
        for each in lags(one, number)
    ]

    assert [row["name"] for row in summary["policies"]][-1] == "ppo-clip-003"
    assert len(files) == 3
    assert set(lag) == {0, 1}
