"""Measure the progress of episodes in turns: turns that were played, and turns that are still expected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from perturn.display.progress_bars import Work, bar
from perturn.episodes.episode import Job
from perturn.episodes.world_threads import Hear, ignore
from perturn.types import EpisodeProtocol, Prompt, Trajectory, succeeded

_LONGEST = 1000
"""Number of turns beyond which no episode is expected to continue, whatever its limit."""
_DOUBT = 2.0
"""Weight of the overall rate, in episodes, in the estimated probability that an episode ends after a certain turn."""


@contextmanager
def episode_bar(
    what: str, done: int, missing: Sequence[Job], protocol: EpisodeProtocol
) -> Iterator[tuple[Work, Hear]]:
    """Show a bar of episodes, measured in turns, with the number of solved episodes and the final success rate.

    Earlier calls may have played other episodes of the file. Then there is no rate.

    Args:
        what: Name of the episodes.
        done: Number of episodes that were played before.
        missing: Episodes that are to be played now.
        protocol: Protocol of the episodes.

    Yields: The bar, and a function that must be called with every prompt and every finished trajectory.
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
                # A rate is shown only for all episodes: the first episodes to end are short and mostly solved.
                is_rate = over == len(missing) and not done
                so_far = "in this call" if done else "so far"
                note = f"success {solved / over:.0%}" if is_rate else f"{solved} solved {so_far}"
                shown.note = note if asks else ""
            shown.look()

        yield shown, hear


@contextmanager
def unseen(*_: object) -> Iterator[tuple[Work, Hear]]:
    """Show nothing. This replaces `episode_bar` for episodes that are played while another stage shows progress."""
    yield Work(""), ignore


class Turns:
    """Turns of the running episodes: how many were played, and how many more are expected.

    The probability that an episode ends after its t-th turn is estimated from the episodes that reached this turn, by
    the share that ended. If few episodes reached it, the estimate is shrunk towards the share over all turns. Running
    episodes are included, and turn limits are respected. So the first finished episodes, which are short, do not bias
    the estimate.
    """

    unit = "turns"

    def __init__(self, jobs: Sequence[Job], protocol: EpisodeProtocol) -> None:
        """Start before any turn is played.

        Args:
            jobs: The episodes to play.
            protocol: Protocol of the episodes, which limits their turns.
        """
        self._begun = {job.conversation: len(job.begun.turns[: job.kept]) if job.begun else 0 for job in jobs}
        self._limits = {job.conversation: _limit(job, protocol) for job in jobs}
        self._running: dict[str, int] = {}
        self._over: dict[str, int] = {}
        self.amount = 0.0
        """Number of turns played in this call."""

    def hear(self, said: Prompt | Trajectory) -> None:
        """Record a prompt or the end of an episode. Every prompt but the first follows a turn."""
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
        """Record the number of turns of an episode. Turns repeated after a lost environment are counted again."""
        before = self._running.get(conversation, 0)
        self.amount += max(0, turns - before)
        self._running[conversation] = max(turns, before)

    @property
    def left(self) -> float:
        """Expected number of turns of running and waiting episodes."""
        running, over = dict(self._running), dict(self._over)
        more = {limit: self._more(limit, running, over) for limit in set(self._limits.values())}
        expected = 0.0
        for conversation, limit in self._limits.items():
            if conversation not in over:
                expected += more[limit][min(limit, running.get(conversation, 0))]
        return expected

    def _more(self, limit: int, running: Mapping[str, int], over: Mapping[str, int]) -> list[float]:
        """Return the expected number of further turns, after 0 to `limit` turns, of an episode with this limit."""
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
    """Return the number of turns that an episode may still take, if all extensions are granted."""
    control = protocol.turns
    limit = protocol.limit(job.task) + ((control.extend or 0) * control.times if control else 0)
    limit -= len(job.begun.turns[: job.kept]) if job.begun else 0
    return max(1, min(limit, _LONGEST, limit if job.window is None else job.window))
