"""Kill client and server of a remote training run at random moments, and check the episodes of each finished run.

    python benchmarks/remote_kills.py --server-python PYTHON --place FOLDER --kills 20 --out kills.jsonl
    python benchmarks/remote_kills.py --server-python PYTHON --place OTHER --kills 0 --iterations 10

`PYTHON` is the interpreter of an environment with `skyrl[tinker,jax]`. The environment of this command needs tinker. A
killed server is restarted with its database and saved states. Runs follow each other until the number of kills is
reached, and the last run continues to its end. The output has a line for each kill and each finished run, so that a
second call continues the benchmark.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from free_port import free_port

ROOT = Path(__file__).parents[1]
EPISODES, SCORED = 8, 4
RECIPE = """
name: online
model: {{name: {place}/model}}
environment: {{name: alfworld-like}}
protocol: {{name: alfworld-lab, max_turns: 4}}
engine: {{name: tinker, base_url: "{url}", patience: 30}}
backend: {{name: tinker, base_url: "{url}", patience: 30}}
iterations: {iterations}
explore: {{per_iteration: 2, samples: 4, sampling: {{temperature: 1.0, max_new_tokens: 16}}, concurrency: 8}}
rows: {{name: groups}}
credit: {{name: anchor-rloo}}
align: {{loss: {{name: ppo-clip}}, minibatches: 2, lora: {{rank: 8}}, max_grad_norm: null, save_steps: 1}}
evaluate: {{tasks: {{split: valid_seen, n: 4}}, sampling: {{max_new_tokens: 16}}, every: {iterations}}}
output: {place}/runs
"""
"""Recipe with 8 episodes for each iteration, and two scores of 4 episodes."""


def main() -> None:
    """Run trials until there are enough kills and the last run has ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server-python", required=True, help="Python with SkyRL")
    parser.add_argument("--place", required=True, type=Path, help="folder to work in")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=4, help="of each run")
    parser.add_argument("--longest", type=float, default=90.0, help="CPU seconds before a kill, at most")
    parser.add_argument("--out", type=Path, help="file of the rows; FOLDER/kills.jsonl by default")
    options = parser.parse_args()
    place: Path = options.place.resolve()
    prepare(place)
    journal = options.out or place / "kills.jsonl"
    noted = [json.loads(line) for line in journal.read_text().splitlines()] if journal.is_file() else []
    port = free_port()
    recipe = RECIPE.format(place=place, url=f"http://127.0.0.1:{port}", iterations=options.iterations)
    (place / "online.yaml").write_text(recipe)
    trial = Trial(options.server_python, place, port, random.Random(len(noted)))
    try:
        while not noted or left(noted, options.kills) or not has_ended(noted[-1]):
            ended = sum(map(has_ended, noted))
            noted.append(
                trial.life(f"online-{ended}", options.longest if left(noted, options.kills) else None)
            )
            line = json.dumps(noted[-1])
            with journal.open("a") as lines:
                print(line, file=lines)
            print(line, flush=True)
            check(noted, options.iterations)
    finally:
        trial.stop_server()


def has_ended(note: dict[str, Any]) -> bool:
    """Return whether a run has ended successfully."""
    return bool(note["what"] == "ended" and note["code"] == 0)


def left(noted: list[dict[str, Any]], kills: int) -> int:
    """Return the number of kills that are left."""
    return kills - sum(one["what"] == "kill" for one in noted)


def check(noted: list[dict[str, Any]], iterations: int) -> None:
    """Exit if a run has failed without a kill, or has other episodes than its recipe requests."""
    last = noted[-1]
    if last["what"] == "ended" and not (has_ended(last) and as_expected(last["episodes"], iterations)):
        raise SystemExit(f"{last['run']} ended with code {last['code']} and episodes {last['episodes']}")


