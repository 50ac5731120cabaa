"""Read the current state of a run from its folder."""

from __future__ import annotations

import dataclasses
import math
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from statistics import fmean
from typing import Any

import psutil

from perturn.data.episode_outcomes import Outcome, parse_outcome
from perturn.data.run_files import Holder, Manifest, Progress, parse_settings, read_note
from perturn.data.run_folder import HEARTBEAT_SECONDS
from perturn.data.run_paths import begun, is_evaluated
from perturn.errors import RunError
from perturn.io.read_input import read_text
from perturn.watch.alarms import Alarm, Vitals, alarms
from perturn.watch.iteration_view import Iteration, Tail, is_done, look_at_iterations, parse_metrics

_SILENT_SECONDS = 12 * HEARTBEAT_SECONDS
"""Time without a sign of life, in seconds, after which a process on another machine counts as dead."""
_SHOWN = (
    "loss",
    "rewards/margins",
    "rewards/accuracies",
    "log_ratio/chosen",
    "log_ratio/rejected",
    "clamped",
    "clip_share",
    "grad_norm",
)


@dataclass(frozen=True)
class Stage:
    """One stage of a run."""

    name: str
    state: str
    """`done`, `running`, `waiting`, `died`, `failed` or `stopped`."""
    done: int | None = None
    """Number of finished items, which are episodes or optimizer steps."""
    total: int | None = None
    unit: str = ""
    rate: float | None = None
    """Items per second in the running call."""
    seconds: float | None = None
    """Time spent in seconds, including interrupted calls."""
    left: float | None = None
    """Expected time left in seconds, at the current rate."""
    memory_gb: float | None = None


@dataclass(frozen=True)
class Score:
    """Score of a policy so far."""

    policy: str
    n: int
    mean_score: float
    success_rate: float
    failed: int
    drawn: int | None = None
    """Number of played episodes for a best-of-n score, which counts only the best of them; else None."""
    asked: int | None = None
    """Requested number of episodes of the evaluation."""
    unfinished: bool = False
    """Whether the evaluation is not finished. Its first episodes are short and mostly solved."""


