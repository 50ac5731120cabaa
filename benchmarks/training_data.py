"""Generate preference pairs and groups of episodes as token ids, with the shape of agents' episodes."""

from __future__ import annotations

import random
from dataclasses import dataclass

from perturn.chat.tokens import NO_TURN, Encoded
from perturn.policy.examples import Example


@dataclass(frozen=True)
class Shape:
    """Sizes of an episode, in tokens. The defaults are of ScienceWorld with a vocabulary of 49k."""

    turns: tuple[int, int] = (10, 20)
    prompt: tuple[int, int] = (60, 140)
    observation: tuple[int, int] = (40, 120)
    action: tuple[int, int] = (6, 16)
    shared_turns: tuple[int, int] = (0, 3)
    """Smallest and largest number of first turns that both sides of a pair share."""
    one_shot: float = 0.0
    """Share of a sequence that is a worked example, which all prompts have in common."""


@dataclass(frozen=True)
class Pair:
    """One pair, as both trainers get it."""

    example: Example
    prompt: int
    """Number of tokens in the prompt, which TRL excludes from the loss."""


def make_pairs(
    shape: Shape, vocab: int, pairs: int, batches: int, loss_tokens: str, seed: int = 0
) -> list[list[Pair]]:
    """Return batches of pairs.

    Args:
        shape: Sizes of the episodes.
        vocab: Vocabulary size, below which token ids are drawn.
        pairs: Number of pairs in a batch.
        batches: Number of batches.
        loss_tokens: Tokens with loss: `assistant`, or `completion` for every token after the prompt, as in TRL.
        seed: Seed of all random draws.
    """
    draw = random.Random(seed)
    mean = sum(shape.prompt) / 2 + sum(shape.turns) / 2 * (sum(shape.observation) + sum(shape.action)) / 2
    worked = _words(draw, vocab, int(mean * shape.one_shot / (1 - shape.one_shot)))
    return [[_pair(draw, shape, vocab, worked, loss_tokens) for _ in range(pairs)] for _ in range(batches)]


@dataclass(frozen=True)
class Episode:
    """One sample of a group, as both trainers get it."""

    encoded: Encoded
    prompt: int
    """Number of tokens in the prompt, including the first observation."""
    reward: float


def make_groups(
    shape: Shape, vocab: int, worked: int, tasks: int, samples: int, steps: int, seed: int = 0
) -> list[list[Episode]]:
    """Return the episodes of each step, with the samples of a task next to each other.

    Args:
        shape: Sizes of the episodes.
        vocab: Vocabulary size, below which token ids are drawn.
        worked: Number of tokens of the worked example, which all prompts have in common.
        tasks: Number of tasks in a step.
        samples: Number of samples of a task.
        steps: Number of steps.
        seed: Seed of all random draws.
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