class Trial:
    """A server, and the clients that use it one after the other."""

    def __init__(self, python: str, place: Path, port: int, draw: random.Random) -> None:
        self._python, self._place, self._port, self._draw = python, place, port, draw
        self._server = start_server(python, place, port)

    def life(self, name: str, longest: float | None) -> dict[str, Any]:
        """Run a command, and kill its process or the server at a random moment.

        Args:
            name: Name of the run.
            longest: Maximum CPU seconds of both before the kill. If None, nothing is killed, and the run continues to
                its end.

        Returns:
            Record of the kill, or of the end of the run.
        """
        client = subprocess.Popen(
            [sys.executable, "-m", "perturn", "run", str(self._place / "online.yaml"), f"name={name}"],
            cwd=self._place,
            stdout=(self._place / "client.log").open("ab"),
            stderr=subprocess.STDOUT,
        )
        seconds = math.inf if longest is None else self._draw.uniform(0, longest)
        watched = watch(client, self._server, seconds)
        run = self._place / "runs" / name
        note: dict[str, Any] = {"run": name, **watched}
        if client.returncode is not None:
            return {"what": "ended", **note, "code": client.returncode, "episodes": counts_of(run)}
        whom = self._draw.choice(["client", "server"])
        note = {"what": "kill", "whom": whom, **note, "stages": stages_of(run)}
        if whom == "client":
            client.kill()
            client.wait()
            return note
        self.stop_server()
        began = time.monotonic()
        client.wait(900)
        note |= {"client_stopped_after": round(time.monotonic() - began, 1), "code": client.returncode}
        self._server = start_server(self._python, self._place, self._port)
        return note

    def stop_server(self) -> None:
        """Kill the server and its child processes."""
        if self._server.poll() is None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()


def watch(
    client: subprocess.Popen[bytes], server: subprocess.Popen[bytes], seconds: float
) -> dict[str, float]:
    """Wait until a client ends, or until client and server have used some CPU time.

    Args:
        client: Process of the command.
        server: Process of the server. Its child processes count too.
        seconds: CPU seconds of both together.

    Returns:
        CPU seconds, elapsed seconds, and the client's peak memory in GB.
    """
    before, began = cpu_seconds(server.pid), time.monotonic()
    used, peak = 0.0, 0
    while client.poll() is None and used < seconds:
        used = cpu_seconds(client.pid) + cpu_seconds(server.pid) - before
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{client.pid}/status").read_text())
        peak = int(found[1]) if found else peak  # a process that has just ended has no peak
        time.sleep(0.2)
    seconds = round(time.monotonic() - began, 1)
    return {"cpu_seconds": round(used, 1), "seconds": seconds, "peak_gb": round(peak * 1024 / 1e9, 3)}


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its child processes."""
    found = 0.0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                found += sum(each.cpu_times()[:2])
    return found


def prepare(place: Path) -> None:
    """Write the model, with the data type in which SkyRL computes."""
    if (place / "model" / "config.json").is_file():
        return
    from perturn.chat.model_names import load_tokenizer
    from perturn.policy.models import load_model

    model = load_model("tiny-agent")
    model.config.dtype = "float32"
    model.save_pretrained(place / "model")
    load_tokenizer("tiny-agent").save_pretrained(place / "model")


def start_server(python: str, place: Path, port: int) -> subprocess.Popen[bytes]:
    """Start a server that keeps its states in the folder, and return it once it answers."""
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
    server = subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | own, process_group=0)
    for _ in range(3600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/healthz", timeout=1).close()
            return server
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"the server does not answer; see {place / 'server.log'}")


def stages_of(run: Path) -> list[str]:
    """Return the names of the finished stages of a run."""
    manifest = run / "manifest.json"
    stages = json.loads(manifest.read_text())["stages"] if manifest.is_file() else {}
    return [name for name, note in stages.items() if note.get("done")]


def counts_of(run: Path) -> dict[str, int]:
    """Return the number of distinct episodes in each exploration and score."""
    found: Counter[str] = Counter()
    for file in (*(run / "trajectories").glob("*.jsonl"), *(run / "evaluation").glob("*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        found[file.stem] = len({(row["task"]["id"], row["sample"]) for row in rows})
        assert found[file.stem] == len(rows), f"{file} has an episode twice"
    return dict(found)


def as_expected(episodes: dict[str, int], iterations: int) -> bool:
    """Return whether each exploration and score has exactly the episodes that the recipe requests."""
    explored = [count for name, count in episodes.items() if name.startswith("explore")]
    scored = [count for name, count in episodes.items() if not name.startswith("explore")]
    return explored == [EPISODES] * iterations and scored == [SCORED] * 2


if __name__ == "__main__":
    main()
