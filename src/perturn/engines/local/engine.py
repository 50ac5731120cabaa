"""The default engine: a transformers model in this process, with each conversation's keys and values kept.

A turn costs its new tokens, not its history: the keys and values of a conversation stay in memory between its
turns, up to a budget; what was evicted is computed again. Prompts join the batch when they come and leave it when they
are answered, at any token; a batch is a row of new tokens without padding (see `history.py`).
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perturn.engines.local.beginnings import Beginning, Beginnings
from perturn.engines.local.blocks import Blocks, capacity_for
from perturn.engines.local.history import CALL_BYTES, NAME, History, attending
from perturn.engines.local.packed import pack_linears
from perturn.engines.local.sampling import choose
from perturn.engines.local.stored import stored_weights
from perturn.engines.protocol import Tokens
from perturn.engines.streaming import answer_all, context_full, refuse_update
from perturn.errors import EngineFailure, ModelError
from perturn.memory import return_waste
from perturn.rope import steady_length
from perturn.types import Action, Prompt, Sampling

_PASS = 2048
"""Most tokens in one pass through the model; longer prompts are fed in several."""
_SLOTS = 16
"""Conversations whose keys and values lie side by side on a CPU, where memory is taken as it is written; else 1."""
_CHECK = 24
"""Tokens on which the engine is compared with the model's own forward pass."""
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
"""Largest mean difference over the vocabulary, in nats, that rounding explains, by dtype of the weights."""


@dataclass(eq=False)
class _Row:
    """One prompt, and its answer as it grows."""

    prompt: Prompt
    sampling: Sampling
    ids: list[int]
    longest: int
    """Tokens of prompt and answer, at most."""
    draw: random.Random
    history: History
    answer: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.ids) + len(self.answer)

    @property
    def fresh(self) -> list[int]:
        """Tokens that have not been through the model."""
        done = len(self.history.ids)
        return self.ids[done:] + self.answer if done < len(self.ids) else self.answer[done - len(self.ids) :]


