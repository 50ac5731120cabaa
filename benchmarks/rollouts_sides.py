"""Define the compared ways to answer conversations, and generate the conversations."""

from __future__ import annotations

import random
import time
import warnings
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
import transformers
from training_models import make_model
from transformers import AutoModelForCausalLM, GenerationConfig

from perturn.chat.model_names import resolve_model
from perturn.engines.local.engine import LocalEngine
from perturn.types import Action, Prompt, Sampling, Turn

warnings.filterwarnings("ignore")
transformers.utils.logging.set_verbosity_error()

WORDS = 8_000
"""Number of words from which observations are drawn."""


@dataclass(frozen=True)
class Shape:
    """Sizes of conversations."""

    conversations: int = 16
    turns: int = 10
    observation: int = 60
    action: int = 20
    spread: float = 0.0
    """Relative range of lengths and turns, which are uniform within this share of their means."""
    at_once: int | None = None
    """Number of conversations that run at the same time. If None, all do."""


@dataclass(frozen=True)
class Script:
    """Observations of one conversation, and the lengths of its answers."""

    observations: tuple[str, ...]
    actions: tuple[int, ...]


def make_scripts(shape: Shape, seed: int = 0) -> list[Script]:
    """Return the conversations of a shape."""
    draw = random.Random(seed)

    def around(center: int) -> int:
        return round(center * draw.uniform(1 - shape.spread, 1 + shape.spread))

    def observation() -> str:
        return " ".join(str(draw.randrange(WORDS)) for _ in range(around(shape.observation)))

    turns = [around(shape.turns) for _ in range(shape.conversations)]
    return [
        Script(tuple(observation() for _ in range(n)), tuple(around(shape.action) for _ in range(n)))
        for n in turns
    ]


def load(size: str, dtype: str) -> Any:
    """Return a Llama of random weights with a vocabulary of 8192, or SmolLM2-135M."""
    if size == "135M":
        model = AutoModelForCausalLM.from_pretrained(resolve_model("smollm2-135m"), dtype=torch.float32)
    else:
        model = make_model(size, 8_192)
    return model.to(getattr(torch, dtype)).eval()


class Words:
    """Tokenizer that maps words to tokens. It has no end token, so that answers have their full length."""

    end_ids: frozenset[int] = frozenset()

    def ids(self, text: str) -> list[int]:
        """Return a token for each word."""
        return [int(word) if word.isdigit() else zlib.crc32(word.encode()) % WORDS for word in text.split()]

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Return the tokens of all observations and actions in order."""
        found: list[int] = []
        for turn in prompt.turns:
            found += self.ids(turn.observation[0]["content"])
            found += turn.action.token_ids or ()
        return found + self.ids(prompt.observation[0]["content"])

    def action(self, ids: Sequence[int], logprobs: Sequence[float], tools: object = ()) -> Action:
        """Return an action with these tokens, and a text that an environment can parse."""
        return Action("Action: go", tuple(ids), tuple(logprobs))


@dataclass
class Played:
    """Result of a side."""

    seconds: float
    turns: int
    tokens: int
    """Number of new tokens, in observations and actions."""
    clock: list[float]
    """Seconds after which the k-th turns of all conversations were answered."""
    answers: dict[tuple[int, int], tuple[int, ...]]
    """Token ids by conversation and turn."""


def play_ours(model: Any, scripts: Sequence[Script], shape: Shape) -> Played:
    """Play conversations with Perturn's local engine."""
    engine = LocalEngine(model, Words(), cache_gigabytes=8.0 if model.device.type == "cpu" else 40.0)
    found = play_with(engine, scripts, shape)
    engine.close()
    return found


