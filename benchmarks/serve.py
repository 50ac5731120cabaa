"""Compare turns per second through the endpoint of `perturn serve` with calls of the engine.

    python benchmarks/serve.py            five plays of each side
    python benchmarks/serve.py --quick    one play of each side
    python benchmarks/serve.py --json     one line for machines

Both sides answer the same requests with the bundled policy `tiny-agent` (0.94M parameters). There are 64 sessions with
the observations of expert episodes on `alfworld-like`. A session sends its next request as soon as the last request is
answered. The directly called engine is in this process. The endpoint's engine has its own process, as with `perturn
serve`. The client is a third process. It has one connection for each session, and sends the whole conversation with
each request. Set OMP_NUM_THREADS=1, since an engine with two threads alone uses two cores. The sides alternate, and the
ratio is of medians. The token ids of both sides are compared. They can differ if a random draw is very close to the
border between two tokens. The draw of turn 42/13 is 6e-8 away from a border, and rounding moves borders by up to 3e-7,
depending on the batch size.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from perturn.api.collect_and_evaluate import collect
from perturn.chat.model_names import resolve_model
from perturn.engines import Serving
from perturn.engines.engine_process import EngineProcess
from perturn.engines.local.settings import LocalSettings
from perturn.episodes.formats import FORMATS
from perturn.policy.models import load_policy
from perturn.serve import Endpoint
from perturn.serve.agent_session import TURN_SEEDS
from perturn.types import Engine, Message, Prompt, Sampling, Task, Turn

SESSIONS = 64
TOKENS = 24
"""Token limit of an answer. The policy ends most answers earlier."""


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one play of each side")
    parser.add_argument("--json", action="store_true", help="one line for machines")
    parser.add_argument("--turns", type=int, default=20, help="turns of a session")
    parser.add_argument("--client", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        asyncio.run(_play_as_client(*options.client))
        return
    found = measure(1 if options.quick else 5, options.turns)
    if options.json:
        print(json.dumps(found))
        return
    for side in ("direct", "endpoint"):
        print(
            f"{side:>9}: {found[side]:7.1f} turns/s, {found[f'{side}_cpu']:5.2f} CPU ms a turn in this process"
        )
    print(f"    ratio: {found['ratio']:7.2f}; token ids equal in {found['equal']} of {found['turns']} turns")
    if found["differ"]:
        print(f"   differ: {', '.join(found['differ'])} (session/turn)")


def measure(plays: int, turns: int) -> dict[str, Any]:
    """Return the turns per second of both sides, and their ratio."""
    scripts = _scripts(turns)
    path = resolve_model("tiny-agent", print)
    engine = _open(path)
    served = EngineProcess(partial(_open, path))
    rates: dict[str, list[tuple[float, float]]] = {"direct": [], "endpoint": []}
    total = 0
    differ: list[str] = []
    try:
        play_directly(engine, scripts)  # warms up
        play_through_endpoint(served, scripts)
        for _ in range(plays):
            direct, rate = _timed(partial(play_directly, engine, scripts))
            rates["direct"].append(rate)
            through, rate = _timed(partial(play_through_endpoint, served, scripts))
            rates["endpoint"].append(rate)
            differ += [key for key in direct if direct[key] != through[key]]
            total += len(direct)
    finally:
        engine.close()
        served.close()
    found: dict[str, Any] = {
        "sessions": SESSIONS,
        "turns": total,
        "equal": total - len(differ),
        "differ": differ,
    }
    for side, measured in rates.items():
        found[side] = statistics.median(rate for rate, _ in measured)
        found[f"{side}_cpu"] = statistics.median(cost for _, cost in measured)
    return found | {"ratio": found["endpoint"] / found["direct"]}


def _open(path: str) -> Engine:
    """Open the engine in this process or in its own process."""
    load = partial(load_policy, path, policy="tiny-agent", dtype="float32", template=None, say=print)
    return LocalSettings().open(Serving("tiny-agent", path, FORMATS["react"].stop, load))


def play_directly(engine: Engine, scripts: Sequence[Sequence[Message]]) -> tuple[dict[str, Any], float]:
    """Play all sessions by calling the engine. Return the token ids of each turn, and the elapsed seconds."""
    sampling = Sampling(1.0, 1.0, TOKENS)
    played: list[tuple[Turn, ...]] = [() for _ in scripts]
    found: dict[str, Any] = {}

    def submit(index: int) -> None:
        system, *observations = scripts[index]
        at = len(played[index])
        seed = index * TURN_SEEDS + at
        engine.submit(  # type: ignore[attr-defined]
            [Prompt((system,), played[index], (observations[at],), seed, str(index))], sampling
        )

    began = time.perf_counter()
    for index in range(len(scripts)):
        submit(index)
    left = sum(len(script) - 1 for script in scripts)
    while left:
        for prompt, action in engine.advance():  # type: ignore[attr-defined]
            index = int(prompt.conversation)
            found[f"{index}/{len(played[index])}"] = list(action.token_ids)
            played[index] = (*played[index], Turn(prompt.observation, action))
            left -= 1
            if len(played[index]) < len(scripts[index]) - 1:
                submit(index)
    took = time.perf_counter() - began
    for index in range(len(scripts)):
        engine.forget(str(index))
    return found, took


def play_through_endpoint(
    engine: EngineProcess, scripts: Sequence[Sequence[Message]]
) -> tuple[dict[str, Any], float]:
    """Play all sessions through an endpoint. Return the token ids of each turn, and the elapsed seconds."""
    with Endpoint(engine) as endpoint, tempfile.TemporaryDirectory() as folder:
        names = [endpoint.new_session(Task(str(index)), seed=index) for index in range(len(scripts))]
        file = Path(folder) / "scripts.json"
        file.write_text(json.dumps(list(zip(names, scripts, strict=True))))
        command = [sys.executable, __file__, "--client", endpoint.address, endpoint.key, str(file)]
        ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        took, cost = map(float, ran.stdout.split())
        print(f"client: {1000 * cost:.2f} CPU ms a turn", file=sys.stderr)
        found = {}
        for index, name in enumerate(names):
            for at, turn in enumerate(endpoint.end_session(name).turns):
                found[f"{index}/{at}"] = list(turn.action.token_ids or ())
    return found, took


async def _play_as_client(address: str, key: str, file: str) -> None:
    """Play all sessions at once. Print the elapsed seconds, and the CPU seconds per turn."""
    sessions = json.loads(Path(file).read_text())
    began, cost = time.perf_counter(), time.process_time()
    await asyncio.gather(*(_talk(address, key, name, script) for name, script in sessions))
    turns = sum(len(script) - 1 for _, script in sessions)
    print(time.perf_counter() - began, (time.process_time() - cost) / turns)


async def _talk(address: str, key: str, name: str, script: list[Message]) -> None:
    """Play one session over one connection."""
    host, port = address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    messages = script[:1]
    for observation in script[1:]:
        messages.append(observation)
        body = json.dumps({"model": "policy", "messages": messages, "max_tokens": TOKENS}).encode()
        head = (
            f"POST /s/{name}/v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(answer.split("content-length:")[1].split("\r\n")[0])
        said = json.loads(await reader.readexactly(length))
        messages.append(said["choices"][0]["message"])
    writer.close()


def _scripts(turns: int) -> list[list[Message]]:
    """Return a system text and observations for each session."""
    shown = collect("expert", "alfworld-like", n=SESSIONS, protocol="alfworld-lab")
    found = []
    for one in shown:
        observations = [message for turn in one.turns for message in turn.observation]
        found.append([*one.prompt, *(observations * turns)[:turns]])
    return found


def _timed(play: Any) -> tuple[dict[str, Any], tuple[float, float]]:
    """Play. Return the token ids, the turns per second, and the CPU milliseconds per turn."""
    began = time.process_time()
    found, took = play()
    cost = 1000 * (time.process_time() - began) / len(found)
    return found, (len(found) / took, cost)


if __name__ == "__main__":
    main()
