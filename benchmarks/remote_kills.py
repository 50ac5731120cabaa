"""Kills of client and server of a run through a service at random moments, after which the run ends with its episodes.

    python benchmarks/remote_kills.py --server-python PYTHON --place FOLDER --kills 20

`PYTHON` has `skyrl[tinker,jax]`; this one has tinker. A killed server is started again with its database and its saved
states. A run that ended is followed by another, until there were so many kills. `FOLDER/kills.jsonl` has a line for
each kill and for each run that ended, so that a second call goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

from free_port import free_port

ROOT = Path(__file__).parents[1]
ITERATIONS, EPISODES, SCORED = 4, 8, 4
RECIPE = """
name: online
model: {{name: {place}/model}}
environment: {{name: alfworld-like}}
protocol: {{name: alfworld-lab, max_turns: 4}}
engine: {{name: tinker, base_url: "{url}", patience: 5}}
backend: {{name: tinker, base_url: "{url}", patience: 5}}
iterations: 4
explore: {{per_iteration: 2, samples: 4, sampling: {{temperature: 1.0, max_new_tokens: 16}}, concurrency: 8}}
rows: {{name: groups}}
credit: {{name: anchor-rloo}}
align: {{loss: {{name: ppo-clip}}, minibatches: 2, lora: {{rank: 8}}, max_grad_norm: null, save_steps: 1}}
evaluate: {{tasks: {{split: valid_seen, n: 4}}, sampling: {{max_new_tokens: 16}}, every: 4}}
output: {place}/runs
"""
"""Recipe with 8 episodes an iteration, and two scores of 4 episodes."""


def main() -> None:
    """Kill, until there were enough."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server-python", required=True, help="Python with SkyRL")
    parser.add_argument("--place", required=True, type=Path, help="folder to work in")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--longest", type=float, default=90.0, help="seconds before a kill, at most")
    options = parser.parse_args()
    place: Path = options.place.resolve()
    prepare(place)
    journal = place / "kills.jsonl"
    noted = [json.loads(line) for line in journal.read_text().splitlines()] if journal.is_file() else []
    draw, port = random.Random(len(noted)), free_port()
    (place / "online.yaml").write_text(RECIPE.format(place=place, url=f"http://127.0.0.1:{port}"))
    kills, ended = (sum(one["what"] == what for one in noted) for what in ("kill", "ended"))
    server = start_server(options.server_python, place, port)
    try:
        while kills < options.kills:
            name = f"online-{ended}"
            client = subprocess.Popen(
                [sys.executable, "-m", "perturn", "run", str(place / "online.yaml"), f"name={name}"],
                cwd=place,
                stdout=(place / "client.log").open("ab"),
                stderr=subprocess.STDOUT,
            )
            try:
                client.wait(draw.uniform(10, options.longest))
            except subprocess.TimeoutExpired:
                whom = draw.choice(["client", "server"])
                note = {"what": "kill", "whom": whom, "run": name, "stages": stages_of(place / "runs" / name)}
                if whom == "client":
                    client.kill()
                    client.wait()
                else:
                    os.killpg(server.pid, signal.SIGKILL)
                    server.wait()
                    began = time.monotonic()
                    client.wait(900)
                    note |= {
                        "client_stopped_after": round(time.monotonic() - began, 1),
                        "code": client.returncode,
                    }
                    server = start_server(options.server_python, place, port)
                kills += 1
            else:
                note = {"what": "ended", "run": name, "code": client.returncode}
                note["episodes"] = counts_of(place / "runs" / name)
                ended += client.returncode == 0
            with journal.open("a") as lines:
                print(json.dumps(note), file=lines)
            print(json.dumps(note), flush=True)
            if note.get("code") == 0 and not as_expected(note["episodes"]):
                raise SystemExit(f"{name} has other episodes than it asked for: {note['episodes']}")
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def prepare(place: Path) -> None:
    """Write the model, in the type that SkyRL computes in."""
    if (place / "model" / "config.json").is_file():
        return
    from perturn.chat.model_names import load_tokenizer
    from perturn.policy.models import load_model

    model = load_model("tiny-agent")
    model.config.dtype = "float32"
    model.save_pretrained(place / "model")
    load_tokenizer("tiny-agent").save_pretrained(place / "model")


def start_server(python: str, place: Path, port: int) -> subprocess.Popen[bytes]:
    """A server that keeps its states in the folder, once it answers."""
    config = {
        "max_lora_adapters": 40,
        "max_lora_rank": 8,
        "train_micro_batch_size": 4,
        "sample_max_num_sequences": 8,
    }
    words = [python, str(ROOT / "tests/support/skyrl_server.py"), "--base-model", str(place / "model")]
    words += ["--port", str(port), "--backend", "jax", "--backend-config", json.dumps(config)]
    words += ["--checkpoints-base", str(place / "saved"), "--database-url", f"sqlite:///{place}/tinker.db"]
    own = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(place / "jax")}
    log = (place / "server.log").open("ab")
    server = subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | own, start_new_session=True)
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/healthz", timeout=1).close()
            return server
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"the server does not answer; see {place / 'server.log'}")


def stages_of(run: Path) -> list[str]:
    """The stages of a run that are done."""
    manifest = run / "manifest.json"
    stages = json.loads(manifest.read_text())["stages"] if manifest.is_file() else {}
    return [name for name, note in stages.items() if note.get("done")]


def counts_of(run: Path) -> dict[str, int]:
    """How many different episodes each exploration and score has."""
    found: Counter[str] = Counter()
    for file in (*(run / "trajectories").glob("*.jsonl"), *(run / "evaluation").glob("*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        found[file.stem] = len({(row["task"]["id"], row["sample"]) for row in rows})
        assert found[file.stem] == len(rows), f"{file} has an episode twice"
    return dict(found)


def as_expected(episodes: dict[str, int]) -> bool:
    """Whether each exploration and score has the episodes that the recipe asks for, once each."""
    explored = [count for name, count in episodes.items() if name.startswith("explore")]
    scored = [count for name, count in episodes.items() if not name.startswith("explore")]
    return explored == [EPISODES] * ITERATIONS and scored == [SCORED] * 2


if __name__ == "__main__":
    main()
