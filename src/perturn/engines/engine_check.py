"""Check of an engine against the interface `Engine`: ask it a few prompts, and report its faults in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from perturn.errors import EngineFailure
from perturn.types import Action, Engine, Message, Prompt, Sampling, StreamingEngine, Turn

_GREEDY = Sampling(max_new_tokens=8)
_SAMPLED = Sampling(temperature=1.0, max_new_tokens=8)
_HEARD = ("Say one word.", "What is two and two? Answer with a number.", "Name a colour. " * 12)


def check_engine(engine: Engine) -> list[str]:
    """Ask an engine a few prompts, in one batch and one by one, and return its problems.

    Args:
        engine: An open engine; it stays open.

    Returns:
        One text per problem, with its likely cause and remedy; an empty list if the engine passes.
    """
    problems: list[str] = []
    if not isinstance(engine.name, str) or not engine.name:
        problems.append(f"name must be a text such as 'policy@1a2b', got {engine.name!r}. Remedy: set it.")
    prompts = [_prompt(number, text) for number, text in enumerate(_HEARD)]
    try:
        together = engine.generate(prompts, _SAMPLED)
        problems += _answer_problems(prompts, together, _SAMPLED)
        if not problems:
            problems += _ending_problems(engine, prompts, together)
        if isinstance(engine, StreamingEngine):
            problems += _stream_problems(engine, prompts)
        for prompt in prompts:
            engine.forget(prompt.conversation)
        engine.forget("a conversation nobody had")
    except Exception as error:  # noqa: BLE001  a user's engine may raise anything
        problems.append(
            f"it raised {type(error).__name__}: {error}. Remedy: return an EngineFailure for a prompt that cannot be "
            "answered, and raise only if none can."
        )
    return problems


def _prompt(number: int, text: str, turns: Sequence[Turn] = ()) -> Prompt:
    system: Message = {"role": "system", "content": "Answer shortly."}
    return Prompt(
        (system,), tuple(turns), ({"role": "user", "content": text},), 1000 + number, f"check#{number}"
    )


def _answer_problems(prompts: Sequence[Prompt], answers: Any, sampling: Sampling) -> list[str]:
    """Return faults of the answers to a batch, one text per fault."""
    if not isinstance(answers, list) or len(answers) != len(prompts):
        return [
            f"generate returned {answers!r:.80}. Remedy: return a list with one answer a prompt, in order."
        ]
    found = []
    for answer in answers:
        if not isinstance(answer, Action | EngineFailure):
            found.append(f"generate returned {answer!r:.80}. Remedy: return Action or EngineFailure objects.")
        elif isinstance(answer, EngineFailure):
            found.append(f"a short prompt failed: {answer}. Remedy: see why.")
        elif answer.token_ids is not None:
            found += _token_problems(answer, sampling)
    return found


def _token_problems(action: Action, sampling: Sampling) -> list[str]:
    """Return faults in the number of sampled tokens of an action and in their log-probabilities."""
    ids, logprobs = action.token_ids or (), action.logprobs
    found = []
    if not 1 <= len(ids) <= sampling.max_new_tokens:
        found.append(
            f"an answer has {len(ids)} tokens. Remedy: stop at max_new_tokens={sampling.max_new_tokens}."
        )
    if logprobs is None or len(logprobs) != len(ids):
        found.append(
            f"{len(ids)} tokens have log-probabilities {logprobs!r:.60}. Remedy: one for each token."
        )
    elif not all(math.isfinite(each) and each <= 1e-3 for each in logprobs):
        found.append(f"log-probabilities {logprobs!r:.60} are not. Remedy: natural logarithms, at most 0.")
    return found


def _ending_problems(engine: Engine, prompts: Sequence[Prompt], together: Sequence[Any]) -> list[str]:
    """Return faults of two checks: answers must not depend on the rest of their batch, and a second turn must work."""
    found = []
    if isinstance(together[0], Action) and together[0].token_ids is not None:
        alone = [engine.generate([prompt], _SAMPLED)[0] for prompt in reversed(prompts)][::-1]
        if [one.token_ids if isinstance(one, Action) else None for one in alone] != [
            one.token_ids for one in together
        ]:
            found.append(
                "answers to the same prompts and seeds differ alone and together. Remedy: draw each prompt's tokens "
                "from a generator of its own, seeded with Prompt.seed (in bfloat16, rounding can do it too)."
            )
    heard = prompts[0].observation
    later = [_prompt(0, "And one more.", [Turn(heard, together[0])])]
    return found + _answer_problems(later, engine.generate(later, _GREEDY), _GREEDY)


def _stream_problems(engine: StreamingEngine, prompts: Sequence[Prompt]) -> list[str]:
    """Return a fault if `advance` does not return each submitted prompt exactly once."""
    answered: list[Prompt] = []
    for prompt in prompts:
        engine.submit([prompt], _GREEDY)
        answered += [one for one, _ in engine.advance()]
    for _ in range(10_000):
        if len(answered) >= len(prompts):
            break
        answered += [one for one, _ in engine.advance()]
    names = [[prompt.conversation for prompt in each] for each in (answered, prompts)]
    if sorted(names[0]) != sorted(names[1]) or engine.advance():
        return [
            f"advance answered {len(answered)} prompts of the {len(prompts)} that were submitted. Remedy: hand each "
            "out once, with the Prompt object it was submitted as."
        ]
    return []
