"""Requests and answers in a form that does not depend on the provider's protocol."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perturn.errors import BudgetError, ContextFull, EngineFailure, PromptRejected
from perturn.types import Action

_NAME = re.compile(r"[\w.:=@+,-]{1,200}", re.ASCII)


class Refusal(Exception):
    """Rejection of a request, which each protocol writes in its own form."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        """Store the reason.

        Args:
            status: HTTP status.
            message: Reason and remedy.
            code: Machine-readable code, such as `context_length_exceeded`.
            param: Name of the wrong parameter.
        """
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


def refused(error: Exception) -> Refusal:
    """Return an engine's error as a rejection of the request, with an HTTP status."""
    if isinstance(error, ContextFull):
        return Refusal(400, str(error), "context_length_exceeded", "messages")
    if isinstance(error, PromptRejected):
        return Refusal(400, str(error), "prompt_rejected")
    if isinstance(error, BudgetError):
        return Refusal(403, str(error), "limit_reached")
    if isinstance(error, EngineFailure):
        return Refusal(500, str(error), "engine_failure")
    return Refusal(503, str(error), "engine_unavailable")


def check_name(name: str) -> None:
    """Check the name of a session.

    Raises:
        Refusal: If the name has a character that is not allowed, or is too long.
    """
    if not _NAME.fullmatch(name):
        said = "session: expected up to 200 letters a-z, digits or . _ : = @ + , -"
        raise Refusal(400, said, "invalid_session", "session")


@dataclass(frozen=True)
class Ask:
    """A request for one or more answers."""

    messages: Sequence[Mapping[str, Any]]
    """The whole conversation, in the format of chat completions."""
    model: str
    """Model name in the request. The name has no effect, since the endpoint serves one policy."""
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1
    response_format: Mapping[str, Any] | None = None
    logprobs: bool = False
    reads_calls: bool = True
    """Whether tool calls in an answer are parsed; otherwise they stay text."""
    stream: bool = False
    param: str = "messages"
    """Name of the request's parameter with the messages, for error messages."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further values that the protocol needs to write its answer."""


@dataclass(frozen=True)
class Call:
    """A tool call in the form that clients get."""

    id: str
    name: str
    arguments: str
    """Arguments as JSON text."""


@dataclass(frozen=True)
class Answer:
    """One answer in the form that clients get."""

    action: Action
    """Action as the engine returned it, which is recorded."""
    text: str
    """Text of the answer, without the stop text."""
    calls: tuple[Call, ...]
    """Tool calls of the answer."""
    stopped_by: str | None
    """Stop text that ended the answer; None if the policy ended its turn or the token limit was reached."""

    @property
    def is_cut(self) -> bool:
        """Whether the token limit ended the answer."""
        return not self.action.ended and self.stopped_by is None


@dataclass(frozen=True)
class Reply:
    """All answers to one request."""

    id: str
    """Id of the response. A posted reward names its turn by this id."""
    model: str
    """Model name in the request."""
    created: int
    """Time of the answer, in Unix seconds."""
    answers: tuple[Answer, ...]
    prompt_tokens: int
    """Number of tokens of the prompt; 0 if the engine does not report it."""
    answer_tokens: int
    """Number of tokens of all answers; 0 if the engine does not report it."""
    token_texts: tuple[tuple[str, ...], ...] = ()
    """Text of each sampled token `[answers][tokens]`; empty if the request does not ask for log-probabilities."""
