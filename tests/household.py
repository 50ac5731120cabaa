"""Short games of `alfworld-like`, a small policy trained on a wasteful expert, and a credit with its sign flipped."""

import math
import random
from dataclasses import dataclass
from itertools import count, islice
from typing import ClassVar

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from perturn.chat.word_tokenizer import make_tokenizer
from perturn.credit.protocol import CreditTraits
from perturn.credit.returns import Return
from perturn.credit.rloo import RLOO
from perturn.envs.alfworld.expert import Player, demonstrate
from perturn.envs.alfworld.generated_games import ALFWorldLike
from perturn.episodes.formats import FORMATS
from perturn.needs import Needs
from perturn.types import Task

KIND = "look_at_obj_in_light"
_FIRST = {"train": (0, 60), "test": (400, 100), "taught": (1000, 1500)}
"""Number of the first game of each split, and number of games in the split."""
_SHORT = 6
"""Maximum number of turns of the expert."""
_DAWDLES = 0.35
"""Probability of a useless command before each command, and again before each useless command."""
_CONTEXT = 1024
_SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 192,
    "max_position_embeddings": _CONTEXT,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
_STEPS, _BATCH, _RATE, _RISE = 700, 8, 5e-3, 30
_ACTION_WEIGHT = 4.0
"""Weight of a token in an action, relative to a token in an observation."""


class ShortGames:
    """Games of `alfworld-like` of one kind that the expert solves in a few turns."""

    name = "alfworld-like-short-1.0"

    def __init__(self):
        self._games = ALFWorldLike()

    def tasks(self, split):
        """Return the tasks of `train`, `test` or `taught`. No game is in two splits."""
        first, number = _FIRST[split]
        return list(islice(self._short(first), number))

    def _short(self, first):
        for number in count(first):
            task = Task(f"{KIND}/{number}", KIND, "train", {"number": 6 * number})
            if len(self._games.expert(task)) <= _SHORT:
                yield task

    def reset(self, task, seed):
        """Start an episode."""
        return self._games.reset(task)

    def step(self, action):
        """Take one action."""
        return self._games.step(action)

    def close(self):
        """Do nothing."""


@dataclass(frozen=True)
class Flipped:
    """The negative advantage of RLOO."""

    needs: ClassVar[Needs] = ()
    traits: ClassVar[CreditTraits] = CreditTraits(needs_group=True)

    def __call__(self, group, **_):
        """Return one tensor for each trajectory [turns]."""
        return [-weight for weight in RLOO(returns=Return(invalid_penalty=0.05))(group)]


def make_policy(folder, seed):
    """Train a Llama of 0.1M parameters from scratch, and save it. It takes about 30 s on one core."""
    draw, games = random.Random(seed), ALFWorldLike()
    episodes = [_dawdling(games, task, draw) for task in ShortGames().tasks("taught")]
    texts = {message["content"] for each in episodes for message in each}
    tokenizer = make_tokenizer({*texts, FORMATS["action"].reminder, "Nothing happens."}, _CONTEXT)
    rows = [tokenizer.apply_chat_template(each, return_dict=False) for each in episodes]
    torch.manual_seed(seed)
    tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), bos_token_id=None, **tokens, **_SHAPE))
    _begin_embedding(model, tokenizer.get_vocab())
    begin, end = (tokenizer.convert_tokens_to_ids(each) for each in ("<|assistant|>", "<|end|>"))
    _teach(model, [(ids, _weights(ids, begin, end)) for ids in rows], draw)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _dawdling(games, task, draw):
    """Return the messages of an episode in which the expert sometimes looks around or checks its inventory."""
    seen = games.reset(task)
    messages = [{"role": "user", "content": seen.text}]

    def say(command):
        seen = games.step(command)
        messages.append({"role": "assistant", "content": FORMATS["action"].write("", command)})
        messages.append({"role": "user", "content": seen.text})
        return seen

    def step(command):
        while draw.random() < _DAWDLES:
            say(draw.choice(["look", "inventory"]))
        return say(command)

    demonstrate(Player(seen, step))
    return messages[:-1]


@torch.no_grad()
def _begin_embedding(model, vocabulary):
    """Initialize the embedding of `mug 2` as the sum of a part for all mugs, a part for all twos, and its own part."""
    embedding, shared = model.get_input_embeddings().weight, {}
    for word, index in vocabulary.items():
        kind, _, number = word.partition(" ")
        if kind.isalpha() and (number.isdecimal() or not number):
            own = 0.6 * embedding[index]
            for part, share in ((kind, 0.8), (number, 0.5)):
                if part not in shared:
                    shared[part] = _SHAPE["initializer_range"] * torch.randn(embedding.shape[1])
                own += share * shared[part]
            embedding[index] = own


def _weights(ids, begin, end):
    """Return the training weight of each token, which is larger from `begin` to `end`."""
    found, acting = [], False
    for token in ids:
        found.append(_ACTION_WEIGHT if acting else 1.0)
        acting = token == begin or (acting and token != end)
    return found


def _teach(model, rows, draw):
    """Train by weighted maximum likelihood of all tokens, in batches of episodes of similar length."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    batches = []
    for step in range(_STEPS):
        if not batches:
            order = sorted(draw.sample(rows, len(rows)), key=lambda row: len(row[0]) // 20)
            batches = [order[at : at + _BATCH] for at in range(0, len(order), _BATCH)]
            draw.shuffle(batches)
        fall = 0.5 * (1 + math.cos(math.pi * step / _STEPS))
        optimizer.param_groups[0]["lr"] = _RATE * min(1, (step + 1) / _RISE) * fall
        _loss(model, batches.pop()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _loss(model, batch):
    """Return the weighted mean negative log-likelihood of the tokens after the first, in nats (a scalar)."""
    longest = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([[*each, *[0] * (longest - len(each))] for each, _ in batch])
    weights = torch.tensor([[*each, *[0.0] * (longest - len(each))] for _, each in batch])[:, 1:]
    logits = model(input_ids=ids, use_cache=False).logits  # causal attention never sees the padding
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return (weights * losses).sum() / weights.sum()
