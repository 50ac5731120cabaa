"""Collect the episodes of all runs for the page, as an index and compressed pieces that the page opens on demand."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perturn.analysis.run_contents import RecordedRun
from perturn.episodes.triage_signals import SIGNALS, meaning, signals_of
from perturn.report.episode_view import body, clip, credited, message_text, tokens
from perturn.types import Message, Trajectory, failed, has_outcome, score, succeeded, unfinished

PIECE = 48
"""Number of episodes in a piece."""

_KEYS = ["set", "task", "kind", "sample", "score", "success", "turns", "invalid", "tokens", "signals", "end"]
"""Keys of a row of the index."""
_NOTHING: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
"""Rows of turns and tokens of an episode for which the alignment wrote no values."""


@dataclass(frozen=True)
class Piece:
    """Compressed JSON in the form in which the page embeds it."""

    id: str
    data: str
    """JSON, compressed by gzip and encoded in base64."""


class Catalogue:
    """Collection of the episodes of several runs, added one run at a time."""

    def __init__(self) -> None:
        """Start an empty collection."""
        self._runs: list[str] = []
        self._sets: list[dict[str, Any]] = []
        self._tasks: dict[str, int] = {}
        self._kinds: dict[str, int] = {}
        self._prompts: dict[str, int] = {}
        self._columns: dict[str, list[Any]] = {name: [] for name in _KEYS}
        self._bodies: list[dict[str, Any]] = []
        self._tokens: list[dict[str, Any] | None] = []
        self._pairs: list[list[Any]] = []
        self._texts: list[Mapping[str, str]] = []
        self._compare: list[tuple[str, str]] = []

    def add(self, run: RecordedRun, name: str) -> None:
        """Add all sets of episodes of a run, and its pairs.

        Args:
            run: The run.
            name: Unique display name of the run.
        """
        self._runs.append(name)
        self._texts.append(run.texts)
        expert, explored = map(run.paths.label, (run.paths.trajectories("expert"), run.explored_file))
        sets = {
            run.evaluated(policy): (f"{policy}, evaluated", run.evaluation[policy])
            for policy in reversed(run.evaluation)
        }
        sets |= {explored: ("exploration", run.explored), expert: ("expert", run.expert)}
        homes = {"chosen": expert, "rejected": explored}
        stored = {(key, one.key): one for key, (_, items) in sets.items() for one in items}
        noted: dict[Any, Any] = {}  # rows on the trained episodes, by set and key
        found: dict[Any, Any] = {}  # positions of the sides of the pairs, by side and number
        for side in homes:
            for index, pair in enumerate(run.pairs):
                one = getattr(pair, side)
                for home in (homes[side], explored):  # in a pair of one group, both sides were explored
                    if (side, index) not in found and stored.get((home, one.key)) == one:
                        found[side, index] = home, one.key
                        noted.setdefault((home, one.key), _noted(run, index, side))
        for episode, weighed in credited(run).items():
            noted.setdefault((explored, episode), (weighed, {}))
        numbers: dict[Any, int] = {}
        for key, (label, items) in sets.items():
            if items:
                self._begin_set(key, label)
            for one in items:
                numbers[key, one.key] = self._put(one, one.sample, noted.get((key, one.key), _NOTHING))
        for side in homes:
            cut = [index for index in range(len(run.pairs)) if (side, index) not in found]
            if cut:
                self._begin_set(f"pairs/{side}", f"{side} side, cut or not stored elsewhere")
            for index in cut:
                one = getattr(run.pairs[index], side)
                found[side, index] = side, index
                numbers[side, index] = self._put(one, index, _noted(run, index, side))
        for index in range(len(run.pairs)):
            self._pairs.append([len(self._runs) - 1, *(numbers[found[side, index]] for side in homes)])
        if run.compared:
            a, b = (f"{name}/{run.evaluated(policy)}" for policy in run.compared)
            self._compare.append((b, a))

    def _begin_set(self, name: str, label: str) -> None:
        self._sets.append({"run": len(self._runs) - 1, "name": name, "label": label})

    def pieces(self, compare: Sequence[tuple[str, str]] = ()) -> list[Piece]:
        """Return the pieces: first the index, then episodes, their tokens, and the texts of tokens.

        Args:
            compare: Pairs of sets that the page offers first for display side by side, each set as `run/set`.
        """
        index = {
            "runs": self._runs,
            "sets": self._sets,
            "tasks": list(self._tasks),
            "kinds": list(self._kinds),
            "prompts": [json.loads(prompt) for prompt in self._prompts],
            "signals": [{"name": name, "meaning": meaning(name)} for name in SIGNALS],
            "columns": self._columns,
            "piece": PIECE,
            "has_tokens": [int(each is not None) for each in self._tokens],
            "pairs": self._pairs,
            "compare": [*compare, *self._compare],
        }
        return [
            _piece("index", index),
            *(_piece(f"episodes-{i}", part) for i, part in enumerate(_parts(self._bodies))),
            *(_piece(f"tokens-{i}", part) for i, part in enumerate(_parts(self._tokens)) if any(part)),
            *(_piece(f"texts-{i}", texts) for i, texts in enumerate(self._texts) if texts),
        ]

    def _put(self, trajectory: Trajectory, sample: int, noted: tuple[Any, Any]) -> int:
        """Add an episode to the newest set, and return its number."""
        signals = signals_of(trajectory)
        row = {
            "set": len(self._sets) - 1,
            "task": _number(self._tasks, trajectory.task.id),
            "kind": _number(self._kinds, trajectory.task.kind),
            "sample": sample,
            "score": round(score(trajectory), 4) if has_outcome(trajectory) else None,
            "success": int(succeeded(trajectory)),
            "turns": len(trajectory.turns),
            "invalid": sum(not turn.valid for turn in trajectory.turns),
            "tokens": sum(len(turn.action.token_ids or ()) for turn in trajectory.turns),
            "signals": sum(1 << bit for bit, name in enumerate(SIGNALS) if name in signals),
            "end": _end(trajectory),
        }
        for key, value in row.items():
            self._columns[key].append(value)
        number = self._prompt(trajectory.prompt)
        openings = {
            index: self._prompt(turn.opening.prompt)
            for index, turn in enumerate(trajectory.turns)
            if turn.opening is not None
        }
        self._bodies.append(body(trajectory, number, noted[0], openings))
        self._tokens.append(tokens(trajectory, noted[1]))
        return len(self._bodies) - 1

    def _prompt(self, messages: Sequence[Message]) -> int:
        """Return the number of a prompt among the prompts of the page."""
        shown = [[message["role"], clip(message_text(message))] for message in messages]
        return _number(self._prompts, json.dumps(shown))


def _noted(run: RecordedRun, index: int, side: str) -> tuple[Any, Any]:
    """Return the rows that the alignment wrote on one side of a pair: a row of turns and a row of tokens."""
    return (
        run.confidence[index][side] if run.confidence else {},
        run.reference[index][side] if run.reference else {},
    )


def _number(numbers: dict[str, int], value: str) -> int:
    """Return the number of a value. Values are numbered in the order of their first use."""
    return numbers.setdefault(value, len(numbers))


def _end(trajectory: Trajectory) -> int:
    """Return how an episode ended: 0 the agent stopped, 1 environment, 2 a limit of Perturn, 3 FAILED, 4 unfinished."""
    if failed(trajectory):
        return 3
    if unfinished(trajectory):
        return 4
    return 2 if trajectory.truncated else int(trajectory.terminated)


def _parts(items: Sequence[Any]) -> Iterable[Sequence[Any]]:
    return [items[start : start + PIECE] for start in range(0, len(items), PIECE)]


def _piece(name: str, value: Any) -> Piece:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    packed = gzip.compress(text.encode("utf-8", "surrogatepass"), 6, mtime=0)
    return Piece(f"piece-{name}", base64.b64encode(packed).decode("ascii"))
