r"""Measure one GPU: tests, training steps, rollouts, attention, memory, and an online run.

    make gpu                                                all parts, within 25 minutes
    python benchmarks/gpu.py --out FILE --only rollouts     one part; a part that FILE has already is not run again
    python benchmarks/gpu.py --out FILE --table             the table of a file, in Markdown
    make gpu VLLM=PYTHON                                    also the parts that need vLLM, by the interpreter PYTHON

Each part runs in its own processes, and each row is written to the file at once. A killed part keeps its rows, and the
next call runs it again. A failed part leaves its error next to its rows, and the command exits with code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SIDES = Path(__file__).parent
TESTED = ("tests/policy", "tests/losses", "tests/engines")
WITHOUT = ("tests/engines/api",)
"""Tests that run no model in their own process."""

Row = dict[str, Any]
"""One line of the table: `what`, `case`, `ours`, `theirs`, `ratio`, and further findings as `detail`."""


def main() -> None:
    """Parse the options, run the missing parts, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="file for the rows")
    parser.add_argument("--only", choices=[*PARTS, *WITH_VLLM], nargs="+")
    parser.add_argument(
        "--vllm", help="the interpreter of an environment with vLLM, for the parts that need it"
    )
    parser.add_argument("--quick", action="store_true", help="the smallest case of each part")
    parser.add_argument("--table", action="store_true", help="print the table of the file, and run nothing")
    options = parser.parse_args()
    known = PARTS | (vllm_parts(options.vllm) if options.vllm else {})
    if options.only and not known.keys() >= {*options.only}:
        parser.error(f"{', '.join(WITH_VLLM)} need --vllm")
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    if not options.table:
        found = {"about": found.get("about") or about(), "parts": found.get("parts", {})}

        def keep(part: dict[str, Any]) -> None:
            found["parts"][name] = part
            options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

        for name in options.only or known:
            if "error" in found["parts"].get(name, {"error": "missing"}):
                run(known[name], keep, quick=options.quick)
    print(table(found))
    failed = [name for name, part in found["parts"].items() if "error" in part]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; see their errors in {options.out}")


def run(
    part: Callable[[bool], Iterator[Row]], keep: Callable[[dict[str, Any]], None], *, quick: bool
) -> None:
    """Run one part, and pass its rows so far to `keep` after each row. Add its seconds or its error at the end."""
    began, rows, ended = time.perf_counter(), [], {}
    try:
        for row in part(quick):
            rows.append(row)
            keep({"rows": rows, "error": "stopped before its end; run it again"})
            print(json.dumps(row), file=sys.stderr, flush=True)
    except subprocess.CalledProcessError as error:
        ended = {"error": (error.stderr or error.stdout or str(error))[-4000:]}
    keep({"rows": rows, "seconds": round(time.perf_counter() - began), **ended})


def about() -> dict[str, str]:
    """Return the name of the card, the versions, and the date."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU; this measures one.")
    names = ("torch", "triton", "transformers", "trl", "peft", "vllm")
    return {
        "card": torch.cuda.get_device_name(),
        "date": date.today().isoformat(),
        **{name: version(name) for name in names if find_spec(name)},
    }


def lines(*command: str) -> Iterator[str]:
    """Run a Python command with this repository's sources, and yield the lines of its output as they come.

    Raises:
        subprocess.CalledProcessError: If the command failed, after its last line.
    """
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        yield from process.stdout
        if process.wait():
            said.seek(0)
            raise subprocess.CalledProcessError(process.returncode, command, stderr=said.read())


def tests(quick: bool) -> Iterator[Row]:
    """Run the tests of policy, losses and engines. Models that choose their device use the GPU."""
    paths = TESTED[1:2] if quick else TESTED
    ignored = [f"--ignore={path}" for path in WITHOUT]
    command = ("-m", "pytest", *paths, *ignored, "-q", "-n", "6", "-W", "default", "-o", "cpu_seconds=0")
    said = []
    try:
        said.extend(lines(*command))
    except subprocess.CalledProcessError:
        if not any(" passed" in line for line in said):
            raise
    counts = {
        word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", said[-1])
    }
    failed = sorted(line.split(" - ")[0] for line in said if line.startswith("FAILED"))
    yield {"what": "tests", "case": ", ".join(paths), "ours": counts, "detail": {"failed": failed}}


def step(quick: bool) -> Iterator[Row]:
    """Time a step of DPO on pairs with TRL's DPOTrainer and with TurnTrainer."""
    only = ["--only", "assistant 135M 49152 bfloat16 trl."] if quick else []
    for row in json.loads("".join(lines(str(SIDES / "training.py"), "--device", "cuda", "--json", *only))):
        yield _compared(row, f"DPO, {row['size']}, {row['peer']}")


