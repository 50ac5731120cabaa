r"""Measure turns per second in replays of real agents' episodes, on several engines in alternation.

    python benchmarks/agents.py RUN/trajectories/explore.jsonl POLICY --sides local vllm --dtype bfloat16

POLICY is the folder of the model. Each side is an engine in its own process. Only one side plays at a time:

    local                       this checkout's engine; local:pack=false gives it a setting
    local@FOLDER                the engine of the checkout in FOLDER
    vllm                        vLLM behind our engine, in its environment (`make test-vllm` makes it)
    generate                    transformers' `generate`, which reads the whole history at every turn

The environment returns the recorded observations, whatever the policy answers. So all sides have the same observations
and the same number of turns. Each side samples its own answers, with the same seeds. All episodes run through Perturn's
driver and the threads of its environments. The first play of each side is a warm-up. A ratio is the first side's turns
per second over another side's in the same round, as the median over plays.

The other columns are the tokens per answer; `idle`, the share of slots without a conversation while the engine worked;
`tail`, the share of the time after the last episode began; `processor`, the CPU microseconds per turn of all threads of
the process (without vLLM's processes); and `host`, the CPU microseconds per turn of the driver's thread without the
model. `host` has four parts: `prompt` (rendering and tokenizing), `action` (parsing), `engine` (the rest of the engine)
and `driver` (episodes and environments). With `--rounds 2`, each episode is queued twice, which shows the cost of the
tail.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
VLLM_PYTHON = HERE.parent / ".venv-vllm" / "bin" / "python"
"""Interpreter of the environment that `make test-vllm` makes."""


class Side:
    """Process of one side."""

    def __init__(self, text: str, words: argparse.Namespace) -> None:
        self.text = text
        spec, _, checkout = text.partition("@")
        kind, _, options = spec.partition(":")
        cores = sorted(os.sched_getaffinity(0))[: words.threads]
        told = {name: str(getattr(words, name).resolve()) for name in ("episodes", "model")}
        told |= {name: getattr(words, name) for name in ("count", "dtype", "threads", "conversations")}
        told |= {"temperature": words.temperature, "max_new_tokens": words.max_new_tokens, "engine": kind}
        told |= {"options": dict(_option(each) for each in options.split(",") if each), "cores": cores}
        env = {
            "PYTHONPATH": str(Path(checkout or HERE.parent).resolve() / "src"),
            "OMP_NUM_THREADS": str(words.threads),
        }
        env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        self._process = subprocess.Popen(
            [words.vllm if kind == "vllm" else sys.executable, str(HERE / "agents_side.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | env,
        )
        self._ask(told)

    def play(self, rounds: int, seed: int) -> dict[str, Any]:
        """Play all episodes."""
        return self._ask({"rounds": rounds, "seed": seed})

    def close(self) -> None:
        """Close the input of the process, which ends it, and wait."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.text} ended; its reason is above.")
        found: dict[str, Any] = json.loads(line)
        return found


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, json.loads(value)


def row(sides: list[str], index: int, plays: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the figures of one side, as medians over its plays."""
    mine, first = plays[sides[index]], plays[sides[0]]
    found: dict[str, Any] = {"side": sides[index], "plays": len(mine), "turns": mine[0]["turns"]}
    for name in ("turns_per_second", "tokens_per_action", "idle", "tail", "processor"):
        known = [each[name] for each in mine if each[name] is not None]
        found[name] = round(median(known), 3) if known else None
    ratios = [a["turns_per_second"] / b["turns_per_second"] for a, b in zip(first, mine, strict=True)]
    found["first_over_this"] = round(median(ratios), 3)
    found["from_to"] = [round(min(ratios), 3), round(max(ratios), 3)]
    hosts = [each["host"] for each in mine]
    found["host"] = {name: round(median(each[name] for each in hosts)) for name in hosts[0]}
    return found


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for each in rows:
        print("| " + " | ".join("" if value is None else str(value) for value in each.values()) + " |")


def main() -> None:
    """Start the sides, let them play in turn, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("episodes", type=Path, help="trajectories of one protocol")
    parser.add_argument("model", type=Path, help="folder of the policy")
    parser.add_argument("--sides", nargs="+", default=["local", "vllm"])
    parser.add_argument("--count", type=int, help="play so many episodes, the first ones; else all")
    parser.add_argument("--conversations", type=int, default=16, help="at once")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2, help="threads, and cores that they may use")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1, help="times that each episode is in the queue")
    parser.add_argument("--vllm", default=str(VLLM_PYTHON), help="the interpreter of vLLM's environment")
    parser.add_argument("--json", action="store_true", help="rows for machines")
    words = parser.parse_args()
    sides = [Side(text, words) for text in words.sides]
    plays: dict[str, list[dict[str, Any]]] = {side.text: [] for side in sides}
    for repeat in range(words.repeats):
        for side in sides:
            plays[side.text].append(side.play(words.rounds, repeat))
            print(f"{side.text}: {plays[side.text][-1]['turns_per_second']:.2f} turns/s", file=sys.stderr)
    for side in sides:
        side.close()
    rows = [row(words.sides, index, plays) for index in range(len(sides))]
    print(json.dumps(rows, indent=1)) if words.json else show(rows)


if __name__ == "__main__":
    main()
