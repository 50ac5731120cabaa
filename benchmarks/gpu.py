r"""Everything that is worth knowing of one GPU: tests, a training step, rollouts, attention, memory, an online run.

    make gpu                                                all parts, within 25 minutes
    python benchmarks/gpu.py --out FILE --only rollouts     one part; a part that FILE has already is not run again
    python benchmarks/gpu.py --out FILE --table             the table of a file, in Markdown

Each part runs in processes of its own, and its rows are written to the file before the next part begins. A part that
fails leaves its error as its row, and the command ends with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SIDES = Path(__file__).parent
TESTED = ("tests/policy", "tests/losses", "tests/engines")
WITHOUT = ("tests/engines/api",)
"""Tests that call no model of this process."""

Row = dict[str, Any]
"""One line of the table: `what`, `case`, `ours`, `theirs`, `ratio`, and what else was found, as `detail`."""


def main() -> None:
    """Parse, run the parts that are missing, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="file for the rows")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="the smallest case of each part")
    parser.add_argument("--table", action="store_true", help="print the table of the file, and run nothing")
    options = parser.parse_args()
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    if not options.table:
        found = {"about": found.get("about") or about(), "parts": found.get("parts", {})}
        for name in options.only:
            if "error" in found["parts"].get(name, {"error": "missing"}):
                found["parts"][name] = run(PARTS[name], quick=options.quick)
                options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found))
    failed = [name for name, part in found["parts"].items() if "error" in part]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; see their errors in {options.out}")


def run(part: Callable[[bool], list[Row]], *, quick: bool) -> dict[str, Any]:
    """Run one part: its rows and seconds, or its error."""
    began = time.perf_counter()
    try:
        rows = part(quick)
    except subprocess.CalledProcessError as error:
        return {"error": (error.stderr or error.stdout or str(error))[-4000:]}
    except subprocess.TimeoutExpired as error:
        return {"error": f"not done within {error.timeout:.0f} s"}
    return {"rows": rows, "seconds": round(time.perf_counter() - began)}


def about() -> dict[str, str]:
    """Return the card, the versions and the date."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU; this measures one.")
    names = ("torch", "triton", "transformers", "trl", "peft", "vllm")
    return {
        "card": torch.cuda.get_device_name(),
        "date": date.today().isoformat(),
        **{name: version(name) for name in names if find_spec(name)},
    }


def execute(*command: str, seconds: float = 600, **environment: str) -> str:
    """Run a command of Python with this repository's sources, and return its output."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=True,
    )
    return done.stdout


def tests(quick: bool) -> list[Row]:
    """Run the tests of policy, losses and engines; each of their models is on the GPU."""
    paths = TESTED[1:2] if quick else TESTED
    ignored = [f"--ignore={path}" for path in WITHOUT]
    command = ("-m", "pytest", *paths, *ignored, "-q", "-n", "6", "-W", "default", "-o", "cpu_seconds=0")
    try:
        said = execute(*command, seconds=900)
    except subprocess.CalledProcessError as error:
        said = error.stdout
        if "passed" not in said:
            raise
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", said)}
    failed = sorted({line.split(" - ")[0] for line in said.splitlines() if line.startswith("FAILED")})
    return [{"what": "tests", "case": ", ".join(paths), "ours": counts, "detail": {"failed": failed}}]


def step(quick: bool) -> list[Row]:
    """Time a step of DPO on pairs through TRL's DPOTrainer and through TurnTrainer."""
    only = ["--only", "assistant 135M 49152 bfloat16 trl."] if quick else []
    rows = json.loads(execute(str(SIDES / "training.py"), "--device", "cuda", "--json", *only))
    return [_compared(row, f"DPO, {row['size']}, {row['peer']}") for row in rows]


def groups(quick: bool) -> list[Row]:
    """Time a step on groups of episodes through TRL's GRPOTrainer and through TurnTrainer."""
    only = "135M 49152 bfloat16 group of 8" if quick else "group of 8"
    command = ("--device", "cuda", "--json", "--only", only)
    rows = json.loads(execute(str(SIDES / "groups.py"), *command))
    return [_compared(row, f"GRPO, {row['size']}, groups of {row['samples']}") for row in rows]


def _compared(row: Row, case: str) -> Row:
    return {
        "what": "training step, s",
        "case": case,
        "ours": row["seconds"],
        "theirs": row["peer_seconds"],
        "ratio": row["step_ratio"],
        "detail": row,
    }


def rollouts(quick: bool) -> list[Row]:
    """Turns a second of the local engine and of `generate` on the whole history; of vLLM too where it is installed."""
    rows = []
    cases = ["135M:64"] if quick else ["15M:64", "135M:16", "135M:64", "135M:256", "1B:64"]
    for line in execute(str(SIDES / "rollouts_gpu.py"), "--cases", *cases).splitlines():
        row = json.loads(line)
        rows.append(
            {
                "what": "rollouts, turns/s",
                "case": f"{row['size']}, {row['conversations']} conversations, generate",
                "ours": row["turns_per_second"],
                "theirs": row["peer_turns_per_second"],
                "ratio": row["ratio"],
                "detail": row,
            }
        )
    return rows


def _parts(name: str, quick: bool) -> list[Row]:
    said = execute(str(SIDES / "gpu_parts.py"), name, *(["--quick"] if quick else []))
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def attention(quick: bool) -> list[Row]:
    """Time attention over packed groups by FlexAttention, and the same by other ways."""
    return _parts("attention", quick)


def memory(quick: bool) -> list[Row]:
    """Measure the most memory of training, beside what `perturn run --dry-run` predicts."""
    return _parts("memory", quick)


def precision(quick: bool) -> list[Row]:
    """Compare the engine's log-probabilities with those of training, and both with the CPU's."""
    return _parts("precision", quick)


def sharding(quick: bool) -> list[Row]:
    """Train with NCCL and FSDP2 in one process, and compare with a training without them."""
    return _parts("sharding", quick)


def online(quick: bool) -> list[Row]:
    """Play, train and hand over a policy of 135M parameters on one GPU, with and without LoRA."""
    return _parts("online", quick)


PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "precision": precision,
    "tests": tests,
    "step": step,
    "groups": groups,
    "rollouts": rollouts,
    "attention": attention,
    "memory": memory,
    "sharding": sharding,
    "online": online,
}


def table(found: dict[str, Any]) -> str:
    """Return the rows in Markdown, under the card, the versions and the date."""
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
