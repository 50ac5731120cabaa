"""Preference pairs, and groups of episodes of one task, of the shape of agents' episodes, as token ids."""

from __future__ import annotations

import random
from dataclasses import dataclass

from perturn.chat.tokens import NO_TURN, Encoded
from perturn.policy.examples import Example


@dataclass(frozen=True)
class Shape:
    """Sizes of an episode, in tokens; the defaults are ScienceWorld's under a 49k vocabulary."""

    turns: tuple[int, int] = (10, 20)
    prompt: tuple[int, int] = (60, 140)
    observation: tuple[int, int] = (40, 120)
    action: tuple[int, int] = (6, 16)
    shared_turns: tuple[int, int] = (0, 3)
    """Turns with which both sides of a pair begin."""
    one_shot: float = 0.0
    """Share of a sequence that is one worked example, the same in every prompt."""


@dataclass(frozen=True)
class Pair:
    """One pair: what both trainers get."""

    example: Example
    prompt: int
    """Tokens of the prompt, which TRL leaves out of the loss."""


def make_pairs(
    shape: Shape, vocab: int, pairs: int, batches: int, loss_tokens: str, seed: int = 0
) -> list[list[Pair]]:
    """Batches of pairs.

    Args:
        shape: Sizes.
        vocab: Ids are drawn below this.
        pairs: Of a batch.
        batches: Number of batches.
        loss_tokens: `assistant`, or `completion` for every token after the prompt, as TRL has it.
        seed: Of all draws.
    """
    draw = random.Random(seed)
    mean = sum(shape.prompt) / 2 + sum(shape.turns) / 2 * (sum(shape.observation) + sum(shape.action)) / 2
    worked = _words(draw, vocab, int(mean * shape.one_shot / (1 - shape.one_shot)))
    return [[_pair(draw, shape, vocab, worked, loss_tokens) for _ in range(pairs)] for _ in range(batches)]


@dataclass(frozen=True)
class Episode:
    """One sample of a group: what both trainers get."""

    encoded: Encoded
    prompt: int
    """Tokens of the prompt, the first observation among them."""
    reward: float


def make_groups(
    shape: Shape, vocab: int, worked: int, tasks: int, samples: int, steps: int, seed: int = 0
) -> list[list[Episode]]:
    """Episodes of each step, those of a task side by side.

    Args:
        shape: Sizes.
        vocab: Ids are drawn below this.
        worked: Tokens of the worked example, the same in every prompt.
        tasks: Of a step.
        samples: Of a task.
        steps: Number of steps.
        seed: Of all draws.
    """
    draw = random.Random(seed)
    example = _words(draw, vocab, worked)

    def group() -> list[Episode]:
        prompt = example + _words(draw, vocab, draw.randint(*shape.prompt))
        return [_episode(draw, shape, vocab, prompt) for _ in range(samples)]

    return [[episode for _ in range(tasks) for episode in group()] for _ in range(steps)]


def _episode(draw: random.Random, shape: Shape, vocab: int, prompt: list[int]) -> Episode:
    first = _words(draw, vocab, draw.randint(*shape.action))
    turns = [([], first)] + [_turn(draw, shape, vocab) for _ in range(draw.randint(*shape.turns) - 1)]
    return Episode(_encode(prompt, turns, "assistant"), len(prompt), draw.random())


def _pair(draw: random.Random, shape: Shape, vocab: int, worked: list[int], loss_tokens: str) -> Pair:
    prompt = worked + _words(draw, vocab, draw.randint(*shape.prompt))
    common = [_turn(draw, shape, vocab) for _ in range(draw.randint(*shape.shared_turns))]
    sides = []
    for _ in range(2):
        own = max(1, draw.randint(*shape.turns) - len(common))
        turns = common + [_turn(draw, shape, vocab) for _ in range(own)]
        sides.append(_encode(prompt, turns, loss_tokens))
    return Pair(Example(*sides), len(prompt))


def _turn(draw: random.Random, shape: Shape, vocab: int) -> tuple[list[int], list[int]]:
    return tuple(_words(draw, vocab, draw.randint(*size)) for size in (shape.observation, shape.action))  # type: ignore[return-value]


def _words(draw: random.Random, vocab: int, count: int) -> list[int]:
    return [draw.randrange(vocab) for _ in range(count)]


def _encode(prompt: list[int], turns: list[tuple[list[int], list[int]]], loss_tokens: str) -> Encoded:
    ids, turn = list(prompt), [NO_TURN] * len(prompt)
    for index, (observation, action) in enumerate(turns):
        heard = index if loss_tokens == "completion" else NO_TURN
        ids += observation + action
        turn += [heard] * len(observation) + [index] * len(action)
    return Encoded(tuple(ids), tuple(turn), ("user",) * len(ids))
