r"""Measure turns per second of vLLM on the conversations of `rollouts.py`, in the environment of `make test-vllm`.

    echo '{"model": FOLDER, "dtype": "float32", "observations": [[[1, 2], [3]]], "actions": [[20, 20]]}' \
        | .venv-vllm/bin/python benchmarks/rollouts_vllm.py

Observations and the lengths of actions are lists by conversation and turn. vLLM runs in Perturn's engine, whose
overhead is counted. The start of vLLM and a warm-up round are not counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def time_vllm(
    python: str,
    model: str | Path,
    dtype: str,
    observations: Sequence[Sequence[Sequence[int]]],
    actions: Sequence[Sequence[int]],
    **options: Any,
) -> dict[str, Any]:
    """Play conversations with vLLM in a process of another environment.

    Args:
        python: Interpreter of that environment.
        model: Folder that `save_pretrained` wrote.
        dtype: float32 or bfloat16.
        observations: Token ids, by conversation and turn.
        actions: Number of tokens of each action, by conversation and turn.
        options: Further engine arguments of vLLM.

    Returns:
        `seconds`, `turns`, `tokens` (number of new tokens), `reused` (number of prompt tokens found in the cache), and
        `answers` (token ids by conversation and turn).
    """
    asked = {
        "model": str(model),
        "dtype": dtype,
        "observations": observations,
        "actions": actions,
        "options": options,
    }
    source = str(Path(__file__).parents[1] / "src")
    done = subprocess.run(
        [python, __file__],
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        env=os.environ | {"PYTHONPATH": source},
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def play(engine: Any, observations: list[list[list[int]]], actions: list[list[int]], tag: str) -> list[Any]:
    """Play all conversations at once, each as fast as it is answered. Return token ids by conversation and turn."""
    from perturn.types import Prompt, Sampling, Turn

    turns: list[list[Turn]] = [[] for _ in observations]

    def ask(number: int) -> None:
        heard = ({"role": "user", "content": observations[number][len(turns[number])]},)
        limit = Sampling(max_new_tokens=actions[number][len(turns[number])])
        engine.submit([Prompt((), tuple(turns[number]), heard, 0, f"{tag}#{number}")], limit)

    for number in range(len(observations)):
        ask(number)
    left = sum(map(len, observations))
    while left:
        for prompt, action in engine.advance():
            number = int(prompt.conversation.partition("#")[2])
            turns[number].append(Turn(prompt.observation, action))
            left -= 1
            if len(turns[number]) < len(observations[number]):
                ask(number)
    return [[list(turn.action.token_ids) for turn in each] for each in turns]


class Ids:
    """Tokenizer for observations that are token ids. It has no end token, so that answers have their full length."""

    end_ids: frozenset[int] = frozenset()

    def prompt_ids(self, prompt: Any) -> list[int]:
        """Return the tokens of all observations and actions in order."""
        found: list[int] = []
        for turn in prompt.turns:
            found += turn.observation[0]["content"]
            found += turn.action.token_ids
        return found + list(prompt.observation[0]["content"])

    def action(self, ids: Sequence[int], logprobs: Sequence[float], tools: object = ()) -> Any:
        """Return an action with these tokens."""
        from perturn.types import Action

        return Action("", tuple(ids), tuple(logprobs))


def main() -> None:
    """Read the conversations, play them, and print the result."""
    from perturn.engines.vllm.engine import VllmEngine
    from perturn.engines.vllm.settings import VllmSettings

    asked = json.load(sys.stdin)
    observations, actions = asked["observations"], asked["actions"]
    longest = max(sum(map(len, o)) + sum(a) for o, a in zip(observations, actions, strict=True))
    settings = VllmSettings(context=longest + 1, cache_gigabytes=4.0, options=asked.get("options", {}))
    engine = VllmEngine(asked["model"], Ids(), settings, dtype=asked["dtype"])
    try:
        warm = [[list(reversed(turn)) for turn in each[:2]] for each in observations]
        play(engine, warm, [each[:2] for each in actions], "warm")
        before, began = engine.reused_tokens, time.perf_counter()
        answers = play(engine, observations, actions, "play")
        seconds = time.perf_counter() - began
    finally:
        engine.close()
    new = sum(len(turn) for each in [*observations, *answers] for turn in each)
    print(
        json.dumps(
            {
                "seconds": seconds,
                "turns": sum(map(len, answers)),
                "tokens": new,
                "reused": engine.reused_tokens - before,
                "answers": answers,
            }
        )
    )


if __name__ == "__main__":
    main()
