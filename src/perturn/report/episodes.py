"""All episodes of the runs, as the page holds them: one index, and compressed pieces that it opens on demand."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from perturn.data.outcomes import failed, score, succeeded
from perturn.report.folder import RecordedRun, aligned_policy
from perturn.report.signals import SIGNALS, meaning, signals_of
from perturn.report.turns import Notes, body, clip, message_text, notes_of_side, tokens
from perturn.types import Trajectory

PIECE = 48
"""Episodes of a piece."""

_COLUMNS = (
    "set",
    "task",
    "kind",
    "sample",
    "score",
    "success",
    "turns",
    "invalid",
    "tokens",
    "signals",
    "end",
)


@dataclass(frozen=True)
class Piece:
    """Compressed JSON, as the page embeds it."""

    id: str
    data: str
    """Base64 of gzip of JSON."""


@dataclass
class _Table:
    """Values numbered in the order they are first met."""

    numbers: dict[str, int] = field(default_factory=dict)

    def add(self, value: str) -> int:
        return self.numbers.setdefault(value, len(self.numbers))


class Catalogue:
    """Collects the episodes of one run after another."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._runs: list[str] = []
        self._sets: list[dict[str, Any]] = []
        self._tasks, self._kinds, self._prompts = _Table(), _Table(), _Table()
        self._columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        self._bodies: list[dict[str, Any]] = []
        self._tokens: list[dict[str, Any] | None] = []
        self._pairs: list[list[Any]] = []
        self._texts: list[Mapping[str, str]] = []
        self._compare: list[tuple[str, str]] = []

    def add(self, run: RecordedRun, name: str) -> None:
        """Take in all sets of a run and its pairs.

        Args:
            run: The run.
            name: What the page calls it; not the name of another one.
        """
        self._runs.append(name)
        self._texts.append(run.texts)
        sets = sets_of(run)
        notes = {key: dict[tuple[str, int], Notes]() for key in sets}
        set_of = _noted(run, sets, notes)
        found: dict[tuple[str, str, int], int] = {}
        for key, trajectories in sets.items():
            self._sets.append({"run": len(self._runs) - 1, "name": key, "label": _label(run, key)})
            for one in trajectories:
                found[key, *one.key] = self._put(one, one.sample, notes[key].get(one.key, Notes()))
        self._put_pairs(run, found, set_of)
        aligned = aligned_policy(run.evaluation)
        if aligned is not None and "sft" in run.evaluation:
            self._compare.append((f"{name}/{run.evaluated('sft')}", f"{name}/{run.evaluated(aligned)}"))

    def pieces(self, compare: Sequence[tuple[str, str]] = ()) -> list[Piece]:
        """The index first, then the episodes, their tokens and the texts of the tokens.

        Args:
            compare: Sets to offer side by side before those of one run, each as `run/set`.
        """
        index = {
            "runs": self._runs,
            "sets": self._sets,
            "tasks": list(self._tasks.numbers),
            "kinds": list(self._kinds.numbers),
            "prompts": [json.loads(prompt) for prompt in self._prompts.numbers],
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

    def _put(self, trajectory: Trajectory, sample: int, notes: Notes) -> int:
        """Take in one episode of the newest set; its number."""
        signals = signals_of(trajectory)
        row = {
            "set": len(self._sets) - 1,
            "task": self._tasks.add(trajectory.task.id),
            "kind": self._kinds.add(trajectory.task.kind),
            "sample": sample,
            "score": round(score(trajectory), 4),
            "success": int(succeeded(trajectory)),
            "turns": len(trajectory.turns),
            "invalid": sum(not turn.valid for turn in trajectory.turns),
            "tokens": sum(len(turn.action.token_ids or ()) for turn in trajectory.turns),
            "signals": sum(1 << bit for bit, name in enumerate(SIGNALS) if name in signals),
            "end": _end(trajectory),
        }
        for key, value in row.items():
            self._columns[key].append(value)
        prompt = [[message["role"], clip(message_text(message))] for message in trajectory.prompt]
        number = self._prompts.add(json.dumps(prompt))
        self._bodies.append(body(trajectory, number, notes))
        self._tokens.append(tokens(trajectory, notes))
        return len(self._bodies) - 1

    def _put_pairs(
        self,
        run: RecordedRun,
        found: Mapping[tuple[str, str, int], int],
        set_of: Mapping[tuple[int, str], str],
    ) -> None:
        """Take in the pairs; a side that is in no set, since it was cut, comes as an episode of its own."""
        sides: dict[tuple[int, str], int] = {}
        for side in ("chosen", "rejected"):
            missing = [index for index in range(len(run.pairs)) if (index, side) not in set_of]
            if missing:
                label = f"{side} side, cut or not stored elsewhere"
                self._sets.append({"run": len(self._runs) - 1, "name": f"pairs/{side}", "label": label})
            for index in missing:
                trajectory = getattr(run.pairs[index], side)
                sides[index, side] = self._put(trajectory, index, _side_notes(run, index, side))
        for index, pair in enumerate(run.pairs):
            numbers = [
                sides.get((index, side), -1)
                if (index, side) in sides
                else found[set_of[index, side], *getattr(pair, side).key]
                for side in ("chosen", "rejected")
            ]
            self._pairs.append([len(self._runs) - 1, *numbers])


def sets_of(run: RecordedRun) -> dict[str, list[Trajectory]]:
    """The sets of episodes of a run by their path in its folder, evaluations first."""
    sets = {run.evaluated(policy): run.evaluation[policy] for policy in reversed(run.evaluation)}
    sets |= {_stored(run, "explore"): run.explored, _stored(run, "expert"): run.expert}
    return {key: items for key, items in sets.items() if items}


def _stored(run: RecordedRun, stage: str) -> str:
    return run.paths.label(run.paths.trajectories(stage))


def _label(run: RecordedRun, key: str) -> str:
    """Name of a set for the reader."""
    known = {_stored(run, "expert"): "expert", _stored(run, "explore"): "exploration"}
    return known.get(key, f"{PurePath(key).name}, evaluated")


def _noted(
    run: RecordedRun,
    sets: Mapping[str, Sequence[Trajectory]],
    notes: Mapping[str, dict[tuple[str, int], Notes]],
) -> dict[tuple[int, str], str]:
    """Put what the alignment wrote about the pairs to the episodes they were made of; where each side is."""
    set_of: dict[tuple[int, str], str] = {}
    stored = {key: {one.key: one for one in items} for key, items in sets.items()}
    for side, key in (("chosen", _stored(run, "expert")), ("rejected", _stored(run, "explore"))):
        for index, pair in enumerate(run.pairs):
            trajectory: Trajectory = getattr(pair, side)
            if stored.get(key, {}).get(trajectory.key) == trajectory:
                set_of[index, side] = key
                notes[key].setdefault(trajectory.key, _side_notes(run, index, side))
    return set_of


def _side_notes(run: RecordedRun, index: int, side: str) -> Notes:
    confidence = run.confidence[index][side] if run.confidence else None
    reference = run.reference[index][side] if run.reference else None
    return notes_of_side(confidence, reference, len(getattr(run.pairs[index], side).turns))


def _end(trajectory: Trajectory) -> int:
    """How it ended: 0 stopped, 1 by the environment, 2 at a limit of ours, 3 FAILED."""
    if failed(trajectory):
        return 3
    return 2 if trajectory.truncated else int(trajectory.terminated)


def _parts(items: Sequence[Any]) -> Iterable[Sequence[Any]]:
    return [items[start : start + PIECE] for start in range(0, len(items), PIECE)]


def _piece(name: str, value: Any) -> Piece:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    packed = gzip.compress(text.encode("utf-8", "surrogatepass"), 6, mtime=0)
    return Piece(f"piece-{name}", base64.b64encode(packed).decode("ascii"))
