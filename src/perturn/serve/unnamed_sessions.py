"""Find the session of a request that names no session, by the conversation that the request continues."""

from __future__ import annotations

from collections.abc import Iterable

from perturn.serve.agent_session import Session

_Key = tuple[bytes, tuple[str, str]]


class UnnamedSessions:
    """Open sessions of requests that name no session, by their conversations."""

    def __init__(self) -> None:
        """Start without sessions."""
        self._of_key: dict[_Key, dict[str, Session]] = {}

    def add(self, session: Session, keys: Iterable[_Key]) -> None:
        """Add conversations to a session.

        Args:
            session: The session.
            keys: Keys of the conversations up to an answer; see `Session.end_keys`.
        """
        for key in keys:
            self._of_key.setdefault(key, {})[session.id] = session

    def remove(self, session: Session) -> None:
        """Remove a session with all of its conversations."""
        for key in session.all_end_keys:
            found = self._of_key.get(key, {})
            found.pop(session.id, None)
            if not found:
                self._of_key.pop(key, None)

    def find(self, key: _Key | None) -> Session | None:
        """Return the session that has a conversation; None if there is none.

        Several agents may have had the same conversation so far. So sessions that nothing has continued there yet are
        preferred, then sessions without an answer in flight, and then the newest.

        Args:
            key: Key of the conversation up to its last answer; see `Position.end_key`.
        """
        if key is None or key not in self._of_key:
            return None
        newest_first = [*reversed(self._of_key[key].values())]
        return min(newest_first, key=lambda each: (each.is_continued(key), each.in_flight > 0))


def longest_idle(sessions: Iterable[Session]) -> Session | None:
    """Return the unnamed session that has been idle for longest; None if there is none, or all are in use."""
    idle = (each for each in sessions if each.is_automatic and not each.in_flight)
    return min(idle, key=lambda each: each.touched, default=None)
