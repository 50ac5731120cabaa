"""Training through SkyRL's server on the CPU; PERTURN_SKYRL_PYTHON names a Python with `skyrl[tinker,jax]`."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from perturn.chat.model_names import load_tokenizer
from perturn.chat.tokens import Renderer
from perturn.data.store import write_pairs
from perturn.policy.models import load_model
from perturn.types import PreferencePair
from support.ports import free_port

from .rows import trajectory

PYTHON = os.environ.get("PERTURN_SKYRL_PYTHON")
ROOT = Path(__file__).parents[2]
CONFIG = {"max_lora_adapters": 16, "max_lora_rank": 8, "train_micro_batch_size": 4}

pytestmark = [
    pytest.mark.slow,  # JAX compiles for minutes
    pytest.mark.skipif(PYTHON is None, reason="PERTURN_SKYRL_PYTHON names no Python with SkyRL"),
]


@pytest.fixture
def model(tmp_path):
    """The bundled policy in float32; SkyRL computes in the type that the config names."""
    model = load_model("tiny-agent")
    model.config.dtype = "float32"
    model.save_pretrained(tmp_path / "model")
    load_tokenizer("tiny-agent").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def url(tmp_path, model):
    """A server of that policy."""
    port = free_port()
    words = [PYTHON, str(ROOT / "tests/support/skyrl_server.py"), "--base-model", str(model), "--port", port]
    words += ["--backend", "jax", "--backend-config", json.dumps(CONFIG)]
    words += [
        "--checkpoints-base",
        str(tmp_path / "saved"),
        "--database-url",
        f"sqlite:///{tmp_path}/tinker.db",
    ]
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(
            words, stdout=log, stderr=log, env=os.environ | {"JAX_PLATFORMS": "cpu"}, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{address}/api/v1/healthz", timeout=1).close()
                break
            except OSError:
                time.sleep(0.5)
        yield address
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def rows_of_known_words(renderer):
    """Pairs of words of the policy's vocabulary, of unequal lengths, whose rejected sides have sampled tokens."""
    words = ["apple", "kettle", "pot", "book 1", "cd 1", "fridge 1"]
    rows = []
    for n in range(4):
        said = [" in ".join(words[n : n + 1 + (n + k) % 3]) for k in range(1 + n % 3)]
        chosen = trajectory(*said, task=f"t/{n}", observed=words[n + 2])
        turns = []
        for turn in trajectory(*said[::-1], "vase", observed=words[n + 2]).turns:
            ids = [*renderer.tokenizer.encode(turn.action.text), min(renderer.end_ids)]
            turns.append(replace(turn, action=renderer.action(ids, [-2.0] * len(ids))))
        rows.append(PreferencePair(chosen, replace(chosen, turns=tuple(turns))))
    return rows


@pytest.mark.timeout(1800)
def test_log_probabilities_gradients_and_steps_are_those_here(url, model, tmp_path):
    """The figures of `benchmarks/remote_training.py`, for made-up sampled sides."""
    pytest.importorskip("tinker")

    rows = rows_of_known_words(Renderer(load_tokenizer(str(model))))
    file = tmp_path / "pairs.jsonl"
    write_pairs(file, rows)

    script = [sys.executable, str(ROOT / "benchmarks/remote_training.py"), "--json"]
    words = [*script, "--url", url, "--model", str(model), "--pairs", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert "the tokens of a sequence and the sequences of a step" in found["convention"]
    assert found["equal_weights"] < 1e-4
    assert found["after_20_steps"] < 1e-3 < found["moved_by"]
    assert all(value <= 1e-6 for value in found["gradients"].values())
