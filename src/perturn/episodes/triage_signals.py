"""Triage signals: properties of an episode that are computed without a model.

Source of the names: "Signals: Trajectory Sampling and Triage for Agentic Interactions" (2026), whose classes are
interaction, execution and environment.
Differs: the definitions are Perturn's. `broken` and `cut` are added. Interaction signals other than stagnation are
missing, since they need a human's replies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perturn.config.signal_filter import Signals
from perturn.data.origins import without_ids
from perturn.episodes.turn_budget import without_reminder
from perturn.errors import did_you_mean
from perturn.types import Trajectory, failed

REPEATS = 3
"""Number of repetitions that make a loop."""
LONGEST_CYCLE = 3
"""Length, in actions, of the longest block that is searched for repetitions."""
STILL_TURNS = 5
"""Number of consecutive turns without news that make a stagnation."""


def broken(trajectory: Trajectory) -> bool:
    """Return whether the environment or the engine raised; the episode is marked FAILED."""
    return failed(trajectory)


def failure(trajectory: Trajectory) -> bool:
    """Return whether an action broke the format, or the environment did not understand it."""
    return any(not turn.valid for turn in trajectory.turns)


def loop(trajectory: Trajectory) -> bool:
    """Return whether up to three actions came three times in a row, or one action three times in the same state."""
    actions = [action_of(turn.action.text, turn.action.tool_calls) for turn in trajectory.turns]
    visits = Counter(
        (turn.state_key, action)
        for turn, action in zip(trajectory.turns, actions, strict=True)
        if turn.state_key is not None
    )
    return any(count >= REPEATS for count in visits.values()) or any(
        _repeats(actions, size) for size in range(1, LONGEST_CYCLE + 1)
    )


def stagnation(trajectory: Trajectory) -> bool:
    """Return whether five turns in a row brought no reward and showed nothing that had not been seen before."""
    seen: set[str] = set()
    still = 0
    for index, turn in enumerate(trajectory.turns):
        before = trajectory.turns[index - 1].reward if index else 0.0
        text = without_reminder(turn.observation_text)
        news = text not in seen or before != 0
        seen.add(text)
        still = 0 if news else still + 1
        if still >= STILL_TURNS:
            return True
    return False


def exhaustion(trajectory: Trajectory) -> bool:
    """Return whether a limit of Perturn, such as the turn limit, ended the episode."""
    return trajectory.truncated


def cut(trajectory: Trajectory) -> bool:
    """Return whether an action was cut off at the token limit."""
    return any(not turn.action.ended for turn in trajectory.turns)


SIGNALS: dict[str, Callable[[Trajectory], bool]] = {
    shows.__name__: shows for shows in (broken, failure, loop, stagnation, exhaustion, cut)
}
"""Signals by name. The docstring of each function gives its meaning."""


def signals_of(trajectory: Trajectory) -> list[str]:
    """Return the names of the signals that an episode shows."""
    return [name for name, shows in SIGNALS.items() if shows(trajectory)]


def meaning(name: str) -> str:
    """Return the meaning of a signal: its docstring, without "Return whether"."""
    return (SIGNALS[name].__doc__ or "").strip().removeprefix("Return whether ")


def action_of(text: str, tool_calls: Sequence[Mapping[str, Any]]) -> str:
    """Return a text that identifies a turn's action: the action without its thought, and the tool calls."""
    _, mark, action = text.rpartition("Action:")
    return f"{(action if mark else text).strip()}{without_ids(tool_calls) if tool_calls else ''}"


def _repeats(actions: Sequence[str], size: int) -> bool:
    """Return whether a block of `size` actions comes `REPEATS` times in a row."""
    matching = 0
    for index in range(size, len(actions)):
        matching = matching + 1 if actions[index] == actions[index - size] else 0
        if matching >= size * (REPEATS - 1):
            return True
    return False


def check_signals(chosen: Signals) -> None:
    """Reject unknown names of signals.

    Raises:
        ValueError: If a name is unknown; names the setting and the known signals.
    """
    known = [name for name in SIGNALS if name != broken.__name__]  # a FAILED episode is counted as FAILED
    for key in ("without", "only"):
        for name in getattr(chosen, key):
            if name not in known:
                raise ValueError(f"signals.{key}: unknown signal {name!r:.80}.{did_you_mean(name, known)}")


def left_out(episodes: Sequence[Trajectory], chosen: Signals) -> tuple[list[Trajectory], dict[str, int]]:
    """Return the episodes that the filter keeps, and the number of the others as `filtered`.

    FAILED episodes are kept. If the filter names no signal, the count is missing.
    """
    kept = [one for one in episodes if not chosen or failed(one) or _is_chosen(one, chosen)]
    return kept, {"filtered": len(episodes) - len(kept)} if chosen else {}


def _is_chosen(one: Trajectory, chosen: Signals) -> bool:
    shown = set(signals_of(one))
    return shown.isdisjoint(chosen.without) and (not chosen.only or not shown.isdisjoint(chosen.only))
