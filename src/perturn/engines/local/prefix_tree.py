"""Beginnings that conversations have in common, computed once and held once: a tree over tokens.

A system text, a worked example and a task's first observation are shared by many conversations. Each conversation holds
the node where its prompt ends, and each node holds its parent. So keys and values are kept exactly as long as a
conversation needs them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

from torch import Tensor

from perturn.types import Prompt, Sampling

if TYPE_CHECKING:
    from perturn.engines.local.kv_cache import History

_PAGE = 32
"""Prefixes are compared in pieces of this number of tokens; a prefix cannot end within a piece."""

Page = tuple[int, ...]
"""So many token ids."""


class Beginning:
    """A node: tokens that some conversations have in common, after the tokens of its parent node."""

    def __init__(self, before: Beginning | None, pages: Sequence[Page]) -> None:
        """Make a node; only `Beginnings` does so."""
        self.before, self.pages = before, list(pages)
        self.after: WeakValueDictionary[Page, Beginning] = WeakValueDictionary()
        """Nodes that go on from here, by their first page."""
        self.members: WeakSet[Any] = WeakSet()
        """Histories of the conversations that begin so."""
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values by layer, each [key heads, tokens, features]; empty before they are computed."""

    @property
    def tokens(self) -> int:
        """Their number."""
        return len(self.pages) * _PAGE

    @property
    def ids(self) -> list[int]:
        """Its tokens."""
        return [*chain.from_iterable(self.pages)]

    @property
    def nbytes(self) -> int:
        """Memory of its keys and values."""
        return sum(each.nbytes for each in chain(*self.held.values()))

    @property
    def path(self) -> list[Beginning]:
        """The nodes from the first token up to this one."""
        return [] if self.before is None else [*self.before.path, self]

    @property
    def shared(self) -> list[Beginning]:
        """Nodes on the path where more than one conversation has been."""
        return [node for node in self.path if len(node.members) > 1]

    def keep(self, computed: Mapping[int, Sequence[Tensor]]) -> None:
        """Take over its keys and values from the last of those [key heads, tokens, features]."""
        self.held = {
            layer: (key[:, -self.tokens :].clone(), value[:, -self.tokens :].clone())
            for layer, (key, value) in computed.items()
        }

    def split(self, pages: int) -> Beginning:
        """Give the first of its pages to a new node before it, which it returns."""
        assert self.before is not None
        first = Beginning(self.before, self.pages[:pages])
        first.members |= self.members
        first.keep({layer: [each[:, : pages * _PAGE] for each in pair] for layer, pair in self.held.items()})
        self.before.after[self.pages[0]] = first
        self.before, self.pages = first, self.pages[pages:]
        first.after[self.pages[0]] = self
        self.keep(self.held)
        return first


class Beginnings:
    """The tree."""

    def __init__(self) -> None:
        """Start empty."""
        self._root = Beginning(None, ())
        self._held: WeakSet[Beginning] = WeakSet()  # those whose keys and values are there

    def join(self, ids: Sequence[int], history: object) -> Beginning:
        """Return the node where a prompt ends, for its conversation to hold; at least one token is not shared."""
        whole = (len(ids) - 1) // _PAGE
        pages = [tuple(ids[_PAGE * each : _PAGE * (each + 1)]) for each in range(whole)]
        node = self._root
        while pages:
            following = node.after.get(pages[0])
            if following is None:
                following = node.after[pages[0]] = Beginning(node, pages)
            same = _in_common(following.pages, pages)
            node = following if same == len(following.pages) else following.split(same)
            if node.held:
                self._held.add(node)
            pages = pages[same:]
        for each in node.path:
            each.members.add(history)
        return node

    def keep(self, node: Beginning, computed: Mapping[int, Sequence[Tensor]]) -> None:
        """Give a node its keys and values, the last of those [key heads, tokens, features]."""
        node.keep(computed)
        self._held.add(node)

    @property
    def nbytes(self) -> int:
        """Memory of all keys and values."""
        return sum(node.nbytes for node in self._held)

    def free(self) -> None:
        """Drop all keys and values, which no conversation may be reading."""
        for node in self._held:
            node.held = {}
        self._held.clear()


def _in_common(one: Sequence[Page], other: Sequence[Page]) -> int:
    """Return pages that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


@dataclass(eq=False)
class Row:
    """One prompt, and its answer as it grows."""

    prompt: Prompt
    sampling: Sampling
    ids: list[int]
    longest: int
    """Tokens of prompt and answer, at most."""
    draw: random.Random
    history: History
    said: Callable[[Sequence[int]], str] = lambda ids: ""
    """Text of sampled tokens, in which the prompt's stop texts are looked for."""
    capacity: int = 0
    """Tokens that its slot will hold, once it joined the batch."""
    answer: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Versions of the weights that its tokens were sampled with; empty if the engine has none."""

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.ids) + len(self.answer)

    @property
    def fresh(self) -> list[int]:
        """Tokens that have not been through the model."""
        done = len(self.history.ids)
        return self.ids[done:] + self.answer if done < len(self.ids) else self.answer[done - len(self.ids) :]

    @property
    def missing(self) -> int:
        """Number of them."""
        return self.length - len(self.history.ids)

    def tail(self, tokens: int) -> list[int]:
        """Return the last tokens of prompt and answer."""
        return (self.ids[-tokens:] + self.answer)[-tokens:]

    def ended(self, end_ids: Collection[int]) -> bool:
        """Return whether the answer is whole."""
        return self.answer[-1] in end_ids or self.length >= self.longest or self._stopped()

    def _stopped(self) -> bool:
        """Return whether the answer ends with one of its stop texts."""
        if not (stop := self.prompt.stop):
            return False
        newest = self.said(self.answer[-max(len(text.encode()) for text in stop) - 4 :])
        return any(text in newest for text in stop)
