"""Measure how often greedy matching of tool calls misses the largest sum, and the time of a matching.

    python benchmarks/matches.py

The episodes repeat the gold calls of BFCL's 200 tasks five times. Calls are left out, duplicated, or changed in one
value at random.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from perturn.envs.bfcl.environment import Bfcl
from perturn.episodes.tool_calls import ToolCall, call_similarity
from perturn.methods.matchtir.tool_matches import gold_calls
from perturn.stats.matching import greedy_matches, hard_matches, soft_matches

TIMES = 5
"""Number of episodes of each task."""
SHARE = 0.2
"""Probability that a call is left out; also the probability that it is duplicated, and that a value is changed."""


def changed(gold: Sequence[ToolCall], draw: random.Random) -> list[ToolCall]:
    """Return the calls with random omissions, duplicates and changed values."""
    found = []
    for call in gold:
        if draw.random() < SHARE:
            continue
        arguments = dict(call.arguments)
        if arguments and draw.random() < SHARE:
            arguments[draw.choice(sorted(arguments))] = "another"
        found += [ToolCall(call.name, arguments)] * (2 if draw.random() < SHARE else 1)
    return found


def timed(name: str, work: Callable[[Any], Any], cases: Sequence[Any]) -> list[Any]:
    """Return the results, and print the mean time of one."""
    start = time.perf_counter()
    found = [work(case) for case in cases]
    print(f"{name}: {1000 * (time.perf_counter() - start) / len(cases):.2f} ms, mean of {len(cases)}")
    return found


def main() -> None:
    """Print the counts and the times."""
    env, draw = Bfcl(), random.Random(0)
    tasks = env.tasks("all")
    gold = timed("gold calls of a task", lambda task: gold_calls(env, task), tasks)
    played = [(one, changed(one, draw)) for one in gold for _ in range(TIMES)]
    cases = [(wanted, calls) for wanted, calls in played if calls]
    similarities = timed(
        "similarities of an episode",
        lambda case: [[call_similarity(call, one) for one in case[0]] for call in case[1]],
        cases,
    )
    best = timed("hard", hard_matches, similarities)
    greedy = timed("greedy", greedy_matches, similarities)
    timed("soft, regularization 0.1", lambda one: soft_matches(one, 0.1), similarities)
    short = sum(sum(b) - sum(g) > 1e-9 for b, g in zip(best, greedy, strict=True))
    calls = sum(map(len, gold)) / len(gold)
    print(f"greedy falls short in {short} of {len(cases)} episodes; {calls:.1f} gold calls in the mean")


if __name__ == "__main__":
    main()
