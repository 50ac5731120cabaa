"""Collect the episodes of all runs for the page, as an index and compressed pieces that the page opens on demand."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from perturn.analysis.episode_numbers import EpisodeNumbers, read_lines_of
from perturn.analysis.run_contents import RecordedRun
from perturn.episodes.triage_signals import SIGNALS, meaning, signals_of
from perturn.report.episode_view import body, clip, credited, message_text, most_informative, tokens
from perturn.types import (
    Message,
    PreferencePair,
    Trajectory,
    failed,
    has_outcome,
    score,
    succeeded,
    unfinished,
)

PIECE = 48
"""Number of episodes in a piece."""
SHOWN = 500
"""Number of episodes of a set, and of pairs, that the page shows. Sides of shown pairs are shown in addition."""

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

    def add(self, run: RecordedRun, name: str) -> list[str]:
        """Add the sets of episodes of a run, and its pairs. Of a larger set, `SHOWN` episodes are added.

        Args:
            run: The run.
            name: Unique display name of the run.

        Returns:
            A note on each set that is not added whole.
        """
        self._runs.append(name)
        self._texts.append(run.texts)
        before = len(self._sets)
        for policy in reversed(run.scored):
            episodes = run.scored[policy]
            lines = {one.line for one in _chosen(episodes)}
            whole = read_lines_of(run.paths.evaluation(policy), lines)
            how = "evaluation not finished" if policy in run.unfinished else "evaluated"
            self._put_set(run.evaluated(policy), f"{policy}, {how}", whole, episodes)
        pairs = self._add_trained(run)
        if run.compared:
            a, b = (f"{name}/{run.evaluated(policy)}" for policy in run.compared)
            self._compare.append((b, a))
        cut = {f"episodes of {each['name']}": each["part"] for each in self._sets[before:] if "part" in each}
        cut |= {"pairs": f"{pairs:,} of {len(run.pairs):,}"} if pairs < len(run.pairs) else {}
        return [f"The page shows {part} {what}." for what, part in cut.items()]

    def _add_trained(self, run: RecordedRun) -> int:
        """Add explored and expert episodes with the values that training wrote, and pairs; return the shown pairs."""
        expert, explored = map(run.paths.label, (run.paths.trajectories("expert"), run.explored_file))
        homes = {"chosen": expert, "rejected": explored}
        pairs = _shown_pairs(run.pairs)
        reference = run.reference(pairs)
        sides = {(side, index): getattr(run.pairs[index], side) for side in homes for index in pairs}
        own = {one.key: one for one in run.explored}
        wanted = {one.key for one in sides.values() if own.get(one.key) == one}
        wanted |= {one.key for one in most_informative(run)}
        played = {one.key for one in _chosen(run.explored_numbers, wanted)}
        taught = {one.key for (side, _), one in sides.items() if side == "chosen"}
        lines = {one.line for one in _chosen(run.expert, taught)}
        whole = {
            explored: [one for one in run.explored if one.key in played],
            expert: read_lines_of(run.paths.trajectories("expert"), lines),
        }
        stored = {(home, one.key): one for home, episodes in whole.items() for one in episodes}
        notes = {
            (side, index): (
                run.confidence[index][side] if run.confidence else {},
                reference[index][side] if reference else {},
            )
            for side, index in sides
        }
        noted: dict[Any, Any] = {}  # rows on the trained episodes, by set and key
        found: dict[Any, Any] = {}  # positions of the sides of the pairs, by side and number
        for (side, index), one in sides.items():
            for home in (homes[side], explored):  # in a pair of one group, both sides were explored
                if (side, index) not in found and stored.get((home, one.key)) == one:
                    found[side, index] = home, one.key
                    noted.setdefault((home, one.key), notes[side, index])
        for episode, weighed in credited(run).items():
            noted.setdefault((explored, episode), (weighed, {}))
        label = "exploration" if run.is_explored else "exploration not finished"
        numbers = self._put_set(explored, label, whole[explored], run.explored_numbers, noted)
        numbers |= self._put_set(expert, "expert", whole[expert], run.expert, noted)
        for side in homes:
            cut = [index for index in pairs if (side, index) not in found]
            if cut:
                self._begin_set(f"pairs/{side}", f"{side} side, cut or not stored elsewhere")
            for index in cut:
                found[side, index] = side, index
                numbers[side, index] = self._put(sides[side, index], index, notes[side, index])
        for index in pairs:
            self._pairs.append([len(self._runs) - 1, *(numbers[found[side, index]] for side in homes)])
        return len(pairs)

    def _put_set(
        self,
        name: str,
        label: str,
        episodes: Sequence[Trajectory],
        of: Sequence[EpisodeNumbers],
        noted: Mapping[Any, tuple[Any, Any]] = MappingProxyType({}),
    ) -> dict[Any, int]:
        """Add the shown episodes of a set, and return their numbers by set and key.

        The page also gets the number of samples of each task that is shown only in part.
        """
        if episodes:
            self._begin_set(name, label)
        if len(episodes) < len(of):
            shown, samples = Counter(one.task.id for one in episodes), Counter(one.task for one in of)
            cut = [task for task, n in shown.items() if n < samples[task]]
            self._sets[-1]["samples"] = {_number(self._tasks, task): samples[task] for task in cut}
            self._sets[-1]["part"] = f"{len(episodes):,} of {len(of):,}"
        return {
            (name, one.key): self._put(one, one.sample, noted.get((name, one.key), _NOTHING))
            for one in episodes
        }

    def _begin_set(self, name: str, label: str) -> None:
        self._sets.append({"run": len(self._runs) - 1, "name": name, "label": label})

    def pieces(self, compare: Sequence[tuple[str, str]] = ()) -> list[Piece]:
        """Return the pieces: first the index, then episodes, their tokens, and the texts of tokens.

        The index holds the prompts of several episodes. A prompt of one episode is stored with this episode.

        Args:
            compare: Pairs of sets that the page offers first for display side by side, each set as `run/set`. The page
                shows the second set minus the first.
        """
        prompts = list(self._prompts)
        users = Counter(number for one in self._bodies for number in _prompts_of(one))
        shared = [json.loads(text) if users[number] > 1 else None for number, text in enumerate(prompts)]
        index = {
            "runs": self._runs,
            "sets": self._sets,
            "tasks": list(self._tasks),
            "kinds": list(self._kinds),
            "prompts": shared,
            "signals": [{"name": name, "meaning": meaning(name)} for name in SIGNALS],
            "columns": self._columns,
            "piece": PIECE,
            "has_tokens": [int(each is not None) for each in self._tokens],
            "pairs": self._pairs,
            "compare": [*compare, *self._compare],
        }
        return [
            _piece("index", index),
            *(
                _piece(f"episodes-{i}", [_with_own(one, prompts, users) for one in part])
                for i, part in enumerate(_parts(self._bodies))
            ),
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


def _chosen(
    episodes: Sequence[EpisodeNumbers], wanted: Collection[tuple[str, int]] = ()
) -> list[EpisodeNumbers]:
    """Return the shown episodes of a set: all, or the first tasks with up to `SHOWN` episodes, and the wanted keys.

    The order of tasks is random, fixed, and equal in all sets, so that sets can be compared. If successes and other
    episodes occur, both are shown. If whole tasks have at most half of `SHOWN` episodes, the next task is cut.
    """
    if len(episodes) <= SHOWN:
        return list(episodes)
    order = sorted(episodes, key=lambda one: (_shuffled(one.task), one.sample))
    ends = (end for end in range(SHOWN, SHOWN // 2, -1) if order[end - 1].task != order[end].task)
    cut = next(ends, SHOWN)
    shown, rest = order[:cut], order[cut:]
    if len({one.success for one in shown}) == 1:
        shown[-1] = next((one for one in rest if one.success != shown[0].success), shown[-1])
    keys = {one.key for one in shown} | set(wanted)
    return [one for one in episodes if one.key in keys]


def _shown_pairs(pairs: Sequence[PreferencePair]) -> list[int]:
    """Return the indices of the shown pairs, in the order of tasks of `_chosen`."""
    order = sorted(range(len(pairs)), key=lambda index: _shuffled(pairs[index].chosen.task.id))
    return sorted(order[:SHOWN])


def _shuffled(task: str) -> bytes:
    """Return the sort key of a task in a fixed random order of tasks."""
    return hashlib.sha256(task.encode("utf-8", "surrogatepass")).digest()


def _number(numbers: dict[str, int], value: str) -> int:
    """Return the number of a value. Values are numbered in the order of their first use."""
    return numbers.setdefault(value, len(numbers))


def _prompts_of(one: Mapping[str, Any]) -> set[int]:
    """Return the numbers of the prompts that an episode uses."""
    return {one["prompt"], *one.get("openings", {}).values()}


def _with_own(one: dict[str, Any], prompts: Sequence[str], users: Mapping[int, int]) -> dict[str, Any]:
    """Return an episode together with the prompts that no other episode uses."""
    own = {number: json.loads(prompts[number]) for number in _prompts_of(one) if users[number] == 1}
    return one | {"prompts": own} if own else one


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
