"""Bring an agent back to a turn of a recorded episode: its program runs again, and gets the recorded answers first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from perturn.episodes.episode import Job, parted
from perturn.errors import EnvironmentFailure, NotComeBack
from perturn.types import Action, Message, Prompt, Turn


class Replay:
    """The recorded turns of an episode that are played again before its new turns; none for an episode from the start.

    Attributes:
        kept: Number of recorded answers that the agent gets again.
    """

    def __init__(self, job: Job) -> None:
        """Take the recorded turns of a job."""
        self._begun = job.begun
        self.kept = 0 if job.begun is None else len(job.begun.turns[: job.kept])
        self._known = 0 if job.begun is None else self.kept + (not job.anew)
        self._last = None if job.window is None else self.kept + job.window
        self._needs_own = job.kept is not None

    @property
    def seed(self) -> int | None:
        """Seed of the recorded episode, which the program gets again; None for an episode from the start."""
        return None if self._begun is None else self._begun.seed

    def answer(self, turn: int, prompt: Prompt) -> Action | None:
        """Return the recorded answer to a request; None if the policy answers it.

        Args:
            turn: Number of requests that were answered before.
            prompt: The request.

        Raises:
            NotComeBack: If the request differs from the recorded one.
        """
        if self._begun is None:
            return None
        if turn < min(self._known, len(self._begun.turns)):
            then = self._begun.seen_from(turn)
            expected = [
                dict(then.template_kwargs),
                list(then.tools),
                *_said(then.prompt, then.turns, newest=()),
            ]
            del expected[-1]  # the answer to the request
            got = [
                dict(prompt.template_kwargs),
                list(prompt.tools),
                *_said(prompt.messages, prompt.turns, newest=prompt.observation),
            ]
            if got != expected:
                raise NotComeBack(
                    f"the agent did not come back to turn {turn}, since its request differs: {parted(got, expected)}."
                )
        return self._begun.turns[turn].action if turn < self.kept else None

    def is_over(self, turn: int) -> bool:
        """Return whether the episode pauses before a turn, since it has all turns that were asked for."""
        return self._last is not None and turn >= self._last

    def check_end(self, turns: int, is_full: bool) -> None:
        """Check an episode after its agent has ended.

        Args:
            turns: Number of requests that were answered.
            is_full: Whether the newest request was too long for the model's context window.

        Raises:
            NotComeBack: If the agent ended before it came back.
            EnvironmentFailure: If a branch has no turn of its own, since the kept turns fill the context.
        """
        if is_full and turns == self.kept and self._needs_own:
            raise EnvironmentFailure(
                "no turn was played after the kept turns, which fill the context; let the branch begin at an earlier "
                "turn."
            )
        if turns < self._known and not is_full:
            raise NotComeBack(
                f"the agent ended at turn {turns}, before it had come back to turn {self.kept}."
            )


def _said(prompt: Iterable[Message], turns: Iterable[Turn], newest: Iterable[Message]) -> list[Any]:
    """Return all messages of a conversation."""
    said = [message for turn in turns for message in (*turn.observation, turn.action.message())]
    return [*prompt, *said, *newest]