class LocalEngine:
    """Continuous batching with a transformers model whose layers attend to earlier tokens."""

    def __init__(
        self,
        model: Any,
        tokens: Tokens,
        *,
        name: str = "policy",
        context: int | None = None,
        cache_gigabytes: float = 2.0,
        pack: bool = True,
    ) -> None:
        """Serve a model that is already on its device and in its dtype; it is ours to change until `close`.

        Args:
            model: A causal language model.
            tokens: Conversation -> tokens.
            name: Identity of the policy, stamped on the trajectories.
            context: Longest sequence in tokens; a prompt that leaves no room for an answer is a failure. It is less
                where a longer conversation would have other positions than its turns were sampled with.
            cache_gigabytes: Memory for keys and values.
            pack: On a CPU, multiply by a packed copy of the weights.

        Raises:
            ModelError: If a layer keeps something else than keys and values of tokens, or a few tokens get other
                log-probabilities from the engine than from the model alone.
        """
        self.name = name
        self._model = model.eval()
        self._tokens = tokens
        self._limit = min(context or 2**62, steady_length(model.config) or 2**62)
        self._budget = int(cache_gigabytes * 1e9)
        self._waiting: deque[_Row] = deque()
        self._running: list[_Row] = []
        self._kept: OrderedDict[str, History] = OrderedDict()
        self._refused: list[_Row] = []
        self._token_bytes = 0
        self._beginnings = Beginnings()
        self._blocks = Blocks(_SLOTS if model.device.type == "cpu" else 1)
        check_layers(model)
        alone = _words_alone(model)
        self._attention = model.config._attn_implementation
        self._pack = pack
        self._unpack = pack_linears(model) if pack else _nothing
        model.set_attn_implementation(NAME)
        try:
            self._compare(alone)
        except BaseException:
            self.close()
            raise

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Take prompts on; `advance` answers them.

        Each answer is drawn with a generator of its prompt's own seed, so it depends on the other prompts through
        rounding alone.
        """
        for prompt in prompts:
            ids = self._tokens.prompt_ids(prompt)
            longest = min(len(ids) + sampling.max_new_tokens, self._limit)
            row = _Row(prompt, sampling, ids, longest, random.Random(prompt.seed), History(self._blocks))
            if len(ids) >= self._limit:
                self._refused.append(row)
                continue
            if prompt.conversation not in self._kept:
                self._join(row)
            self._waiting.append(row)

    def advance(self) -> list[tuple[Prompt, Action | EngineFailure]]:
        """Feed the model once; returns the prompts that are answered with that, and their answers."""
        self._admit()
        ended = self._pass() if self._running else []
        for row in ended:
            if row.history.nbytes <= self._budget:  # for the conversation's next turn
                self._kept[row.prompt.conversation] = row.history
        refused, self._refused = self._refused, []
        return [(row.prompt, context_full(len(row.ids), self._limit)) for row in refused] + [
            (row.prompt, self._tokens.action(row.answer, row.logprobs)) for row in ended
        ]

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Action | EngineFailure]:
        """One action a prompt, when all are answered."""
        return answer_all(self, prompts, sampling)

    def update_weights(self, folder: str | Path, name: str) -> None:
        """Serve other weights of the same model from now on; nothing is kept of what the old ones computed.

        They are read a tensor at a time, but for files that only transformers can read, which take a second model.

        Args:
            folder: What `save_pretrained` wrote.
            name: Identity of the new policy.

        Raises:
            RunError: If prompts are being answered.
        """
        refuse_update(len(self._waiting) + len(self._running))
        stored = stored_weights(folder, self._model, self._model.dtype)
        self._unpack()
        if stored is None:
            other = type(self._model).from_pretrained(folder, dtype=self._model.dtype)
            self._model.load_state_dict(other.state_dict())
            del other
        else:
            with torch.no_grad():
                for key, weight in self._model.state_dict().items():
                    weight.copy_(stored[key])
        self._unpack = pack_linears(self._model) if self._pack else _nothing
        self._kept.clear()
        self.name = name

    def forget(self, conversation: str) -> None:
        """Free the keys and values of a conversation."""
        self._kept.pop(conversation, None)
        return_waste()

    def close(self) -> None:
        """Drop all prompts, free all keys and values, and give the model its attention back."""
        self._waiting.clear()
        self._running.clear()
        self._kept.clear()
        self._unpack()
        self._model.set_attn_implementation(self._attention)

    def _join(self, row: _Row) -> None:
        """Find out what the prompt has in common with others."""
        row.history.end = self._beginnings.join(row.ids, row.history)

    def _admit(self) -> None:
        """Let prompts join, in their order, as far as their keys and values have room."""
        while self._waiting:
            row = self._waiting[0]
            own = self._kept.pop(row.prompt.conversation, None)
            if own is not None and 0 < len(own.ids) < len(row.ids) and row.ids[: len(own.ids)] == own.ids:
                row.history = own
            elif row.history.end is None:
                self._join(row)
            shared = row.history.end.shared if row.history.end and not row.history.ids else []
            apart = self._apart(shared)
            wanted = self._token_bytes * (
                sum(capacity_for(each.longest - each.history.tokens_apart) for each in self._running)
                + capacity_for(
                    row.longest - row.history.tokens_apart - sum(node.tokens for node in shared[:apart])
                )
                + sum(node.tokens for node in shared if not node.held)
            )
            while not (fits := wanted + self._resting() <= self._budget) and self._kept:
                self._kept.popitem(last=False)
            if not fits and self._running:
                return
            if fits:
                self._begin(row.history, shared, apart)
            else:
                self._beginnings.free()
            self._running.append(self._waiting.popleft())

    def _apart(self, shared: Sequence[Beginning]) -> int:
        """So many nodes stay apart: where reading them for each conversation takes longer than further calls."""
        if self._model.device.type != "cpu":
            return 0
        layer_bytes = self._token_bytes // self._model.config.get_text_config().num_hidden_layers
        worth = [(len(node.members) - 1) * node.tokens * layer_bytes > CALL_BYTES for node in shared]
        return max((number for number, each in enumerate(worth, start=1) if each), default=0)

    def _resting(self) -> int:
        """Memory of conversations at rest, and of what is held for several."""
        return self._beginnings.nbytes + sum(history.nbytes for history in self._kept.values())

    @torch.inference_mode()
    def _begin(self, history: History, shared: Sequence[Beginning], apart: int) -> None:
        """Start with what others have in common with it, which is computed when the first of them comes."""
        for number, node in enumerate(shared):
            if not node.held:
                alone = History(Blocks(1))
                alone.begin(shared[:number], 0)
                ids = node.ids
                for first in range(0, len(ids), _PASS):
                    self._feed([(alone, ids[first : first + _PASS])], ())
                self._beginnings.keep(node, alone.computed())
        if shared:
            history.begin(shared, apart)

    def _pass(self) -> list[_Row]:
        """Feed what the rows have not fed yet, up to the pass's limit; returns the rows that end with it."""
        parts: list[tuple[_Row, list[int]]] = []
        left = _PASS
        for row in sorted(self._running, key=lambda row: len(row.answer) == 0):  # those that answer go first
            if left > 0:
                parts.append((row, row.fresh[:left]))
                left -= len(parts[-1][1])
        ready, logits = self._forward(parts)
        self._sample(ready, logits)
        ended = [row for row in ready if row.answer[-1] == self._tokens.end_id or row.length >= row.longest]
        self._running = [row for row in self._running if row not in ended]
        return ended

    def _forward(self, parts: Sequence[tuple[_Row, list[int]]]) -> tuple[list[_Row], Tensor]:
        """Feed rows some tokens; those that have fed all, and their next tokens' logits, float32 [rows, vocabulary]."""
        ready: dict[int, _Row] = {}
        fed = 0
        for row, part in parts:
            fed += len(part)
            if len(row.history.ids) + len(part) == row.length:
                ready[fed - 1] = row
        return [*ready.values()], self._feed([(row.history, part) for row, part in parts], [*ready])

    @torch.inference_mode()
    def _feed(self, parts: Sequence[tuple[History, list[int]]], asked: Sequence[int]) -> Tensor:
        """Feed conversations some tokens; what comes after some of these, float32 [asked, vocabulary]."""
        ids: list[int] = []
        positions: list[int] = []
        for history, part in parts:
            ids += part
            positions += range(len(history.ids), len(history.ids) + len(part))
        device = self._model.device
        with attending([(history, len(part)) for history, part in parts], device):
            logits: Tensor = self._model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=torch.tensor([positions], device=device),
                attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),  # not read
                use_cache=False,
                logits_to_keep=torch.tensor(asked, dtype=torch.long, device=device),
            ).logits[0]
        for history, part in parts:
            history.ids += part
        return logits.float()

    def _sample(self, rows: list[_Row], logits: Tensor) -> None:
        """Lengthen each answer by one token, from its logits [rows, vocabulary]."""
        logprobs = logits.log_softmax(-1)
        for sampling in {row.sampling for row in rows}:
            indices = [index for index, row in enumerate(rows) if row.sampling == sampling]
            chosen = choose(logits[indices], sampling, [rows[index].draw for index in indices])
            likely = logprobs[indices].gather(-1, chosen[:, None]).squeeze(-1)
            for index, token, logprob in zip(indices, chosen.tolist(), likely.tolist(), strict=True):
                rows[index].answer.append(token)
                rows[index].logprobs.append(logprob)

    def _compare(self, alone: Sequence[tuple[list[int], Tensor]]) -> None:
        """Refuse a model that differs from itself alone, on a few tokens in two passes; learns what a token takes."""
        asked = Prompt((), (), (), 0, "")
        rows = [_Row(asked, Sampling(), ids, 0, random.Random(0), History(self._blocks)) for ids, _ in alone]
        self._forward([(row, row.ids[:_CHECK]) for row in rows])
        _, logits = self._forward([(row, row.fresh) for row in rows])
        expected = torch.stack([logprobs for _, logprobs in alone])
        difference = float((logits.log_softmax(-1) - expected).abs().mean(-1).max())
        if not difference <= _TOLERANCE.get(self._model.dtype, 0.0):
            raise ModelError(
                f"{type(self._model).__name__} gives other log-probabilities with kept keys and values than alone (by "
                f"{difference:.2g} nats), so the local engine cannot serve it; take another model or engine."
            )
        self._token_bytes = rows[0].history.nbytes // capacity_for(len(rows[0].ids))


def _nothing() -> None:
    """Undo nothing."""


@torch.inference_mode()
def _words_alone(model: Any) -> list[tuple[list[int], Tensor]]:
    """Tokens of two conversations, and the log-probabilities of the next one that the model itself gives."""
    size = min(model.get_output_embeddings().weight.shape[0], model.config.get_text_config().vocab_size)
    words = (torch.arange(2 * _CHECK) * 7919 % size).tolist()
    found = []
    for ids in (words, words[5:]):
        inputs = torch.tensor([ids], device=model.device)
        found.append((ids, model(input_ids=inputs, use_cache=False).logits[0, -1].float().log_softmax(-1)))
    return found


def check_layers(model: Any) -> None:
    """Refuse what attends in a way of its own, or keeps something else than keys and values.

    Raises:
        ModelError: If the engine cannot serve the model; weights are not looked at.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    strange = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if strange or not getattr(model, "_supports_attention_backend", False):
        why = f"it has layers of type {', '.join(sorted(strange))}" if strange else "its attention is its own"
        raise ModelError(f"the local engine cannot serve {name}: {why}; take another model or engine.")
