"""The default engine: a transformers model in this process, with each conversation's keys and values kept.

A turn costs its new tokens, not its history: the keys and values of a conversation stay in memory between its
turns, up to a budget; what was evicted is computed again. Laying them side by side in a batch costs a copy that
grows with the length of the history, far less than computing it.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from turnwise.errors import EngineFailure, ModelError
from turnwise.types import Action, Prompt, Sampling

KeysValues = list[tuple[Tensor, Tensor]]
"""Keys and values of one conversation, a pair a layer, each [heads, tokens, features]."""


@dataclass(frozen=True)
class LocalSettings:
    """A transformers model in this process, which keeps each conversation's keys and values between its turns."""

    serves_checkpoints: ClassVar[bool] = True
    """Whether it can serve policies that we trained."""

    cache_gigabytes: float = 2.0
    """Memory for keys and values kept between turns; >= 0."""

    def __post_init__(self) -> None:
        if self.cache_gigabytes < 0:
            raise ValueError(f"cache_gigabytes must be >= 0, got {self.cache_gigabytes}.")


class Tokens(Protocol):
    """What the engine asks about tokens; `policy.tokens.Renderer` answers."""

    end_id: int

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Tokens to continue."""
        ...

    def action(self, ids: Sequence[int], logprobs: Sequence[float]) -> Action:
        """Sampled tokens as an action."""
        ...


@dataclass(eq=False)
class _Row:
    """One prompt of a batch, and its answer as it grows."""

    prompt: Prompt
    ids: list[int]
    draw: random.Random
    kept: KeysValues = field(default_factory=list)
    length: int = 0
    """Tokens of `ids + answer` whose keys and values are in `kept`."""
    answer: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class LocalEngine:
    """Batch generation with a transformers model whose layers attend to all earlier tokens."""

    def __init__(
        self,
        model: Any,
        tokens: Tokens,
        *,
        name: str = "policy",
        context: int | None = None,
        cache_gigabytes: float = 2.0,
    ) -> None:
        """Serve a model that is already on its device and in its dtype.

        Args:
            model: A causal language model.
            tokens: Conversation -> tokens.
            name: Identity of the policy, stamped on the trajectories.
            context: Longest sequence in tokens; a prompt that leaves no room for an answer is a failure.
            cache_gigabytes: Memory for keys and values kept between turns.

        Raises:
            ModelError: If a layer keeps something else than the keys and values of all tokens.
        """
        self.name = name
        self._model = model.eval()
        self._tokens = tokens
        self._limit = context or 2**62
        self._budget = int(cache_gigabytes * 1e9)
        self._kept: OrderedDict[str, tuple[list[int], KeysValues]] = OrderedDict()
        strange = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers} - {
            "DynamicLayer"
        }
        if strange:
            raise ModelError(
                f"the local engine cannot serve {type(model).__name__}: its layers keep {', '.join(sorted(strange))}, "
                "not the keys and values of all tokens; take a model without sliding or linear attention."
            )

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Action | EngineFailure]:
        """One action a prompt.

        Each answer is drawn with a generator of its prompt's own seed, so it depends on the other prompts of the
        batch through rounding alone.
        """
        rows = [self._row(prompt) for prompt in prompts]
        going: list[_Row] = []
        for group in _groups([row for row in rows if len(row.ids) < self._limit]):
            batch = _Batch(group, room=max(len(row.ids) - row.length for row in group))
            logits = batch.forward(self._model, [row.ids[row.length :] for row in group])
            for row in group:
                batch.take(row)
            going += self._grow(group, logits, sampling)
        while going:
            going = self._decode(going, sampling)
        for row in rows:
            self._keep(row)
        return [self._answer(row) for row in rows]

    def forget(self, conversation: str) -> None:
        """Free the keys and values of a conversation."""
        self._kept.pop(conversation, None)

    def close(self) -> None:
        """Free all keys and values."""
        self._kept.clear()

    def _row(self, prompt: Prompt) -> _Row:
        """The prompt as tokens, with what is kept of its beginning."""
        row = _Row(prompt, self._tokens.prompt_ids(prompt), random.Random(prompt.seed))
        ids, kept = self._kept.pop(prompt.conversation, ([], []))
        if 0 < len(ids) < len(row.ids) and row.ids[: len(ids)] == ids:
            row.kept, row.length = kept, len(ids)
        return row

    def _decode(self, going: list[_Row], sampling: Sampling) -> list[_Row]:
        """Grow answers together, one token a pass, until half of them have ended; the rest is returned."""
        batch = _Batch(going, room=sampling.max_new_tokens)
        while 2 * len(going) > len(batch.rows):
            logits = batch.forward(self._model, [row.answer[-1:] for row in batch.rows])
            places = [batch.rows.index(row) for row in going]
            still = self._grow(going, logits[places], sampling)
            for row in going:
                if row not in still:
                    batch.take(row)
            going = still
        for row in going:
            batch.take(row)
        return going

    def _grow(self, rows: list[_Row], logits: Tensor, sampling: Sampling) -> list[_Row]:
        """Sample one token for each row; returns the rows whose answers go on.

        Args:
            rows: Rows to extend.
            logits: Of the next token [rows, vocabulary].
            sampling: How to choose.
        """
        chosen = choose(logits.float(), sampling, [row.draw for row in rows])
        logprobs = logits.float().log_softmax(-1).gather(-1, chosen[:, None]).squeeze(-1)
        going = []
        for row, token, logprob in zip(rows, chosen.tolist(), logprobs.tolist(), strict=True):
            row.answer.append(token)
            row.logprobs.append(logprob)
            full = len(row.answer) == sampling.max_new_tokens or len(row.ids) + len(row.answer) >= self._limit
            if token != self._tokens.end_id and not full:
                going.append(row)
        return going

    def _keep(self, row: _Row) -> None:
        """Keep what was computed for the conversation's next turn, within the budget, newest first."""
        self._kept[row.prompt.conversation] = (row.ids + row.answer)[: row.length], row.kept
        held = sum(_size(kept) for _, kept in self._kept.values())
        while held > self._budget and self._kept:
            _, (_, kept) = self._kept.popitem(last=False)
            held -= _size(kept)

    def _answer(self, row: _Row) -> Action | EngineFailure:
        if row.answer:
            return self._tokens.action(row.answer, row.logprobs)
        return EngineFailure(
            f"the conversation has {len(row.ids)} tokens, which leaves no room for an answer in the model's "
            f"{self._limit}; lower the turn limit or take a model with a longer context."
        )


