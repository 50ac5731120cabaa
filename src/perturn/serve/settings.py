"""Limits and the address of an endpoint, each with its default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from perturn.bounds import Bound, check_bounds

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Addresses that this machine alone can reach."""
_COUNT = Bound(least=1, most=10**9)
_SECONDS = Bound(above=0, most=10**8)


@dataclass(frozen=True)
class ServeSettings:
    """Address and limits of an endpoint."""

    host: str = "127.0.0.1"
    """Address to listen at. Any other than this machine's own needs a key that you chose."""
    port: Annotated[int, Bound(least=0, most=65535)] = 0
    """Port to listen at; 0: any that is free."""
    max_body_bytes: Annotated[int, _COUNT] = 8 * 2**20
    """Bytes of a request."""
    body_seconds: Annotated[float, _SECONDS] = 60.0
    """Seconds in which the body of a request must arrive."""
    max_sessions: Annotated[int, _COUNT] = 4096
    """Sessions that are open at the same time; a request that would open another one is answered with "try again
    later"."""
    max_calls: Annotated[int, _COUNT] = 1024
    """Requests that are answered at the same time; further ones are answered with "try again later"."""
    max_turns: Annotated[int, _COUNT] = 1000
    """Turns of a session. A session that reaches the limit is cut."""
    session_seconds: Annotated[float, _SECONDS] = 86_400.0
    """Seconds from the first request of a session to its end. A session that takes longer is cut."""
    idle_seconds: Annotated[float, _SECONDS] = 900.0
    """Seconds without a request after which a session is cut."""
    request_seconds: Annotated[float, _SECONDS] = 600.0
    """Seconds for the answer to one request."""
    reward_seconds: Annotated[float, _SECONDS] = 600.0
    """Seconds in which the reward function must judge an episode; a later episode is recorded as failed."""
    default_new_tokens: Annotated[int, _COUNT] = 1024
    """Token limit of an answer whose request names none."""
    max_new_tokens: Annotated[int, _COUNT] = 8192
    """Token limit of every answer. A longer one ends there, with `length` as its finish reason."""
    max_choices: Annotated[int, _COUNT] = 16
    """Answers to one request (`n`)."""
    heartbeat_seconds: Annotated[float, _SECONDS] = 10.0
    """Seconds between the signs of life that a streaming client gets while it waits."""

    def __post_init__(self) -> None:
        check_bounds(self)
