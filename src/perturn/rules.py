"""Parts of an episode's rules: its worked example, and control of its turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from perturn.bounds import Bound, check_bounds
from perturn.io.plain import fault

_COUNT = Bound(least=1, most=10**9)


@dataclass(frozen=True)
class TurnControl:
    """A turn limit that an agent is told of, and extensions for episodes that need them.

    Source: "More with Less: An Empirical Study of Turn-Control Strategies for Efficient Coding Agents", 2025,
    arXiv:2510.16786, abstract: a fixed limit with reminders, and extensions on demand.
    Differs: what counts as demand, how many extensions there are and what an agent is told is assumed.
    """

    limit: Annotated[int, _COUNT] | None = None
    """Turns of an episode before any extension, whatever its kind of task; None: as the protocol has it."""
    reminder: bool = True
    """Whether each observation ends with the number of turns that are left, and says it where there was an
    extension."""
    extend: Annotated[int, _COUNT] | None = None
    """Turns of an extension, which an episode may be given when it has none left; None: there is none."""
    times: Annotated[int, _COUNT] = 1
    """Extensions of an episode, at most."""
    progress: Annotated[int, _COUNT] | None = 5
    """An extension is given where one of the last so many turns made progress: a reward above 0, or an action that
    the world understood and answered as it had not before in this episode. None: to each episode that has not ended."""

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
                "progress must be set where there is no reminder: an extension of all that nobody is told of is a "
                "higher limit."
            )


def check_example(example: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a worked example that an observation cannot follow.

    Raises:
        ValueError: Saying what it must be.
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