@dataclass(frozen=True)
class State:
    """State of a run at one moment."""

    run: str
    state: str
    """`running`, `finished`, `died`, `failed`, `stopped` or `idle`. An idle run has unfinished stages, and no process
    runs it."""
    says: str
    """Description of the state, with the remedy."""
    stages: list[Stage]
    scores: list[Score]
    metrics: dict[str, dict[str, float]]
    """Most informative numbers in the last metrics entry of each training stage."""
    alarms: list[Alarm]
    iterations: list[Iteration] = field(default_factory=list)
    """Iterations that have finished their exploration; empty for a recipe without iterations."""
    planned: int = 1
    """Number of iterations in the recipe."""
    silent: float | None = None
    """Time since the last sign of life in seconds, while a process should be running."""

    @property
    def is_well(self) -> bool:
        """Whether nothing in the state needs attention."""
        return self.state not in ("died", "failed") and not self.alarms

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON data."""
        return dataclasses.asdict(self) | {"is_well": self.is_well}


class Watcher:
    """Repeated reader of a run folder. Each look reads only the added lines."""

    def __init__(self, folder: Path) -> None:
        """Open a run.

        Raises:
            RunError: If the folder holds no run.
        """
        self._paths = begun(folder)
        recipe = self._paths.recipe
        self._recipe = parse_settings(read_text(recipe, RunError), str(recipe))
        self._tails: dict[Path, Tail[Any]] = {}

    def look(self) -> State:
        """Return the current state of the run."""
        manifest = read_note(self._paths.manifest, Manifest) or {}
        progress = read_note(self._paths.progress, Progress) or {}
        done: dict[str, Any] = manifest.get("stages") or {}
        now = self._current(progress) if progress else None
        stages = _stages(done, progress, now)
        scores = {policy: self._rows(file) for policy, file in self._paths.evaluated(done).items()}
        drawn = {policy: self._rows(file) for policy, file in self._paths.all_drawn.items()}
        marks = [mark for mark in reversed(self._paths.marks) if self._paths.metrics(f"align{mark}").exists()]
        logged = {
            stage: self._rows(self._paths.metrics(stage))
            for stage in ("base", "sft", f"align{(marks or [''])[0]}")
        }
        metrics = {stage: list(rows) for stage, rows in logged.items() if rows}
        iterations = self.iterations(done)
        left = _left(stages, progress)
        state, says = _verdict(self._paths.folder, stages, left, now, progress, self._holder())
        return State(
            run=str(self._paths.folder),
            state=state,
            says=says,
            stages=stages,
            scores=[
                self._score(policy, episodes, drawn.get(policy), not is_evaluated(done, policy))
                for policy, episodes in scores.items()
                if episodes
            ],
            metrics={
                stage: {key: rows[-1][key] for key in ("step", *_SHOWN) if key in rows[-1]}
                for stage, rows in metrics.items()
            },
            alarms=alarms(self._vitals(scores, scores | drawn, metrics, done, iterations)),
            iterations=iterations,
            planned=_whole(self._number(1.0, "iterations")),
            silent=self._silence() if now is not None and now.state in ("running", "died") else None,
        )

    def iterations(self, done: Mapping[str, Any]) -> list[Iteration]:
        """Return the iterations that have finished their exploration, from `look_at_iterations`.

        Args:
            done: Stages in the manifest.
        """
        return look_at_iterations(self._paths, done, self._rows)

    def _score(
        self, policy: str, episodes: list[Outcome], drawn: list[Outcome] | None, unfinished: bool
    ) -> Score:
        samples = _whole(self._number(1.0, "evaluate", "select", "samples"))
        return Score(
            policy,
            len(episodes),
            round(fmean(one.score for one in episodes), 4),
            round(fmean(one.success for one in episodes), 4),
            sum(one.failed for one in episodes),
            len(drawn) if drawn is not None else None,
            samples * len({one.task for one in episodes}) if drawn is not None else None,
            unfinished,
        )

    def _silence(self) -> float:
        try:
            return max(0.0, time.time() - self._paths.progress.stat().st_mtime)
        except OSError:
            return 0.0

    def _holder(self) -> tuple[int, bool] | None:
        """Return the id of the process that holds the run folder, and whether it lives; None without a holder."""
        holder = read_note(self._paths.holder, Holder)
        if holder is None:
            return None
        if holder["host"] != platform.node():
            return holder["pid"], self._silence() < _SILENT_SECONDS
        return holder["pid"], _lives(holder["pid"], lambda began: began <= holder["since"] + 1.0)

    def _current(self, progress: Mapping[str, Any]) -> Stage:
        """Return the stage that ran last, from the progress that its process wrote."""
        ended = progress.get("ended")
        state = ended or ("running" if _is_alive(progress, self._silence()) else "died")
        total, since = progress.get("total"), progress.get("counting_since")
        done = len(self._rows(self._paths.folder / progress["file"])) if progress.get("file") else None
        rate = left = None
        if state == "running" and since and done is not None:
            rate = max(0, done - progress.get("done_before", 0)) / max(time.time() - since, 1e-6)
            left = (total - done) / rate if rate and total is not None else None
        if state == "running" and "seconds_left" in progress:  # measured by the run, in turns or tokens
            left = max(0.0, progress["seconds_left"] - (time.time() - progress.get("measured", 0.0)))
        spent = time.time() - progress["began"] if state == "running" else None
        return Stage(
            progress["stage"], state, done, total, progress.get("unit", ""), rate or None, spent, left
        )

    def _rows(self, file: Path) -> list[Any]:
        """Return the current rows of a file of metrics or episodes."""
        logged = file.parent == self._paths.metrics("").parent
        tail: Tail[Any] = Tail(file, parse_metrics if logged else parse_outcome)
        return self._tails.setdefault(file, tail).look()

    def _vitals(
        self,
        scores: dict[str, list[Outcome]],
        played: dict[str, list[Outcome]],
        metrics: dict[str, list[dict[str, float]]],
        done: Mapping[str, Any],
        iterations: list[Iteration],
    ) -> Vitals:
        first, *_, newest = marks if len(marks := self._paths.marks) > 1 else marks * 2
        expert, explored = (
            self._rows(self._paths.trajectories(name)) for name in ("expert", f"explore{newest}")
        )
        groups: dict[str, list[float]] = defaultdict(list)
        if not newest or is_done(done, f"explore{newest}"):  # the first samples to end are similar
            for one in explored:
                if not (one.failed or one.unfinished):
                    groups[one.task].append(one.score)
        sampled = self._number(0.0, "explore", "sampling", "temperature") > 0
        began = self._rows(self._paths.trajectories(f"explore{first}")) if first != newest else []
        surprises = [one.surprise for one in [*began, *explored] if one.surprise is not None]
        spreads = [one.without_spread for one in iterations if one.without_spread]
        return Vitals(
            scores={policy: [one.score for one in episodes] for policy, episodes in scores.items()},
            surprise={"explore": surprises} if sampled else {},
            metrics=metrics,
            groups=list(groups.values()),
            without_spread=spreads[-1] if spreads else None,
            success=[one.success_rate for one in iterations if one.success_rate is not None],
            failed={
                name: [one.failed for one in rows]
                for name, rows in [("expert", expert), *played.items(), ("explore", explored)]
            },
            max_log_ratio=self._number(Vitals.max_log_ratio, "align", "loss", "max_log_ratio"),
        )

    def _number(self, default: float, *keys: str) -> float:
        """Return a number from the recipe, or the default if the recipe lacks it."""
        value: Any = self._recipe
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return float(value) if isinstance(value, int | float) else default


def _whole(value: float) -> int:
    """Return a number of iterations as an integer; 1 if the number is not finite."""
    return int(value) if math.isfinite(value) else 1


def _left(found: list[Stage], progress: Mapping[str, Any]) -> list[str]:
    """Return the unfinished stages: of the last call, and if it has none, of the recipe."""
    names = {stage.name for stage in found}
    left = [stage.name for stage in found if stage.state != "done"]
    return left or [name for name in progress.get("of_recipe") or () if name not in names]


def _stages(done: Mapping[str, Any], progress: Mapping[str, Any], now: Stage | None) -> list[Stage]:
    """Return the stages in the manifest, the running stage, and the stages that the running call has planned."""
    found = {name: _recorded(name, entry) for name, entry in done.items()}
    if now is not None and now.state != "done":
        before = found.pop(now.name, None)
        if before is not None and before.seconds is not None and now.state == "running":
            now = dataclasses.replace(now, seconds=(now.seconds or 0.0) + before.seconds)
        found[now.name] = now
    waiting = [Stage(name, "waiting") for name in progress.get("steps") or () if name not in found]
    return [*found.values(), *waiting]


def _recorded(name: str, entry: Mapping[str, Any]) -> Stage:
    """Convert the entry of a stage in the manifest."""
    counts = entry.get("counts") or {}
    found = counts.get("drawn_episodes", counts.get("episodes"))
    items = found if isinstance(found, int) else None
    return Stage(
        name,
        state="done" if entry.get("done") else "stopped",
        done=items,
        total=items,
        unit="episodes" if "episodes" in counts else "",
        seconds=entry.get("seconds"),
        memory_gb=entry.get("peak_memory_gb"),
    )


def _verdict(
    folder: Path,
    stages: list[Stage],
    left: list[str],
    now: Stage | None,
    progress: Mapping[str, Any],
    holder: tuple[int, bool] | None,
) -> tuple[str, str]:
    """Return the run's state and its description. `left` names the unfinished stages."""
    again = f"`perturn run {quote(str(folder))}` goes on from there."
    if now is not None and now.state != "done":
        pid, error = progress.get("pid"), progress.get("error")
        return now.state, {
            "died": f"died in {now.name}: its process {pid} is gone without a word. {again}",
            "failed": f"failed in {now.name}: {error} After the remedy, {again}",
            "stopped": f"stopped in {now.name} by its user. {again}",
            "running": f"running {now.name}",
        }[now.state]
    if not left and stages:
        return "finished", "finished"
    following = f"next is {left[0]}" if left else "no stage has begun yet"
    if holder is not None and holder[1]:
        return "running", f"between stages; {following}"
    if holder is not None:
        gone = f"its process {holder[0]} is gone without a word"
        return "died", f"died between stages: {gone}; {following}. {again}"
    return "idle", f"nobody works on it; {following}. {again}"


def _is_alive(progress: Mapping[str, Any], silence: float = math.inf) -> bool:
    """Return whether the recorded process still runs. The start time rules out another process with the same id.

    A process on another machine counts as running if its last sign of life is recent.
    """
    if progress.get("host") != platform.node():
        return silence < _SILENT_SECONDS
    began = progress.get("process_started")
    return began is not None and _lives(progress.get("pid"), lambda at: abs(at - float(began)) < 1.0)


def _lives(pid: Any, is_it: Callable[[float], bool]) -> bool:
    """Return whether a local process runs and started at the recorded time. A later process may have the same id."""
    try:
        process = psutil.Process(int(pid))
        alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return alive and is_it(process.create_time())
    except (psutil.Error, TypeError, ValueError):
        return False
