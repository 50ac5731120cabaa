"""Prefix cache: a tree of the token prefixes that conversations share, with keys and values computed once.

Many conversations share a system prompt, an example or a task's first observation. Each conversation holds a reference
to the node where its prompt ends, and each node to its parent. So keys and values are kept exactly as long as a
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
"""Number of tokens in a page. Prefixes are compared page by page, so a shared prefix ends at the end of a page."""

Page = tuple[int, ...]
"""Token ids of a page."""


class Beginning:
    """A node of the tree: tokens shared by some conversations, after the tokens of the parent node."""

    def __init__(self, before: Beginning | None, pages: Sequence[Page]) -> None:
        """Make a node; call `Beginnings.join` instead.

        Args:
            before: Parent node; None: this node is the root.
            pages: Tokens of the node.
        """
        self.before, self.pages = before, list(pages)
        self.after: WeakValueDictionary[Page, Beginning] = WeakValueDictionary()
        """Child nodes by their first page."""
        self.members: WeakSet[Any] = WeakSet()
        """Histories of the conversations whose prompts contain this node."""
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values by layer, each [key heads, tokens, features]; empty before they are computed."""

    @property
    def tokens(self) -> int:
        """Number of tokens of this node."""
        return len(self.pages) * _PAGE

    @property
    def ids(self) -> list[int]:
        """Token ids of this node."""
        return [*chain.from_iterable(self.pages)]

    @property
    def nbytes(self) -> int:
        """Bytes of this node's keys and values."""
        return sum(each.nbytes for each in chain(*self.held.values()))

    @property
    def path(self) -> list[Beginning]:
        """Nodes from the child of the root down to this node."""
        return [] if self.before is None else [*self.before.path, self]

    @property
    def shared(self) -> list[Beginning]:
        """Nodes of the path that belong to more than one conversation."""
        return [node for node in self.path if len(node.members) > 1]

    def keep(self, computed: Mapping[int, Sequence[Tensor]]) -> None:
        """Store a copy of this node's keys and values.

        Args:
            computed: Keys and values by layer, each [key heads, tokens, features], whose last tokens are this node's.
        """
        self.held = {
            layer: (key[:, -self.tokens :].clone(), value[:, -self.tokens :].clone())
            for layer, (key, value) in computed.items()
        }

    def split(self, pages: int) -> Beginning:
        """Move the first `pages` pages of this node into a new parent node, and return the new node."""
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
    """The tree of shared prefixes."""

    def __init__(self) -> None:
        """Start with an empty tree."""
        self._root = Beginning(None, ())
        self._held: WeakSet[Beginning] = WeakSet()  # nodes whose keys and values are computed

    def join(self, ids: Sequence[int], history: object) -> Beginning:
        """Add a prompt to the tree, and return its last node.

        The last token of a prompt is never in the tree, so at least one token is left to feed.

        Args:
            ids: Token ids of the prompt.
            history: History of the conversation, which must hold a reference to the returned node.
        """
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
        """Store the keys and values of a node; see `Beginning.keep` for the arguments."""
        node.keep(computed)
        self._held.add(node)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of all nodes."""
        return sum(node.nbytes for node in self._held)

    def free(self) -> None:
        """Drop the keys and values of all nodes; no running conversation may use them."""
        for node in self._held:
            node.held = {}
        self._held.clear()


def _in_common(one: Sequence[Page], other: Sequence[Page]) -> int:
    """Return the number of pages in the common prefix of two sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


@dataclass(eq=False)
class Row:
    """A prompt in the batch, with its answer so far."""

    prompt: Prompt
    sampling: Sampling
    ids: list[int]
    longest: int
    """Largest number of tokens of prompt and answer together."""
    draw: random.Random
    history: History
    said: Callable[[Sequence[int]], str] = lambda ids: ""
    """Function that returns the text of sampled tokens, for the search for stop texts."""
    capacity: int = 0
    """Capacity of the row's slot in tokens, once the row has joined the batch."""
    answer: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Version of the weights for each sampled token; empty if the engine's weights have no version."""

    @property
    def length(self) -> int:
        """Number of tokens of prompt and answer so far."""
        return len(self.ids) + len(self.answer)

    @property
    def fresh(self) -> list[int]:
        """Tokens of prompt and answer that were not fed to the model yet."""
        done = len(self.history.ids)
        return self.ids[done:] + self.answer if done < len(self.ids) else self.answer[done - len(self.ids) :]

    @property
    def missing(self) -> int:
        """Number of tokens that were not fed to the model yet."""
        return self.length - len(self.history.ids)

    def tail(self, tokens: int) -> list[int]:
        """Return the last `tokens` tokens of prompt and answer together."""
        return (self.ids[-tokens:] + self.answer)[-tokens:]

    def ended(self, end_ids: Collection[int]) -> bool:
        """Return whether the answer is complete: by an end token, by its length, or by a stop text."""
        return self.answer[-1] in end_ids or self.length >= self.longest or self._stopped()

    def _stopped(self) -> bool:
        """Return whether the newest part of the answer contains a stop text."""
        if not (stop := self.prompt.stop):
            return False
        newest = self.said(self.answer[-max(len(text.encode()) for text in stop) - 4 :])
        return any(text in newest for text in stop)
