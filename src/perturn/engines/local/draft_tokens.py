"""Draft tokens for speculative decoding: guesses of the next tokens, and how many of them save time.

Agents repeat formats, and copy names from their observations. So the last few tokens are looked up in earlier text: in
the same conversation, and in the actions of all conversations. The guess is the token that followed them there. A wrong
guess costs time, but does not change the answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from operator import itemgetter

_ORDERS = (6, 3, 1)
"""Lengths of the contexts that are looked up, in tokens; the longest context that was seen before is used."""
CONTEXT = _ORDERS[0]
"""Largest number of last tokens on which a guess depends."""
_ACTIONS = 100_000
"""Largest number of contexts stored from the actions of all conversations; the oldest contexts are dropped."""
_CONVERSATIONS = 256
"""Largest number of conversations whose tokens are stored."""
_READ = 2048
"""Number of last tokens that are learned from a conversation that is new or was dropped."""
_LASTS = 0.95
"""Decay factor of the time measurement: with each new pass, the weight of all earlier passes is multiplied by it."""
_FREE = 64.0
"""Number of tokens that cost as much as the fixed part of a pass; used until enough passes are measured."""


class Followers:
    """The newest token seen after each context, and how often it equalled the token seen there before."""

    def __init__(self) -> None:
        """Start without any tokens."""
        self._seen: OrderedDict[tuple[int, ...], tuple[int, int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def learn(self, ids: Sequence[int], start: int) -> None:
        """Record each token from index `start` on as the follower of the tokens before it."""
        for index in range(start, len(ids)):
            token = ids[index]
            for order in _ORDERS:
                if order <= index:
                    key = tuple(ids[index - order : index])
                    last, right, times = self._seen.get(key, (token, 0, 0))
                    self._seen[key] = token, right + (last == token), times + 1

    def guess(self, ids: Sequence[int]) -> tuple[float, int] | None:
        """Return a guess of the next token.

        Returns:
            Estimated probability that the guess is right, and the token id. None if no context was seen before.
        """
        for order in _ORDERS:
            found = self._seen.get(tuple(ids[-order:]))
            if found is not None:
                token, right, times = found
                return right / (times + 0.5), token
        return None

    def forget_first(self, most: int) -> None:
        """Drop the oldest contexts, until at most `most` are left."""
        while len(self._seen) > most:
            self._seen.popitem(last=False)


class Drafts:
    """Guesses of several next tokens, from the conversation and from the actions of all conversations."""

    def __init__(self, end_ids: Collection[int]) -> None:
        """Start without any tokens.

        Args:
            end_ids: Tokens that end an answer; nothing is guessed after them.
        """
        self._end_ids = end_ids
        self._actions = Followers()
        self._own: OrderedDict[str, tuple[Followers, int]] = OrderedDict()  # and the tokens learned so far

    def read(self, conversation: str, ids: Sequence[int]) -> None:
        """Learn the tokens of a conversation that are new since the last call."""
        own, known = self._own.pop(conversation, (Followers(), max(0, len(ids) - _READ)))
        own.learn(ids, known)
        self._own[conversation] = own, len(ids)
        if len(self._own) > _CONVERSATIONS:
            self._own.popitem(last=False)

    def learn(self, ids: Sequence[int], answer: Sequence[int]) -> None:
        """Learn an answer for all conversations.

        Args:
            ids: Tokens before the answer.
            answer: Tokens of the answer.
        """
        before = ids[-CONTEXT:]
        self._actions.learn([*before, *answer], len(before))
        self._actions.forget_first(_ACTIONS)

    def forget(self, conversation: str) -> None:
        """Drop the stored tokens of a conversation; its actions stay stored for all conversations."""
        self._own.pop(conversation, None)

    def guess(self, conversation: str, tail: Sequence[int], most: int, least: float) -> list[int]:
        """Return guesses of the next tokens.

        Args:
            conversation: Identity of the conversation.
            tail: Last tokens of the conversation, at most `CONTEXT`.
            most: Largest number of tokens to guess.
            least: Smallest useful probability that all guessed tokens are right; guessing stops there.
        """
        known = [self._actions]
        if conversation in self._own:
            known.append(self._own[conversation][0])
        found, chance = [*tail], 1.0
        start = len(found)
        while len(found) - start < most and (len(found) == start or found[-1] not in self._end_ids):
            sure, token = max((each.guess(found) or (0.0, 0) for each in known), key=itemgetter(0))
            chance *= sure
            if chance <= least:
                break
            found.append(token)
        return found[start:]


class Pace:
    """Linear fit of a pass's time in seconds against its number of tokens, over the newest passes."""

    def __init__(self) -> None:
        """Start without measurements."""
        self._passes = self._tokens = self._seconds = self._squares = self._products = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Add a measured pass with its number of tokens and its time in seconds."""
        self._passes = _LASTS * self._passes + 1
        self._tokens = _LASTS * self._tokens + tokens
        self._seconds = _LASTS * self._seconds + seconds
        self._squares = _LASTS * self._squares + tokens**2
        self._products = _LASTS * self._products + tokens * seconds

    @property
    def free(self) -> float:
        """Number of tokens whose time equals the fixed part of a pass."""
        spread = self._passes * self._squares - self._tokens**2
        rise = self._passes * self._products - self._tokens * self._seconds
        if spread <= 0 or rise <= 0:
            return _FREE
        return max(0.0, (self._seconds * spread / rise - self._tokens) / self._passes)
