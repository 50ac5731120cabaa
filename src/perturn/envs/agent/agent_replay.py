"""Bring an agent back to a turn of a recorded episode: its program runs again, and gets the recorded answers first."""

from __future__ import annotations

from typing import Any

from perturn.episodes.episode import Job, parted
from perturn.episodes.prompts import request_at, request_of
from perturn.errors import EnvironmentFailure, NotComeBack
from perturn.types import Action, Prompt, Trajectory


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
        self._compared = 0 if job.begun is None else min(self._known, len(job.begun.turns))
        self._needs_own = job.kept is not None and not job.anew
        self._requests: dict[int, list[Any]] = {}

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
        if turn < self._compared and not self.fits(turn, prompt):
            got, expected = _asked(prompt), self._recorded(turn)
            raise NotComeBack(
                f"the agent did not come back to turn {turn}, since its request differs: {parted(got, expected)}."
            )
        return self._begun.turns[turn].action if turn < self.kept else None

    def fits(self, turn: int, prompt: Prompt) -> bool:
        """Return whether a request equals the recorded request of a turn."""
        return turn < self._compared and _asked(prompt) == self._recorded(turn)

    def is_compared(self, turn: int) -> bool:
        """Return whether the request of a turn must equal the recorded request."""
        return turn < self._compared

    def comes_later(self, turn: int, prompt: Prompt) -> bool:
        """Return whether a request is not the recorded one of this turn, but of a later recorded turn."""
        if self._begun is None or turn >= self._compared or (asked := _asked(prompt)) == self._recorded(turn):
            return False
        return any(asked == self._recorded(later) for later in range(turn + 1, len(self._begun.turns)))

    def _recorded(self, turn: int) -> list[Any]:
        """Return the recorded request of a turn."""
        assert self._begun is not None
        if turn not in self._requests:
            self._requests[turn] = request_at(self._begun, turn)
        return self._requests[turn]

    def fault(self, played: Trajectory, is_paused: bool) -> str | None:
        """Return why an episode that has ended is no continuation of the recorded one; None if it is."""
        kept = [turn.action for turn in self._begun.turns[: self.kept]] if self._begun else []
        if kept != [turn.action for turn in played.turns[: self.kept]]:
            return f"NotComeBack: the agent's requests up to turn {self.kept} were recorded in another order."
        if is_paused and len(played.turns) <= self.kept:
            return "EnvironmentFailure: the episode paused within a request for several answers, so it has no new turn."
        return None

    def is_over(self, turn: int) -> bool:
        """Return whether the episode pauses before a turn, since it has all turns that were asked for."""
        return self._last is not None and turn >= self._last

    def check_end(self, turns: int, is_full: bool, is_cut: bool) -> None:
        """Check an episode after its agent has ended.

        Args:
            turns: Number of requests that were answered.
            is_full: Whether the newest request was too long for the model's context window.
            is_cut: Whether a limit ended the episode.

        Raises:
            NotComeBack: If the agent ended before it came back.
            EnvironmentFailure: If a branch has no turn of its own, since the kept turns fill the context.
        """
        if is_full and turns == self.kept and self._needs_own:
            raise EnvironmentFailure(
                "no turn was played after the kept turns, which fill the context; let the branch begin at an earlier "
                "turn."
            )
        if turns < self._known and not (is_full or is_cut):
            raise NotComeBack(
                f"the agent ended at turn {turns}, before it had come back to turn {self.kept}."
            )


def _asked(prompt: Prompt) -> list[Any]:
    return request_of(prompt.messages, prompt.turns, prompt.observation, prompt.tools, prompt.template_kwargs)
