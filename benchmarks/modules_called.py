r"""Find the modules of the package that run for one pair, and for two online iterations.

    python benchmarks/modules_called.py [turn-trainer] [run] [online] [--list]

A module counts if one of its functions is called (`sys.setprofile`, in all threads of this process). Code that runs
only at import does not count, since each part runs once before it is traced. The parts are:

- `turn-trainer`: one pair through `TurnTrainer(...).train()`, loss tlm-dre;
- `run`: the same pair through `perturn run`, with a recipe of only `rows: {name: file}` and `align`;
- `online`: two iterations of the demo's recipe without `then`, on two tasks with two samples each.

For each part, the command prints the number of modules, the number in each package, and the deepest stack of the
package's frames at a call of `backward`. `--list` prints each module with the number of its calls.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import perturn
from perturn import TurnConfig, TurnTrainer
from perturn.chat.model_names import PACKAGED
from perturn.cli import app

PACKAGE = Path(perturn.__file__).parent
PAIR = {
    "prompt": [{"role": "user", "content": "You are in a room. Go to the desk."}],
    "chosen": [
        {"role": "assistant", "content": "go to desk 1"},
        {"role": "user", "content": "On the desk you see a lamp."},
        {"role": "assistant", "content": "take lamp 1"},
    ],
    "rejected": [{"role": "assistant", "content": "go to bed 1"}],
}
RECIPE = """
name: {name}
output: {folder}
model: {{name: tiny-agent}}
rows: {{name: file, path: {folder}/pairs.jsonl}}
align: {{loss: {{name: tlm-dre}}, epochs: 1, batch_size: 1}}
"""
ONLINE = (
    *("iterations=2", "then=null", "explore.per_iteration=2", "explore.samples=2", "explore.concurrency=4"),
    *("evaluate.tasks.n=2", "evaluate.every=2", "evaluate.concurrency=4", "protocol.max_turns=3"),
    *("environment.train_games=60", "environment.valid_games=40", "worlds.processes=0"),
)


class Traced:
    """Calls of each module of the package, and the most frames of the package on the stack of a `backward` call."""

    def __init__(self) -> None:
        """Start without calls."""
        self.calls: Counter[str] = Counter()
        self.at_backward = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Count the call of a function. Bodies of modules and classes are not counted."""
        if event != "call":
            return
        if (code := frame.f_code).co_flags & inspect.CO_OPTIMIZED and self._is_own(frame):
            self.calls[code.co_filename] += 1
        elif code.co_name == "backward" and Path(code.co_filename).name == "_tensor.py":
            found: Iterator[FrameType] = _above(frame)
            self.at_backward = max(self.at_backward, sum(map(self._is_own, found)))

    def _is_own(self, frame: FrameType) -> bool:
        file = frame.f_code.co_filename
        return file.startswith(f"{PACKAGE}{os.sep}") and file.endswith(
            ".py"
        )  # not functions of compiled templates

    @property
    def modules(self) -> Counter[str]:
        """Number of calls, by the module's path inside the package."""
        return Counter(
            {Path(name).relative_to(PACKAGE).as_posix(): calls for name, calls in self.calls.items()}
        )


def _above(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


@contextmanager
def tracing() -> Iterator[Traced]:
    """Trace the calls inside the block, in this thread and in threads that start there."""
    traced = Traced()
    threading.setprofile(traced)
    sys.setprofile(traced)
    try:
        yield traced
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def turn_trainer(folder: Path, _: int) -> None:
    """Train on one pair."""
    model = AutoModelForCausalLM.from_pretrained(PACKAGED["tiny-agent"], dtype=torch.float32)
    settings: dict[str, Any] = {"output_dir": str(folder), "reference_cache": str(folder / "reference")}
    arguments = TurnConfig(
        loss={"name": "tlm-dre"},
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    tokenizer = AutoTokenizer.from_pretrained(PACKAGED["tiny-agent"])
    TurnTrainer(model, args=arguments, train_dataset=[PAIR], processing_class=tokenizer).train()


def run(folder: Path, turn: int) -> None:
    """Train on one pair with a recipe."""
    (folder / "pairs.jsonl").write_text(json.dumps(PAIR) + "\n")
    (folder / "recipe.yaml").write_text(RECIPE.format(name=f"one-{turn}", folder=folder))
    app(["run", str(folder / "recipe.yaml")], standalone_mode=False)


def online(folder: Path, turn: int) -> None:
    """Play, compute credit, and train twice."""
    app(["run", "demo", f"name=online-{turn}", f"output={folder}", *ONLINE], standalone_mode=False)


PARTS: dict[str, Callable[[Path, int], None]] = {"turn-trainer": turn_trainer, "run": run, "online": online}


def main() -> None:
    """Print the modules that each part calls."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all of them by default"
    )
    parser.add_argument("--list", action="store_true", help="print each module with its calls")
    given = parser.parse_args()
    for name in given.parts or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            PARTS[name](Path(folder), 0)
        with tempfile.TemporaryDirectory() as folder, tracing() as traced:
            PARTS[name](Path(folder), 1)
        packages = Counter(path.split("/")[0] if "/" in path else "." for path in traced.modules)
        print(
            json.dumps(
                {
                    "part": name,
                    "modules": len(traced.modules),
                    "frames_at_backward": traced.at_backward,
                    "packages": dict(sorted(packages.items())),
                }
            )
        )
        for module, calls in sorted(traced.modules.items()) if given.list else ():
            print(f"{calls:8} {module}")


if __name__ == "__main__":
    main()
