"""Progress of episodes, measured in the turns that are played and those that are still to be expected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from perturn.display.progress_bars import Work, bar
from perturn.episodes.episode import Job
from perturn.episodes.world_threads import Hear, ignore
from perturn.types import EpisodeProtocol, Prompt, Trajectory, succeeded

_LONGEST = 1000
"""Turns beyond which no episode is expected to go, whatever its limit."""
_DOUBT = 2.0
"""Episodes that the mean length counts for, where the chance of an end after a certain turn is estimated."""


@contextmanager
def episode_bar(
    what: str, done: int, missing: Sequence[Job], protocol: EpisodeProtocol
) -> Iterator[tuple[Work, Hear]]:
    """Show a bar of episodes that is measured in turns, with how many a policy has solved, and its success at the end.

    Args:
        what: Name of the episodes.
        done: Episodes that were played before.
        missing: Episodes to play now.
        protocol: Their rules.

    Yields: The bar, and a function that is given all texts of the episodes.
    """
    turns, over, solved, asks = Turns(missing, protocol), 0, 0, False
    with bar(what, done + len(missing), done, "episodes", turns) as shown:

        def hear(said: Prompt | Trajectory) -> None:
            nonlocal over, solved, asks
            turns.hear(said)
            if isinstance(said, Prompt):
                asks = True
                shown.begin()
            else:
                over, solved = over + 1, solved + succeeded(said)
                # Not a rate before the end: the first to end are the short ones, and of these most are solved.
                rate = f"success {solved / over:.0%}" if over == len(missing) else f"{solved} solved so far"
                shown.note = rate if asks else ""
            shown.look()

        yield shown, hear


@contextmanager
def unseen(*_: object) -> Iterator[tuple[Work, Hear]]:
    """Like `episode_bar`, for episodes that are played while another stage shows progress: show nothing."""
    yield Work(""), ignore


class Turns:
    """Turns of the episodes that are being played: those that are over, and how many more to expect.

    The chance that an episode ends after its t-th turn is the share that did so among the episodes that got that far,
    running ones included. While few got that far, it is drawn to the share over all turns. No episode is expected to
    go beyond its turn limit. So the first episodes to end, which are the short ones, do not pass for all of them.
    """

    unit = "turns"

    def __init__(self, jobs: Sequence[Job], protocol: EpisodeProtocol) -> None:
        """Start with nothing played.

        Args:
            jobs: The episodes to play.
            protocol: Their rules, which say how many turns each may take.
        """
        self._begun = {job.conversation: len(job.begun.turns[: job.kept]) if job.begun else 0 for job in jobs}
        self._limits = {job.conversation: _limit(job, protocol) for job in jobs}
        self._running: dict[str, int] = {}
        self._over: dict[str, int] = {}
        self.amount = 0.0
        """Turns played in this call."""

    def hear(self, said: Prompt | Trajectory) -> None:
        """Take note of a prompt, which follows a turn unless it is the first one, or of the end of an episode."""
        if isinstance(said, Prompt):
            if said.of_user:
                return
            self._come_to(said.conversation, self._running.get(said.conversation, -1) + 1)
            return
        conversation = Job(said.task, said.seed, said.sample).conversation
        turns = max(0, len(said.turns) - self._begun.get(conversation, 0))
        self._come_to(conversation, turns)
        self._over[conversation] = turns
        del self._running[conversation]

    def _come_to(self, conversation: str, turns: int) -> None:
        """Record how far an episode has come; turns that are played again after a lost world count again."""
        before = self._running.get(conversation, 0)
        self.amount += max(0, turns - before)
        self._running[conversation] = max(turns, before)

    @property
    def left(self) -> float:
        """Expected turns of running and waiting episodes."""
        running, over = dict(self._running), dict(self._over)
        more = {limit: self._more(limit, running, over) for limit in set(self._limits.values())}
        expected = 0.0
        for conversation, limit in self._limits.items():
            if conversation not in over:
                expected += more[limit][min(limit, running.get(conversation, 0))]
        return expected

    def _more(self, limit: int, running: Mapping[str, int], over: Mapping[str, int]) -> list[float]:
        """Return the expected number of further turns of an episode with this limit, after 0 to `limit` turns."""
        reached, early = [0] * (limit + 2), [0] * (limit + 1)
        for conversation, turns in over.items():
            reached[min(turns, limit)] += 1
            early[min(turns, limit)] += turns < self._limits.get(conversation, 0)
        for turns in running.values():
            reached[min(turns, limit)] += 1
        for turn in range(limit, -1, -1):
            reached[turn] += reached[turn + 1]
        chance = (sum(early[1:]) + 1) / (sum(reached[1:]) + limit)
        more = [0.0] * (limit + 1)
        for turn in range(limit - 1, -1, -1):
            after = turn + 1
            ends = (early[after] + _DOUBT * chance) / (reached[after] + _DOUBT)
            more[turn] = 1 + (1 - min(1.0, ends)) * more[after]
        return more


def _limit(job: Job, protocol: EpisodeProtocol) -> int:
    """Return turns that an episode may still take, every extension given."""
    control = protocol.turns
    limit = protocol.limit(job.task) + ((control.extend or 0) * control.times if control else 0)
    limit -= len(job.begun.turns[: job.kept]) if job.begun else 0
    return max(1, min(limit, _LONGEST, limit if job.window is None else job.window))
