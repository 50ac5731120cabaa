"""Number of turns that an episode has left, and the text that tells its agent."""

from __future__ import annotations

import re

from perturn.types import EpisodeProtocol, Message, Observation, Task

_REMINDER = re.compile(r"\n(You are given \d+ turns? more\. )?You have \d+ turns? left\.\Z")


class Allowance:
    """The turns that an episode has left; its protocol may give more where it has none."""

    def __init__(self, protocol: EpisodeProtocol, task: Task, posed: Observation) -> None:
        """Start with all turns left.

        Args:
            protocol: Rules of the episode.
            task: Of the episode.
            posed: The world's answer to `reset`.
        """
        self.left = protocol.limit(task)
        self._control = protocol.turns
        self._extensions = self._control.times if self._control and self._control.extend else 0
        self._given = 0
        self._known = {_reply(posed)}
        self._progress: list[bool] = []

    def spend(self, seen: Observation) -> None:
        """Count a turn that was played, and give more where it was the last one.

        Args:
            seen: The world's answer to it.
        """
        self.left -= 1
        self._progress.append(seen.reward > 0 or (seen.valid and _reply(seen) not in self._known))
        self._known.add(_reply(seen))
        self._given = 0
        if not self.left and self._extensions and self._is_needed():
            assert self._control is not None
            assert self._control.extend is not None
            self._extensions -= 1
            self.left = self._given = self._control.extend

    def tell(self, heard: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return an observation that ends with the turns that are left, if the protocol says so.

        Args:
            heard: The observation, a message or more.
        """
        if self._control is None or not self._control.reminder:
            return heard
        *before, last = heard
        given = f"You are given {_turns(self._given)} more. " if self._given else ""
        text = f"{last.get('content') or ''}\n{given}You have {_turns(self.left)} left."
        return (*before, {**last, "content": text})

    def _is_needed(self) -> bool:
        """Return whether an extension applies to the episode."""
        assert self._control is not None
        return self._control.progress is None or any(self._progress[-self._control.progress :])


def without_reminder(text: str) -> str:
    """Return an observation's text without the sentence about turns left."""
    return _REMINDER.sub("", text)


def _reply(seen: Observation) -> tuple[str, tuple[str, ...]]:
    return seen.text, seen.results


def _turns(count: int) -> str:
    return f"{count} turn{'' if count == 1 else 's'}"
