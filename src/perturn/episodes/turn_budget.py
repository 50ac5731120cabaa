"""Count the turns that an episode has left, and add the number to its observations."""

from __future__ import annotations

import re

from perturn.types import EpisodeProtocol, Message, Observation, Task

_REMINDER = re.compile(r"\n(You are given \d+ turns? more\. )?You have \d+ turns? left\.\Z")


class Allowance:
    """Number of turns that an episode has left. The protocol may extend an episode that has no turns left."""

    def __init__(self, protocol: EpisodeProtocol, task: Task, posed: Observation) -> None:
        """Start with the turn limit of the task.

        Args:
            protocol: Rules of the episode.
            task: Task of the episode.
            posed: The environment's observation after `reset`.
        """
        self.left = protocol.limit(task)
        self._control = protocol.turns
        self._extensions = self._control.times if self._control and self._control.extend else 0
        self._given = 0
        self._known = {_reply(posed)}
        self._progress: list[bool] = []

    def spend(self, seen: Observation) -> None:
        """Count a played turn. After the last turn, extend the episode if the protocol allows it.

        Args:
            seen: The environment's observation after the turn.
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
        """Return an observation with a reminder of the turns left at its end, if the protocol has reminders.

        Args:
            heard: The observation: one message or several.
        """
        if self._control is None or not self._control.reminder:
            return heard
        *before, last = heard
        given = f"You are given {_turns(self._given)} more. " if self._given else ""
        text = f"{last.get('content') or ''}\n{given}You have {_turns(self.left)} left."
        return (*before, {**last, "content": text})

    def _is_needed(self) -> bool:
        """Return whether the episode made enough progress for an extension."""
        assert self._control is not None
        return self._control.progress is None or any(self._progress[-self._control.progress :])


def without_reminder(text: str) -> str:
    """Return an observation's text without the sentence about turns left."""
    return _REMINDER.sub("", text)


def _reply(seen: Observation) -> tuple[str, tuple[str, ...]]:
    return seen.text, seen.results


def _turns(count: int) -> str:
    return f"{count} turn{'' if count == 1 else 's'}"
