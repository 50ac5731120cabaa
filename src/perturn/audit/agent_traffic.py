"""Count how many requests of agents only extend an earlier request, and why the other requests do not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from perturn.episodes.prefix_matching import Cause, Sequences
from perturn.episodes.prompts import context_of
from perturn.types import OPENS, Trajectory


@dataclass
class Traffic:
    """Counts of the requests of agents. Each request is a turn of an episode."""

    episodes: int = 0
    """Number of episodes with more than one sequence."""
    turns: int = 0
    append_only: int = 0
    """Number of turns that extend the newest turn of their sequence, including the first turn of each episode."""
    again: int = 0
    """Number of turns that extend an already extended turn, as in a retry."""
    opened: int = 0
    """Number of turns that start another conversation without changing an earlier message, as a sub-agent does."""
    broken: Counter[str] = field(default_factory=Counter)
    """Changed part of an earlier message -> number of turns that start another conversation because of this change."""

    def add(self, episode: Trajectory) -> None:
        """Count the turns of an episode."""
        self.turns += len(episode.turns)
        if episode.is_linear:
            self.append_only += len(episode.turns)
            return
        self.episodes += 1
        causes, extended = _causes(episode), set[int]()
        for index in range(len(episode.turns)):
            before = episode.parent(index)
            if index == 0 or (before != OPENS and before not in extended):
                self.append_only += 1
            elif before != OPENS:
                self.again += 1
            elif causes[index] in (None, Cause.OTHER):
                self.opened += 1
            else:
                self.broken[str(causes[index])] += 1
            extended.add(before)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {
            "episodes": self.episodes,
            "turns": self.turns,
            "append_only": self.append_only,
            "again": self.again,
            "opened": self.opened,
            "broken": dict(self.broken.most_common()),
        }


def _causes(episode: Trajectory) -> list[Cause | None]:
    """Return the cause that broke the sequence before each turn; None for a turn that extends an earlier turn."""
    known, found = Sequences(), list[Cause | None]()
    for index, turn in enumerate(episode.turns):
        seen = context_of(episode, index)
        asked = seen.messages[:-1]  # all messages but the answer
        position = known.position(asked, seen.tools, seen.template_kwargs)
        known.add(position, turn.action.message())
        found.append(None if position.broke is None else position.broke.cause)
    return found


def traffic_lines(found: dict[str, Any]) -> list[str]:
    """Describe the counts of `Traffic.to_dict` in sentences; empty if every episode is one sequence."""
    if not found["episodes"]:
        return []
    share = found["append_only"] / found["turns"]
    lines = [
        f"{found['append_only']} of {found['turns']} requests ({share:.0%}) only append to an earlier one; "
        f"{found['again']} answer a turn again, {found['opened']} open another conversation"
    ]
    if broken := found["broken"]:
        causes = ", ".join(f"{cause} ({count})" for cause, count in broken.items())
        lines.append(f"{sum(broken.values())} changed what had been said: {causes}")
    return lines