def groups(quick: bool) -> Iterator[Row]:
    """Time a step on groups of episodes with TRL's GRPOTrainer and with TurnTrainer."""
    only = "135M 49152 bfloat16 group of 8" if quick else "group of 8"
    command = (str(SIDES / "groups.py"), "--device", "cuda", "--json", "--only", only)
    for row in json.loads("".join(lines(*command))):
        yield _compared(row, f"GRPO, {row['size']}, groups of {row['samples']}")


def _compared(row: Row, case: str) -> Row:
    return {
        "what": "training step, s",
        "case": case,
        "ours": row["seconds"],
        "theirs": row["peer_seconds"],
        "ratio": row["step_ratio"],
        "detail": row,
    }


def rollouts(quick: bool) -> Iterator[Row]:
    """Count turns per second of the local engine, and of `generate` on the whole history."""
    cases = ["135M:64"] if quick else ["135M:64", "135M:16", "1B:64", "135M:256", "15M:64"]
    for line in lines(str(SIDES / "rollouts_gpu.py"), "--cases", *cases):
        row = json.loads(line)
        yield {
            "what": "rollouts, turns/s",
            "case": f"{row['size']}, {row['conversations']} conversations, generate",
            "ours": row["turns_per_second"],
            "theirs": row["peer_turns_per_second"],
            "ratio": row["ratio"],
            "detail": row,
        }


def part(name: str, file: str = "gpu_parts.py", *words: str) -> Callable[[bool], Iterator[Row]]:
    """Return a function that runs a part of `gpu_parts.py`, or of another file."""

    def rows(quick: bool) -> Iterator[Row]:
        command = (str(SIDES / file), name, *words, *(["--quick"] if quick else []))
        yield from (json.loads(line) for line in lines(*command) if line.startswith("{"))

    return rows


def vllm_parts(python: str) -> dict[str, Callable[[bool], Iterator[Row]]]:
    """Return the parts that need vLLM, whose interpreter is given."""
    return {name: part(name.partition("-")[2], "gpu_vllm.py", "--vllm", python) for name in WITH_VLLM}


WITH_VLLM = ("vllm-rollouts", "vllm-online", "vllm-handover")
"""Parts that need `--vllm`: rollouts against vLLM alone, online runs with vLLM on the GPU of the training, handover."""
PARTS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "precision": part("precision"),  # log-probabilities on the GPU and of the engine
    "tests": tests,
    "step": step,
    "groups": groups,
    "rollouts": rollouts,
    "attention": part("attention"),  # FlexAttention, its mask, and alternatives
    "memory": part("memory"),  # memory of training, against the formula of the dry run
    "sharding": part("sharding"),  # FSDP2 by NCCL in one process, with and without CPU offload
    "online": part("online"),  # play with, train and hand over a policy of 135M parameters
}


def table(found: dict[str, Any]) -> str:
    """Return the rows as a Markdown table, with the card, the versions and the date."""
    known = dict(found["about"])
    lines = [f"{known.pop('card')}, {known.pop('date')}; " + ", ".join(f"{k} {v}" for k, v in known.items())]
    lines += ["", "| what | case | Perturn | peer | ratio |", "|---|---|---|---|---|"]
    for name, part in found["parts"].items():
        if "error" in part:
            lines.append(f"| {name} | failed | | | |")
        for row in part.get("rows", ()):
            cells = [row["what"], row["case"], *(row.get(key, "") for key in ("ours", "theirs", "ratio"))]
            lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{number} {name}" for name, number in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