def choose(logits: Tensor, sampling: Sampling, draws: Sequence[random.Random]) -> Tensor:
    """Choose one token a row, by inverting the cumulative distribution at one uniform number.

    Args:
        logits: Of the next token [rows, vocabulary].
        sampling: Temperature and nucleus.
        draws: Each row's own source of randomness.

    Returns:
        Token ids [rows].
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    probabilities = (logits.double() / sampling.temperature).softmax(-1)
    order = None
    if sampling.top_p < 1:  # the nucleus: the fewest likeliest tokens whose probability reaches top_p
        probabilities, order = probabilities.sort(-1, descending=True)
        before = probabilities.cumsum(-1) - probabilities
        probabilities = torch.where(before < sampling.top_p, probabilities, 0.0)
    cumulative = probabilities.cumsum(-1)
    uniform = torch.tensor([draw.random() for draw in draws], dtype=torch.double, device=logits.device)
    place = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    place = place.clamp_max(logits.shape[-1] - 1)
    return (place if order is None else order.gather(-1, place)).squeeze(-1)


class _Layer(DynamicLayer):
    """One layer of a batch's cache with room to grow, so that new tokens are written in place."""

    def __init__(self, kept: list[tuple[Tensor, Tensor] | None], old: int, room: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._size = kept, old + room
        self._used = old

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = self._buffer(key_states, 0), self._buffer(value_states, 1)
        self.is_initialized = True

    def _buffer(self, new: Tensor, which: int) -> Tensor:
        """Zeros [rows, heads, size, features] with what is kept of each row ending at the same place."""
        rows, heads, _, features = new.shape
        buffer = new.new_zeros(rows, heads, self._size, features)
        for index, kept in enumerate(self._kept):
            if kept is not None:
                buffer[index, :, self._used - kept[which].shape[1] : self._used] = kept[which]
        return buffer

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        end = self._used + key_states.shape[-2]
        self.keys[:, :, self._used : end] = key_states
        self.values[:, :, self._used : end] = value_states
        self._used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self._used


class _Batch:
    """Rows side by side, with a cache that holds their history and has room for more."""

    def __init__(self, rows: list[_Row], room: int) -> None:
        self.rows = list(rows)
        self._old = max(row.length for row in rows)
        self._room = room
        layers = max(len(row.kept) for row in rows)
        self._layers = [
            _Layer([row.kept[index] if row.kept else None for row in rows], self._old, room)
            for index in range(layers)
        ]
        self._mask = torch.zeros(len(rows), self._old + room, dtype=torch.bool)
        for index, row in enumerate(rows):
            self._mask[index, self._old - row.length : self._old] = True
        self._used = self._old

    def forward(self, model: Any, fresh: list[list[int]]) -> Tensor:
        """Feed new tokens, padded on the left so that all rows end together.

        Args:
            model: A causal language model.
            fresh: New tokens of each row, at least one.

        Returns:
            Logits of the token after the last one [rows, vocabulary].
        """
        new = max(map(len, fresh))
        ids = torch.zeros(len(fresh), new, dtype=torch.long)
        for index, tokens in enumerate(fresh):
            ids[index, new - len(tokens) :] = torch.tensor(tokens)
            self._mask[index, self._used + new - len(tokens) : self._used + new] = True
        self._used += new
        mask = self._mask[:, : self._used]
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -new:]
        if not self._layers:
            layers = model.config.get_text_config().num_hidden_layers
            self._layers = [_Layer([None] * len(self.rows), self._old, self._room) for _ in range(layers)]
        output = model(
            input_ids=ids.to(model.device),
            position_ids=positions.to(model.device),
            attention_mask=mask.to(model.device),
            past_key_values=Cache(layers=list(self._layers)),
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def take(self, row: _Row) -> None:
        """Give a row its own copy of its keys and values."""
        index = self.rows.index(row)
        places = self._mask[index, : self._used].nonzero().squeeze(-1)
        row.kept = [
            (layer.keys[index][:, places], layer.values[index][:, places])
            for layer in self._layers
            if layer.keys is not None and layer.values is not None
        ]
        row.length = len(places)


def _groups(rows: list[_Row]) -> list[list[_Row]]:
    """Rows whose new tokens are of similar number, so that little of a batch is padding."""
    groups: list[list[_Row]] = []
    for row in sorted(rows, key=lambda row: len(row.ids) - row.length):
        fresh = len(row.ids) - row.length
        if groups and fresh <= max(32, 1.5 * (len(groups[-1][0].ids) - groups[-1][0].length)):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _size(kept: KeysValues) -> int:
    return sum(keys.nbytes + values.nbytes for keys, values in kept)
