r"""Compare turns per second of the local engine with encoding the whole history at each turn, and measure its growth.

    python benchmarks/rollouts.py            the full table (about an hour on two cores)
    python benchmarks/rollouts.py --quick    three cases, within five minutes
    python benchmarks/rollouts.py --json     rows for machines

vLLM's rows need its environment, which `make test-vllm` makes.

Conversations have observations of 60 tokens and greedy actions of 20 tokens. A ratio is the local engine's turns per
second over the peer's, in one process with the same weights and threads, so larger is better. A peer that reads the
whole history gets the actions of the local engine. Only some of its turns are timed (`--every`), since the cost of a
turn depends only on the length of its history. `agree` is the share of the peer's tokens that equal the local engine's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from rollouts_sides import Shape, Words, load, make_scripts, play_ours, time_peer
from rollouts_vllm import time_vllm
from small_svg import pyplot, save
from worlds import Sleeping, Uneven

from perturn.engines.local.engine import LocalEngine
from perturn.episodes.lockstep_blocks import blocks_of, play_blocks
from perturn.episodes.play_many import Job, play
from perturn.types import EpisodeProtocol, Sampling

VLLM_PYTHON = str(Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python")
"""Interpreter of the environment that `make test-vllm` makes. Without it, the rows of vLLM are left out."""


@dataclass(frozen=True)
class Case:
    """One comparison."""

    peer: str
    size: str
    dtype: str = "float32"
    shape: Shape = field(default_factory=Shape)
    repeats: int = 2
    every: int = 3
    quick: bool = False
    step: float = 0.05
    """Mean duration of a step in the environments, in seconds, for cases with environments."""


def _cases() -> list[Case]:
    found = [Case("re-encode", "15M", quick=True), Case("re-encode", "135M", repeats=1)]
    found += [
        Case("re-encode", size, shape=Shape(turns=30), repeats=repeats, every=every)
        for size, repeats, every in (("15M", 1, 6), ("135M", 1, 29))
    ]
    found += [Case("re-encode", "15M", shape=Shape(conversations=n)) for n in (1, 8, 64)]
    found += [Case("re-encode", "135M", shape=Shape(conversations=n), repeats=1, every=9) for n in (1, 64)]
    found += [Case("float32", size, dtype="bfloat16", repeats=1) for size in ("15M", "135M")]
    found += [
        Case("equal lengths", "15M", shape=Shape(conversations=n, spread=0.5, at_once=16), quick=quick)
        for n, quick in ((48, True), (192, False))
    ]
    found += [Case("continuous", "15M", repeats=1, every=9)]
    found += [Case("vllm", "135M", dtype=dtype, repeats=1) for dtype in ("float32", "bfloat16")]
    found += [Case("idle", "15M", quick=True)]
    found += [
        Case("free", "5M", shape=Shape(turns=17, observation=30, action=8), repeats=1, step=step)
        for step in (0.002, 0.02, 0.1)
    ]
    return found


def compare(case: Case) -> dict[str, Any]:
    """Return one row of the table."""
    model = load(case.size, case.dtype)
    side: Callable[[Case, Any], list[dict[str, float]]]
    side = {"float32": _dtypes, "equal lengths": _ragged, "idle": _busy, "vllm": _vllm, "free": _locked}.get(
        case.peer, _histories
    )
    side(replace(case, shape=replace(case.shape, conversations=2, turns=2), every=1), model)  # warms up
    found = [each for _ in range(case.repeats) for each in side(case, model)]
    return {
        "case": case.peer,
        "conversations": case.shape.conversations,
        "turns": case.shape.turns,
        "ratio": round(median(each.pop("ratio") for each in found), 2),
        "size": case.size,
        "dtype": case.dtype,
        **{key: round(median(each[key] for each in found), 3) for key in found[0]},
        "repeats": len(found),
        "threads": torch.get_num_threads(),
    }


def _histories(case: Case, model: Any) -> list[dict[str, float]]:
    """Compare with a peer that reads the whole history in each turn."""
    scripts = make_scripts(case.shape)
    ours = play_ours(model, scripts, case.shape)
    seconds, agree = time_peer(case.peer, model, scripts, ours, case.every)
    return [
        {
            "ratio": seconds / ours.seconds,
            "turns_per_second": ours.turns / ours.seconds,
            "tokens_per_second": ours.tokens / ours.seconds,
            "peer_turns_per_second": ours.turns / seconds,
            "agree": agree,
        }
    ]


def _dtypes(case: Case, model: Any) -> list[dict[str, float]]:
    """Compare with the local engine in float32."""
    scripts = make_scripts(case.shape)
    other = load(case.size, "float32")
    ours, theirs = (play_ours(each, scripts, case.shape) for each in (model, other))
    return [
        {
            "ratio": theirs.seconds / ours.seconds,
            "turns_per_second": ours.turns / ours.seconds,
            "tokens_per_second": ours.tokens / ours.seconds,
            "peer_turns_per_second": theirs.turns / theirs.seconds,
        }
    ]


def _vllm(case: Case, model: Any) -> list[dict[str, float]]:
    """Compare with vLLM in a process of its own environment, while the local engine is idle."""
    scripts, words = make_scripts(case.shape), Words()
    ours = play_ours(model, scripts, case.shape)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        observations = [[words.ids(text) for text in each.observations] for each in scripts]
        theirs = time_vllm(
            VLLM_PYTHON, folder, case.dtype, observations, [list(each.actions) for each in scripts]
        )
    same = [
        mean(a == b for a, b in zip(answer, ours.answers[number, turn], strict=True))
        for number, each in enumerate(theirs["answers"])
        for turn, answer in enumerate(each)
    ]
    return [
        {
            "ratio": theirs["seconds"] / ours.seconds,
            "turns_per_second": ours.turns / ours.seconds,
            "tokens_per_second": ours.tokens / ours.seconds,
            "peer_turns_per_second": theirs["turns"] / theirs["seconds"],
            "agree": mean(same),
        }
    ]


def _ragged(case: Case, model: Any) -> list[dict[str, float]]:
    """Compare uneven lengths and numbers of turns with equal ones of the same mean, in new tokens per second."""
    equal = replace(case.shape, spread=0.0)
    ours, theirs = (play_ours(model, make_scripts(each), each) for each in (case.shape, equal))
    return [
        {
            "ratio": (ours.tokens / ours.seconds) / (theirs.tokens / theirs.seconds),
            "turns_per_second": ours.turns / ours.seconds,
            "tokens_per_second": ours.tokens / ours.seconds,
            "peer_turns_per_second": theirs.turns / theirs.seconds,
        }
    ]


def _busy(case: Case, model: Any) -> list[dict[str, float]]:
    """Measure the share of time that the engine works, with environments of 50 ms per step and the real driver."""
    engine, busy = LocalEngine(model, Words()), 0.0
    advance = engine.advance

    def timed() -> Any:
        nonlocal busy
        began = time.perf_counter()
        found = advance()
        busy += time.perf_counter() - began
        return found

    engine.advance = timed  # type: ignore[method-assign]
    protocol = EpisodeProtocol("plain", "action", "Play.", max_turns=case.shape.turns)
    jobs = [Job(task, 0) for task in Sleeping().tasks("train")[: 3 * case.shape.conversations]]
    began = time.perf_counter()
    found = list(
        play(
            jobs,
            engine,
            Sleeping,
            protocol=protocol,
            sampling=Sampling(max_new_tokens=case.shape.action),
            concurrency=case.shape.conversations,
        )
    )
    seconds = time.perf_counter() - began
    engine.close()
    return [{"ratio": busy / seconds, "turns_per_second": sum(len(one.turns) for one in found) / seconds}]


def _locked(case: Case, model: Any) -> list[dict[str, float]]:
    """Compare blocks in lock-step, as with `deterministic: true`, with the driver that never waits for a block."""
    world = type("Uneven", (Uneven,), {"mean": case.step})
    jobs = [Job(task, 0) for task in world().tasks("train")[: 4 * case.shape.conversations]]
    speed = {}
    for way in ("free", "locked"):
        engine = LocalEngine(model, Words())
        how: Any = {
            "protocol": EpisodeProtocol("plain", "action", "Play.", max_turns=case.shape.turns),
            "sampling": Sampling(max_new_tokens=case.shape.action),
        }
        began = time.perf_counter()
        if way == "free":
            found = list(play(jobs, engine, world, concurrency=case.shape.conversations, **how))
        else:
            found = list(play_blocks(blocks_of(jobs, case.shape.conversations), engine, world, **how))
        speed[way] = sum(len(one.turns) for one in found) / (time.perf_counter() - began)
        engine.close()
    return [
        {
            "ratio": speed["locked"] / speed["free"],
            "turns_per_second": speed["locked"],
            "peer_turns_per_second": speed["free"],
            "step": case.step,
        }
    ]


def growth() -> dict[str, Any]:
    """Measure the seconds of a turn and the memory of the KV cache, for longer and for more conversations."""
    model = load("15M", "float32")
    long = play_ours(model, make_scripts(Shape(turns=40)), Shape(turns=40))
    clock = [after - before for before, after in zip([0.0, *long.clock], long.clock, strict=False)]
    many = {}
    for conversations in (1, 4, 16, 64):
        shape = Shape(conversations=conversations)
        many[conversations] = play_ours(model, make_scripts(shape), shape).seconds / shape.turns
    return {
        "seconds_by_turn": [round(each, 4) for each in clock],
        "seconds_of_a_turn_by_conversations": {str(n): round(each, 4) for n, each in many.items()},
        "bytes_of_a_token": {
            f"{size} {dtype}": LocalEngine(load(size, dtype), Words())._token_bytes
            for size in ("15M", "135M")
            for dtype in ("float32", "bfloat16")
        },
    }


def draw(found: dict[str, Any], file: Path) -> None:
    """Draw the growth as a figure."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.plot(range(1, len(found["seconds_by_turn"]) + 1), found["seconds_by_turn"], marker=".")
    left.set(xlabel="turn", ylabel="seconds, 16 conversations", ylim=(0, None))
    many = found["seconds_of_a_turn_by_conversations"]
    right.plot([int(n) for n in many], list(many.values()), marker="o")
    right.set(xlabel="conversations", ylabel="seconds of a turn, mean of 10", ylim=(0, None))
    save(figure, file)


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    keys = [
        "case",
        "step",
        "size",
        "dtype",
        "conversations",
        "turns",
        "turns_per_second",
        "peer_turns_per_second",
        "ratio",
    ]
    print("| " + " | ".join(keys) + " |\n|" + "---|" * len(keys))
    for row in rows:
        print("| " + " | ".join(str(row.get(key, "")) for key in keys) + " |")


def main() -> None:
    """Parse the options, run each case in its own process, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", help="cases whose peer or size is this")
    parser.add_argument("--out", type=Path, help="file for the rows and the growth")
    parser.add_argument("--figure", type=Path, help="file for the growth as a figure")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    words = parser.parse_args()
    cases = _cases()
    if words.case is not None:
        print(json.dumps(compare(cases[words.case])))
        return
    rows = []
    for number, case in enumerate(cases):
        if case.peer == "vllm" and not Path(VLLM_PYTHON).is_file():
            print(f"no vLLM at {VLLM_PYTHON}: its row is left out", file=sys.stderr)
            continue
        if (case.quick or not words.quick) and words.only in (None, case.peer, case.size):
            print(f"{asdict(case)}", file=sys.stderr)
            command = [sys.executable, __file__, "--case", str(number)]
            rows.append(
                json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            )
            if words.out:
                _write(words.out, {"rows": rows})
    print(json.dumps(rows, indent=1)) if words.json else show(rows)
    if words.figure or words.out:
        grown = growth()
        if words.out:
            _write(words.out, {"rows": rows, "growth": grown})
        if words.figure:
            draw(grown, words.figure)


def _write(file: Path, found: dict[str, Any]) -> None:
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
