"""Address and limits of an endpoint, with their defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from perturn.bounds import Bound, check_bounds
from perturn.config.overrides import apply_overrides
from perturn.config.parsing import parse
from perturn.errors import check_type

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Addresses that only this machine can reach."""
_COUNT = Bound(least=1, most=10**9)
_SECONDS = Bound(above=0, most=10**8)


@dataclass(frozen=True)
class ServeSettings:
    """Address and limits of an endpoint."""

    host: str = "127.0.0.1"
    """Address to listen at. If other machines can reach the address, you must choose an API key."""
    port: Annotated[int, Bound(least=0, most=65535)] = 0
    """Port to listen at; 0: any free port."""
    max_body_bytes: Annotated[int, _COUNT] = 8 * 2**20
    """Largest size of a request body, in bytes."""
    body_seconds: Annotated[float, _SECONDS] = 60.0
    """Time limit for receiving the body of a request, in seconds."""
    max_sessions: Annotated[int, _COUNT] = 4096
    """Largest number of open sessions. To open another session, the unnamed session that has been idle for longest is
    cut. If there is none, the request gets HTTP status 429."""
    max_calls: Annotated[int, _COUNT] = 1024
    """Largest number of answers sampled at the same time. Further requests get HTTP status 429."""
    max_turns: Annotated[int, _COUNT] = 1000
    """Largest number of turns of a session. A session that would exceed it is cut."""
    session_seconds: Annotated[float, _SECONDS] = 86_400.0
    """Time limit of a session, in seconds from its opening. A session that exceeds it is cut."""
    idle_seconds: Annotated[float, _SECONDS] = 900.0
    """Number of seconds without an answer, reward or state after which a session is cut."""
    request_seconds: Annotated[float, _SECONDS] = 600.0
    """Time limit for the answer to a request, in seconds."""
    reward_seconds: Annotated[float, _SECONDS] = 600.0
    """Time limit of the reward function, in seconds. If it takes longer, the episode is recorded as FAILED."""
    default_new_tokens: Annotated[int, _COUNT] = 1024
    """Token limit of an answer if the request sets none."""
    max_new_tokens: Annotated[int, _COUNT] = 8192
    """Largest token limit of an answer. A longer answer is cut, with the finish reason `length`."""
    temperature: Annotated[float, Bound(least=0)] | None = None
    """Sampling temperature of all answers, without unit; None: the temperature in each request. Set it and `top_p` to 1
    if a loss such as `ppo-clip` trains on the sessions."""
    top_p: Annotated[float, Bound(above=0, most=1)] | None = None
    """Probability mass of nucleus sampling of all answers, in (0, 1]; None: the value in each request."""
    max_choices: Annotated[int, _COUNT] = 16
    """Largest number of answers to a request (parameter `n`)."""
    heartbeat_seconds: Annotated[float, _SECONDS] = 10.0
    """Seconds between heartbeat comments in a stream whose answer is not ready."""

    def __post_init__(self) -> None:
        check_bounds(self)


def read_settings(words: Sequence[str], host: str, port: int) -> tuple[ServeSettings, list[str]]:
    """Return the settings of an endpoint, and the overrides of other sections than `serve`.

    Args:
        words: Overrides, such as `serve.max_new_tokens=2048`.
        host: Address to listen at, unless an override sets it.
        port: Port to listen at, unless an override sets it.

    Raises:
        ConfigError: If a key or value is wrong.
    """
    own = [word for word in words if word.partition("=")[0].partition(".")[0] == "serve"]
    given: dict[str, Any] = {}
    apply_overrides(given, own)
    section = given.get("serve", {})
    check_type("serve", section, Mapping, "a section, such as serve.max_new_tokens=2048")
    settings = parse(ServeSettings, {"host": host, "port": port, **section}, "serve")
    return settings, [word for word in words if word not in own]
