"""Rules of an episode: the protocol with its decoding settings, worked example and turn limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from perturn.bounds import Bound, check_bounds
from perturn.io.plain_data import fault

if TYPE_CHECKING:
    from perturn.types import Task

Message = dict[str, Any]
"""A chat message in the form of chat templates: `role`, `content`, and `tool_calls` or `name` where used."""

_COUNT = Bound(least=1, most=10**9)


@dataclass(frozen=True)
class TurnControl:
    """Turn limit that the policy is told about, with extensions for episodes that need more turns.

    Source: "More with Less: An Empirical Study of Turn-Control Strategies for Efficient Coding Agents", 2025,
    arXiv:2510.16786, abstract: a fixed limit with reminders, and extensions on demand.
    Differs: the condition for an extension, the number of extensions and the text for the agent are Perturn's choices.
    """

    limit: Annotated[int, _COUNT] | None = None
    """Turn limit before any extension, for all kinds of tasks; None: the limits of the protocol."""
    reminder: bool = True
    """Whether each observation ends with the number of turns left, and mentions an extension."""
    extend: Annotated[int, _COUNT] | None = None
    """Number of turns that an extension adds when an episode reaches its limit; None: no extensions."""
    times: Annotated[int, _COUNT] = 1
    """Maximum number of extensions of an episode."""
    progress: Annotated[int, _COUNT] | None = 5
    """Number of last turns that are checked for progress; an extension needs progress in one of them. A turn makes
    progress by a reward above 0, or by a valid action with an observation that is new in this episode. None: every
    unfinished episode is extended."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.extend is None and (self.times, self.progress) != (TurnControl.times, TurnControl.progress):
            raise ValueError("extend must be set where times or progress is, which nothing else reads.")
        if self.extend is None and self.limit is None and not self.reminder:
            raise ValueError(
                "limit must be set where there is no reminder and no extension; else nothing changes."
            )
        if self.extend is not None and self.progress is None and not self.reminder:
            raise ValueError(
                "progress must be set if reminder is false: an extension of every episode without a reminder equals a "
                "higher limit."
            )


def check_example(example: Sequence[Mapping[str, Any]]) -> None:
    """Check the messages of a worked example, which must begin with the user and end with the assistant.

    Raises:
        ValueError: If the example is malformed; the message names the allowed values.
    """
    for index, message in enumerate(example):
        if message.get("role") not in ("user", "assistant", "tool") or not isinstance(
            message.get("content"), str
        ):
            raise ValueError(
                f"example[{index}] must be a message of user, assistant or tool with a text as content, "
                f"got {message!r:.80}."
            )
        if found := fault(message, f"example[{index}]"):
            raise ValueError(f"{found}.")
    if example and (example[0]["role"], example[-1]["role"]) != ("user", "assistant"):
        raise ValueError("example must begin with a user message and end with an assistant message.")


@dataclass(frozen=True)
class Sampling:
    """Decoding settings for actions."""

    temperature: Annotated[float, Bound(least=0)] = 0.0
    """Sampling temperature, without unit; >= 0. 0: greedy decoding."""
    top_p: Annotated[float, Bound(above=0, most=1)] = 1.0
    """Probability mass of nucleus sampling, in (0, 1]. 1: all tokens."""
    max_new_tokens: Annotated[int, Bound(least=1)] = 64
    """Maximum number of tokens of one action, including the end-of-turn token."""

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def sharpens(self) -> bool:
        """Whether actions are sampled from another distribution than the policy's own, at temperature 1."""
        return not self.temperature == self.top_p == 1


@dataclass(frozen=True)
class SimulatedUser:
    """Model that plays the user when an environment asks for the user's turn."""

    model: str
    """Name of the model."""
    prompt: str | None = None
    """System text of the user's model, in which `{instructions}` is replaced by the environment's instructions. None:
    the instructions alone."""

    def system(self, instructions: str) -> str:
        """Return the system text of the user's model.

        Args:
            instructions: Instructions of the environment for the user.
        """
        return instructions if self.prompt is None else self.prompt.replace("{instructions}", instructions)


@dataclass(frozen=True)
class EpisodeProtocol:
    """Rules of an episode. Scores are comparable only under equal rules."""

    name: str
    format: str = "react"
    """Format of an action: `react`, `action`, `plain` or `tools` (see `formats.py`)."""
    system: str = ""
    """System text before the instructions of the format."""
    max_turns: int = 30
    """Turn limit of a task whose kind is not in `max_turns_by_kind`."""
    max_turns_by_kind: Mapping[str, int] = field(default_factory=dict)
    example: tuple[Message, ...] = ()
    """Worked example: messages of user and assistant between the system text and the first observation. Its actions
    are written in `format`."""
    history: int | None = None
    """Number of earlier turns shown at each turn, besides the observation that poses the task; None: all."""
    suffix: str = ""
    """Text on its own line after the observation that poses the task, such as a question."""
    list_admissible: bool = False
    """Whether an observation ends with the commands that the environment accepts, if it lists them. In a shortened
    history, only the newest observation lists them."""
    sampling: Sampling | None = None
    """Decoding settings of published scores under this protocol. Evaluation uses them unless a recipe sets others.
    None: the protocol sets none."""
    turns: TurnControl | None = None
    """Turn limit that replaces the limits above, with reminders and extensions. None: no reminders or extensions."""
    user: SimulatedUser | None = None
    """Model that plays the user when an environment asks for the user's turn. None: a script of the environment."""

    def __post_init__(self) -> None:
        for name in ("system", "suffix"):
            if found := fault(getattr(self, name), name):
                raise ValueError(f"{found}.")
        for limit in (self.max_turns, *self.max_turns_by_kind.values()):
            if limit < 1:
                raise ValueError(f"max_turns must be >= 1, got {limit}.")
        if self.history is not None and self.history < 0:
            raise ValueError(f"history must be >= 0 or full, got {self.history}.")
        if self.history is not None and self.format == "tools":
            raise ValueError("history must be full where the format is tools: a result needs its call.")
        check_example(self.example)

    def limit(self, task: Task) -> int:
        """Return the turn limit of a task, before any extension."""
        if self.turns is not None and self.turns.limit is not None:
            return self.turns.limit
        return self.max_turns_by_kind.get(task.kind, self.max_turns)
