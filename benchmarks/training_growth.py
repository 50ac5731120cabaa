"""Measure how the cost of a forward and backward pass grows, with and without sharing common beginnings.

    python benchmarks/training_growth.py --out benchmarks/training_growth.json --figure docs/figures/training_growth.svg

One setting varies at a time around the default: one pair, 12 turns of 80 + 10 tokens, a prompt of 120 tokens, a
vocabulary of 8192, 5M parameters, float32, and loss on actions. Each point is the median of three passes. Passes with
and without sharing alternate.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from small_svg import pyplot, save
from training_models import make_model

from perturn.chat.tokens import NO_TURN, Encoded
from perturn.policy.logprobs import action_logprobs
from perturn.policy.packing import lay_out

Draw = random.Random


def sequences(
    *,
    turns: int = 12,
    observation: int = 80,
    action: int = 10,
    prompt: int = 120,
    shared: float = 0.0,
    vocab: int = 8192,
    groups: int = 1,
    size: int = 2,
) -> list[Encoded]:
    """Return groups of trajectories. Each group shares its prompt and the first part of its turns.

    Args:
        turns: Number of turns of a trajectory.
        observation: Number of tokens of an observation.
        action: Number of tokens of an action.
        prompt: Number of tokens of the prompt.
        shared: Share of a trajectory's tokens that its group has in common, if that is more than the prompt.
        vocab: Vocabulary size, below which token ids are drawn.
        groups: Number of groups.
        size: Number of trajectories in a group.
    """
    draw = Draw(0)
    turn = [NO_TURN] * prompt + [
        index for index in range(turns) for index in [NO_TURN] * observation + [index] * action
    ]
    found = []
    for _ in range(groups):
        common = [draw.randrange(vocab) for _ in range(max(prompt, int(shared * len(turn))))]
        for _ in range(size):
            own = [draw.randrange(vocab) for _ in range(len(turn) - len(common))]
            found.append(Encoded(tuple(common + own), tuple(turn), ("user",) * len(turn)))
    return found


SWEEPS: dict[str, dict[str, Any]] = {
    "turns": {"label": "turns of a trajectory", "values": [4, 8, 16, 32], "to": lambda x: {"turns": x}},
    "tokens": {
        "label": "tokens of a turn",
        "values": [24, 48, 96, 192],
        "to": lambda x: {"observation": x - 8, "action": 8},
    },
    "shared": {
        "label": "shared part of a pair",
        "values": [0.1, 0.3, 0.5, 0.7],
        "to": lambda x: {"shared": x},
    },
    "vocabulary": {"label": "vocabulary", "values": [8192, 32768, 131072], "to": lambda x: {"vocab": x}},
    "group": {
        "label": "trajectories of a group (half their tokens shared)",
        "values": [1, 2, 4, 8],
        "to": lambda x: {"size": x, "shared": 0.5},
    },
}


def measure(vocab: int, data: list[Encoded]) -> dict[str, Any]:
    """Return the seconds of a forward and backward pass, with and without sharing."""
    model = make_model("5M", vocab).train()
    times: dict[bool, list[float]] = {True: [], False: []}
    batches = {share: lay_out(data, share=share) for share in times}
    for turn in range(4):
        for share, batch in batches.items():
            start = time.perf_counter()
            action_logprobs(model, batch).sum().backward()
            if turn:  # the first pass is a warm-up
                times[share].append(time.perf_counter() - start)
            model.zero_grad()
    return {
        "seconds": median(times[True]),
        "seconds_unshared": median(times[False]),
        "tokens": len(batches[True]["ids"]),
        "tokens_unshared": len(batches[False]["ids"]),
    }


def sweep(values: list[Any], to: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each value of a setting."""
    rows = []
    for value in values:
        settings = to(value)
        rows.append({"value": value, **measure(settings.get("vocab", 8192), sequences(**settings))})
    return rows


def draw(rows: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """Draw one plot for each setting."""
    figure, axes = pyplot().subplots(1, len(rows), figsize=(3.2 * len(rows), 3), layout="constrained")
    for ax, (name, points) in zip(axes, rows.items(), strict=True):
        x = [point["value"] for point in points]
        ax.plot(x, [point["seconds"] for point in points], "o-", label="shared once")
        ax.plot(x, [point["seconds_unshared"] for point in points], "s--", label="each alone")
        ax.set(xlabel=SWEEPS[name]["label"], ylim=(0, None))
    axes[0].set_ylabel("seconds, forward and backward")
    axes[0].legend(frameon=False)
    save(figure, file)


def main() -> None:
    """Measure, write, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the rows here as JSON")
    parser.add_argument("--figure", type=Path, help="draw them here as SVG")
    options = parser.parse_args()
    rows = {name: sweep(each["values"], each["to"]) for name, each in SWEEPS.items()}
    text = json.dumps({"threads": torch.get_num_threads(), "sweeps": rows}, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    if options.figure:
        draw(rows, options.figure)


if __name__ == "__main__":
    main()