def play_with(engine: LocalEngine, scripts: Sequence[Script], shape: Shape) -> Played:
    """Play conversations on an engine. Each continues as soon as it is answered."""
    waiting, open_ = deque(enumerate(scripts)), 0
    turns: dict[str, list[Turn]] = {}
    answers: dict[tuple[int, int], tuple[int, ...]] = {}
    counts: list[list[float]] = []
    began = time.perf_counter()

    def ask(number: int) -> None:
        script, so_far = scripts[number], turns[str(number)]
        heard = ({"role": "user", "content": script.observations[len(so_far)]},)
        limit = Sampling(max_new_tokens=script.actions[len(so_far)])
        engine.submit([Prompt((), tuple(so_far), heard, 0, str(number))], limit)

    while waiting or open_:
        while waiting and open_ < (shape.at_once or shape.conversations):
            number, _ = waiting.popleft()
            turns[str(number)], open_ = [], open_ + 1
            ask(number)
        for prompt, action in engine.advance():
            number, so_far = int(prompt.conversation), turns[prompt.conversation]
            assert isinstance(action, Action)
            answers[number, len(so_far)] = action.token_ids or ()
            counts += [[]] * (len(so_far) + 1 - len(counts))
            counts[len(so_far)] = [*counts[len(so_far)], time.perf_counter() - began]
            so_far.append(Turn(prompt.observation, action))
            if len(so_far) < len(scripts[number].observations):
                ask(number)
            else:
                engine.forget(prompt.conversation)
                open_ -= 1
    seconds = time.perf_counter() - began
    return Played(seconds, len(answers), _tokens(scripts), [max(each) for each in counts], answers)


def _tokens(scripts: Sequence[Script]) -> int:
    return sum(len(text.split()) for one in scripts for text in one.observations) + sum(
        sum(one.actions) for one in scripts
    )


def histories(scripts: Sequence[Script], played: Played, turn: int) -> list[list[int]]:
    """Return the tokens that each conversation's policy has read before a turn, with the played actions."""
    words = Words()
    found = []
    for number, script in enumerate(scripts):
        ids: list[int] = []
        for k in range(turn):
            ids += words.ids(script.observations[k]) + list(played.answers[number, k])
        found.append(ids + words.ids(script.observations[turn]))
    return found


def time_peer(
    peer: str, model: Any, scripts: Sequence[Script], played: Played, every: int
) -> tuple[float, float]:
    """Time all turns of a peer that reads the whole history. Return the seconds, and the share of equal tokens.

    Only some turns are timed, and the others are interpolated. The cost of a turn depends only on the length of its
    history.
    """
    turns = len(scripts[0].observations)
    timed = sorted({*range(0, turns, every), turns - 1})
    seconds, same = {}, []
    for turn in timed:
        asked = histories(scripts, played, turn)
        began = time.perf_counter()
        answers = PEERS[peer](model, asked, scripts[0].actions[turn])
        seconds[turn] = time.perf_counter() - began
        same += [
            mean(a == b for a, b in zip(answer, played.answers[number, turn], strict=True))
            for number, answer in enumerate(answers)
        ]
    total = 0.0
    for turn in range(turns):
        before, after = max(t for t in timed if t <= turn), min(t for t in timed if t >= turn)
        share = (turn - before) / (after - before) if after > before else 0.0
        total += (1 - share) * seconds[before] + share * seconds[after]
    return total, mean(same)


def re_encode(model: Any, asked: list[list[int]], new: int) -> list[list[int]]:
    """Answer with `generate` on the whole histories, padded on the left."""
    longest = max(map(len, asked))
    ids = torch.zeros(len(asked), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, each in enumerate(asked):
        ids[row, longest - len(each) :] = torch.tensor(each)
        mask[row, longest - len(each) :] = 1
    with torch.inference_mode():
        found = model.generate(
            ids.to(model.device), attention_mask=mask.to(model.device), generation_config=_greedy(new)
        )
    return [row[longest:].tolist() for row in found]


def continuous(model: Any, asked: list[list[int]], new: int) -> list[list[int]]:
    """Answer with the continuous batching of transformers on the whole histories."""
    found = model.generate_batch(inputs=asked, generation_config=_greedy(new), progress_bar=False)
    return [
        list(found[key].generated_tokens) for key in sorted(found, key=lambda key: int(key.split("_")[-1]))
    ]


def _greedy(new: int) -> GenerationConfig:
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=new,
        min_new_tokens=new,
        eos_token_id=-1,
        pad_token_id=0,
        use_cache=True,
    )


PEERS = {"re-encode": re_encode, "continuous": continuous}
