"""Seconds that the gold answer's likelihood costs, against a pass for each turn and against playing the episodes.

    python benchmarks/answers.py QUESTIONS CORPUS --model FOLDER --tasks 2 --samples 2

HotpotQA as `hotpotqa-react` has it, sampled by a model on this machine. `ours` computes the likelihood before each turn
and after the last one with one pack a task; `alone` computes each context by itself, by the same code and from the same
tokens, so that the two differ in sharing alone. They alternate, and a ratio is of medians. `played` is the time of the
episodes, the loading of the model left out.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import torch

from perturn import collect
from perturn.policy.answers import answer_logprobs
from perturn.policy.branches import Branch, as_sequences, branches
from perturn.policy.logprobs import prepare
from perturn.policy.models import load_model
from perturn.policy.names import load_tokenizer
from perturn.policy.packing import lay_out
from perturn.policy.reference import compute_logprobs
from perturn.policy.tokens import Renderer
from perturn.types import Sampling, failed

FORM = "Thought: I know the answer.\nAction: finish[{answer}]"


def alone(model: Any, found: list[list[Branch]]) -> list[list[float]]:
    """Return the likelihood of each branch by a pass of its own."""
    with torch.no_grad():
        return [
            [float(compute_logprobs(model, [as_sequences([one])])[0].double().mean()) for one in each]
            for each in found
        ]


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions")
    parser.add_argument("corpus")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=40, help="New tokens a turn.")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    model, tokenizer = load_model(given.model).float(), load_tokenizer(given.model)
    prepare(model)
    world = {"name": "hotpotqa", "questions": {"dev": given.questions}, "corpus": given.corpus}
    start = time.perf_counter()
    episodes = collect(
        model,
        world,
        split="dev",
        n=given.tasks,
        protocol="hotpotqa-react",
        samples=given.samples,
        sampling=Sampling(temperature=1.0, max_new_tokens=given.tokens),
        tokenizer=tokenizer,
    )
    played = time.perf_counter() - start
    renderer = Renderer(tokenizer)
    kept = [one for one in episodes if one.turns and not failed(one)]
    found = [[one for one in branches(renderer, each, FORM) if one] for each in kept]
    seconds: dict[str, list[float]] = {"ours": [], "alone": []}
    for _ in range(given.repeats):
        start = time.perf_counter()
        ours = answer_logprobs(model, renderer, kept, FORM)
        seconds["ours"].append(time.perf_counter() - start)
        start = time.perf_counter()
        theirs = alone(model, found)
        seconds["alone"].append(time.perf_counter() - start)
    apart = max(abs(a - b) for each in zip(ours, theirs, strict=True) for a, b in zip(*each, strict=True))
    tasks = {one.task.id for one in kept}
    packs = [
        [as_sequences(own) for own, one in zip(found, kept, strict=True) if one.task.id == t] for t in tasks
    ]
    took = {name: median(each) for name, each in seconds.items()}
    row = {
        "model": given.model,
        "episodes": len(kept),
        "turns": sum(len(one.turns) for one in kept),
        "contexts": sum(map(len, found)),
        "tokens_ours": sum(len(lay_out(pack)["ids"]) for pack in packs),
        "tokens_alone": sum(one.stop for each in found for one in each),
        "seconds": {name: round(each, 2) for name, each in took.items()} | {"played": round(played, 2)},
        "alone_over_ours": round(took["alone"] / took["ours"], 2),
        "ours_over_played": round(took["ours"] / played, 3),
        "largest_difference": apart,
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
