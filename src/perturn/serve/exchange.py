"""A request and its answer, whichever protocol it came in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perturn.types import Action


class Refusal(Exception):
    """A request that is not answered; each protocol has its own form for it."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        """Say why.

        Args:
            status: Of HTTP.
            message: The fault, and the remedy.
            code: A word for programs, such as `context_length_exceeded`.
            param: The parameter that is at fault.
        """
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


@dataclass(frozen=True)
class Ask:
    """A request."""

    messages: Sequence[Mapping[str, Any]]
    """The whole conversation, in the form of chat completions."""
    model: str
    """The name that the client gave; the endpoint has one policy."""
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
    """Whether calls in an answer are calls, rather than text."""
    stream: bool = False
    param: str = "messages"
    """Name of the parameter that holds the messages."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Values that only the protocol's own answer needs."""


@dataclass(frozen=True)
class Call:
    """A tool call as a client gets it."""

    id: str
    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True)
class Answer:
    """One answer as a client gets it."""

    action: Action
    text: str
    """Without the text that stopped it."""
    calls: tuple[Call, ...]
    stopped_by: str | None
    """The text that stopped it; None: the policy ended its turn, or the token limit did."""

    @property
    def is_cut(self) -> bool:
        """Whether the token limit ended it."""
        return not self.action.ended and self.stopped_by is None


@dataclass(frozen=True)
class Reply:
    """The answers to one request."""

    id: str
    """Identity, with which a reward names the turn."""
    model: str
    created: int
    answers: tuple[Answer, ...]
    prompt_tokens: int
    """Tokens of the prompt; 0 where the engine does not say."""
    answer_tokens: int
    """Tokens of all answers; 0 where the engine does not say."""
    token_texts: tuple[tuple[str, ...], ...] = ()
    """Text of each sampled token of each answer, where log-probabilities were asked for."""
