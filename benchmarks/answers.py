"""Measure the time to compute likelihoods of answers, against one pass per turn and against playing the episodes.

    python benchmarks/answers.py QUESTIONS CORPUS --model FOLDER --tasks 2 --samples 2

The episodes are HotpotQA questions under the protocol `hotpotqa-react`, or with `--short` as in
`recipes/hotpotqa_igpo_demo.yaml`. A model on this machine samples them. `ours` computes the likelihood of the gold
answer before each turn and after the last turn, with one pack for each task, as `igpo` needs it. `alone` computes each
context separately, with the same code and tokens, so that the two differ only in sharing. `own` computes the
likelihoods of the group's own answers, as `siop` needs them. The three alternate, and ratios are of medians. `played`
is the time to play the episodes, without loading the model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from perturn import collect
from perturn.chat.model_names import load_tokenizer
from perturn.chat.tokens import Renderer
from perturn.config.sections import TOKEN_BUDGET
from perturn.envs.named_protocols import PROTOCOLS
from perturn.methods.siop.answer_clusters import clusters_of, own_answers_of
from perturn.methods.siop.siop_credit import AnswerClusters
from perturn.policy.logprobs import prepare
from perturn.policy.models import load_model
from perturn.policy.packing import lay_out
from perturn.policy.reference import compute_logprobs
from perturn.quantities.answer import answer_logprobs
from perturn.quantities.answer_turns import Branch, as_sequences, branches, branches_of
from perturn.quantities.readers import Reader
from perturn.types import Sampling, Trajectory, failed

FORM = "Thought: I know the answer.\nAction: finish[{answer}]"


def alone(model: Any, found: list[list[Branch]]) -> list[list[float]]:
    """Return the likelihood of each branch, computed in a separate pass."""
    with torch.no_grad():
        return [
            [float(compute_logprobs(model, [as_sequences([one])])[0].double().mean()) for one in each]
            for each in found
        ]


def played_by(model: Any, tokenizer: Any, given: argparse.Namespace) -> list[Trajectory]:
    """Return episodes of the questions, played by the model."""
    rules = PROTOCOLS["hotpotqa-react"]
    world: dict[str, Any] = {
        "name": "hotpotqa",
        "questions": {"dev": given.questions},
        "corpus": given.corpus,
        "match": "best" if given.short else "title",
    }
    return collect(
        model,
        world,
        split="dev",
        n=given.tasks,
        protocol=replace(rules, example=(), max_turns=6) if given.short else rules,
        samples=given.samples,
        sampling=Sampling(temperature=1.0, max_new_tokens=given.tokens),
        concurrency=given.concurrency,
        tokenizer=tokenizer,
    )


def tokens_of(episodes: Sequence[Trajectory], found: Iterable[list[Branch]]) -> int:
    """Return the number of tokens with one pack for each task."""
    packs: dict[str, list[Any]] = {}
    for one, own in zip(episodes, found, strict=True):
        if own:
            packs.setdefault(one.task.id, []).append(as_sequences(own))
    return sum(len(lay_out(pack)["ids"]) for pack in packs.values())


def timed(asked: dict[str, Callable[[], Any]], repeats: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the median seconds and the result of each function, called in alternation."""
    seconds: dict[str, list[float]] = {name: [] for name in asked}
    found: dict[str, Any] = {}
    for _ in range(repeats):
        for name, ask in asked.items():
            start = time.perf_counter()
            found[name] = ask()
            seconds[name].append(time.perf_counter() - start)
    return {name: median(each) for name, each in seconds.items()}, found


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions")
    parser.add_argument("corpus")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=40, help="New tokens a turn.")
    parser.add_argument("--concurrency", type=int, default=16, help="Episodes at the same time.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="No worked example, six turns, best matches.")
    return parser.parse_args()


def main() -> None:
    """Measure, and print one JSON object."""
    given = arguments()
    model, tokenizer = load_model(given.model).float(), load_tokenizer(given.model)
    prepare(model)
    start = time.perf_counter()
    episodes = played_by(model, tokenizer, given)
    played = time.perf_counter() - start
    renderer = Renderer(tokenizer)
    kept = [one for one in episodes if one.turns and not failed(one)]
    found = [[one for one in branches(renderer, each, FORM) if one] for each in kept]
    reader = Reader(model, renderer, TOKEN_BUDGET)
    took, results = timed(
        {
            "ours": lambda: answer_logprobs(model, renderer, kept, FORM),
            "alone": lambda: alone(model, found),
            "own": lambda: own_answers_of(kept, AnswerClusters(), FORM, reader),
        },
        given.repeats,
    )
    apart = max(
        abs(a - b)
        for each in zip(results["ours"], results["alone"], strict=True)
        for a, b in zip(*each, strict=True)
    )
    texts = clusters_of(kept, AnswerClusters(), FORM)[1]
    own = [
        [one for each in branches_of(renderer, trajectory, FORM, asked) if each for one in each]
        if asked
        else []
        for trajectory, asked in zip(kept, texts, strict=True)
    ]
    row = {
        "model": given.model,
        "episodes": len(kept),
        "turns": sum(len(one.turns) for one in kept),
        "contexts": sum(map(len, found)),
        "contexts_own": sum(map(len, own)),
        "answers_own": sum(map(len, texts)),
        "tokens_ours": tokens_of(kept, found),
        "tokens_own": tokens_of(kept, own),
        "tokens_alone": sum(one.stop for each in found for one in each),
        "seconds": {name: round(each, 2) for name, each in took.items()} | {"played": round(played, 2)},
        "alone_over_ours": round(took["alone"] / took["ours"], 2),
        "own_over_ours": round(took["own"] / took["ours"], 2),
        "ours_over_played": round(took["ours"] / played, 3),
        "own_over_played": round(took["own"] / played, 3),
        "largest_difference": apart,
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
