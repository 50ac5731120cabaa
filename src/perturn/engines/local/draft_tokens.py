"""Guesses of the tokens that a policy will write next, and how many of them are worth a pass through the model.

Agents repeat formats, and copy names from their observations. So the tokens after the last few tokens are guessed from
earlier places with the same tokens: in the same conversation, and in the actions of all others. A guess that is wrong
costs time and changes nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from operator import itemgetter

_ORDERS = (6, 3, 1)
"""Number of last tokens that are looked up; the longest known context comes first."""
CONTEXT = _ORDERS[0]
"""Most last tokens that a guess depends on."""
_ACTIONS = 100_000
"""Contexts that are kept of the actions of all conversations; those that were first seen longest ago go."""
_CONVERSATIONS = 256
"""Number of conversations whose tokens are kept."""
_READ = 2048
"""Last tokens that are learned of a conversation that is new, or was dropped for others."""
_LASTS = 0.95
"""Weight of a pass when the next one is timed."""
_FREE = 64.0
"""Number of tokens that are assumed to cost as much as the fixed part of a pass, until passes were measured."""


class Followers:
    """The last follower of some tokens, and how often a follower was the one before again."""

    def __init__(self) -> None:
        """Start without any tokens."""
        self._seen: OrderedDict[tuple[int, ...], tuple[int, int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def learn(self, ids: Sequence[int], start: int) -> None:
        """See which tokens from `start` on follow those before them."""
        for index in range(start, len(ids)):
            token = ids[index]
            for order in _ORDERS:
                if order <= index:
                    key = tuple(ids[index - order : index])
                    last, right, times = self._seen.get(key, (token, 0, 0))
                    self._seen[key] = token, right + (last == token), times + 1

    def guess(self, ids: Sequence[int]) -> tuple[float, int] | None:
        """Return how sure the next token is, from 0 to 1, and the token; None if these last ones were never seen."""
        for order in _ORDERS:
            found = self._seen.get(tuple(ids[-order:]))
            if found is not None:
                token, right, times = found
                return right / (times + 0.5), token
        return None

    def forget_first(self, most: int) -> None:
        """Most contexts that are kept."""
        while len(self._seen) > most:
            self._seen.popitem(last=False)


class Drafts:
    """Guesses of whole answers."""

    def __init__(self, end_ids: Collection[int]) -> None:
        """Start without any tokens; each of `end_ids` ends an answer."""
        self._end_ids = end_ids
        self._actions = Followers()
        self._own: OrderedDict[str, tuple[Followers, int]] = OrderedDict()  # and how many tokens were learned

    def read(self, conversation: str, ids: Sequence[int]) -> None:
        """Learn the tokens of a conversation that are new since the last call."""
        own, known = self._own.pop(conversation, (Followers(), max(0, len(ids) - _READ)))
        own.learn(ids, known)
        self._own[conversation] = own, len(ids)
        if len(self._own) > _CONVERSATIONS:
            self._own.popitem(last=False)

    def learn(self, ids: Sequence[int], answer: Sequence[int]) -> None:
        """Learn an answer and the tokens before it, for all conversations."""
        before = ids[-CONTEXT:]
        self._actions.learn([*before, *answer], len(before))
        self._actions.forget_first(_ACTIONS)

    def forget(self, conversation: str) -> None:
        """Drop the tokens that come from one conversation alone."""
        self._own.pop(conversation, None)

    def guess(self, conversation: str, tail: Sequence[int], most: int, least: float) -> list[int]:
        """Return tokens that are likely to come next.

        Args:
            conversation: Where.
            tail: Its last tokens, at most `CONTEXT`.
            most: Tokens.
            least: Chance that the last of them is right and with it all before.
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
    """Seconds of a pass against its tokens: a straight line through the newest passes."""

    def __init__(self) -> None:
        """Start without measurements."""
        self._passes = self._tokens = self._seconds = self._squares = self._products = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Add a pass that was timed."""
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
