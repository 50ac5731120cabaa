"""Read the contents of a run folder for the report. A missing file is noted, and is not an error."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any

from perturn.analysis.episode_numbers import EpisodeNumbers, numbers_of, read_numbers
from perturn.analysis.iteration_table import Iteration, is_explored, joined_metrics, read_iterations
from perturn.config.parsing import build_entry
from perturn.config.row_maker_settings import ROWS, Kind, RowTraits
from perturn.data.file_seals import read_manifest, refuse_damage
from perturn.data.group_account import CreditRow, read_credits
from perturn.data.run_files import (
    Confidences,
    Loss,
    Metrics,
    Reference,
    Stamp,
    parse_settings,
    read_note,
    read_notes,
    read_sides,
)
from perturn.data.run_paths import RunPaths, checkpoint_of, is_evaluated
from perturn.data.store import read_pairs, read_trajectories
from perturn.errors import ConfigError, RunError
from perturn.io.read_input import read_text
from perturn.types import PreferencePair, Trajectory

Row = dict[str, Any]
"""One line of a metrics file."""
_LEFT_OUT = "Its episodes so far are mostly short, and are left out of all numbers."
_PARTIAL = "Its numbers are of what it has written so far."


@dataclass(frozen=True)
class RecordedRun:
    """Contents of a run folder. Files that a summary does not need are read at the first use."""

    paths: RunPaths
    recipe: str | None
    settings: Mapping[str, Any]
    """Settings of the recipe."""
    manifest: Mapping[str, Any]
    protocol: Mapping[str, Any] | None
    scored: dict[str, list[EpisodeNumbers]]
    """Evaluated episodes of each policy: `base`, `sft`, then the aligned policies in order."""
    mark: str
    """End of the file names, such as `-003`, of the iteration whose episodes, pairs and credits are shown."""
    iterations: Sequence[Iteration]
    """Numbers of all iterations."""

    @cached_property
    def evaluation(self) -> dict[str, list[EpisodeNumbers]]:
        """Episodes of each policy whose evaluation is finished, in the order of `scored`."""
        return {policy: rows for policy, rows in self.scored.items() if policy not in self.unfinished}

    @cached_property
    def unfinished(self) -> dict[str, str]:
        """A sentence on each evaluation that is not finished, by policy. Its first episodes are mostly solved."""
        protocol = self.protocol or {}
        of = f" of {protocol['n'] * protocol.get('samples', 1)}" if "n" in protocol else ""
        return {
            policy: f"The evaluation of {policy} is not finished ({len(rows)}{of} episodes) and is left out of all "
            f"numbers. {self._again}"
            for policy, rows in self.scored.items()
            if not is_evaluated(self.stages, policy)
        }

    @property
    def _again(self) -> str:
        return f"If no process works on it, `perturn run {quote(str(self.paths.folder))}` goes on from there."

    def _open_stages(self) -> list[str]:
        """Return a note on each stage that is not finished, except evaluations in `unfinished`."""
        noted = {f"evaluate-{policy}" for policy in self.unfinished}
        names = [name for name, one in self.stages.items() if not one.get("done", True) and name not in noted]
        return [
            f"The stage {name} is not finished. "
            f"{_LEFT_OUT if name.startswith(('explore', 'evaluate')) else _PARTIAL} {self._again}"
            for name in names
        ]

    @cached_property
    def expert(self) -> list[EpisodeNumbers]:
        """Expert episodes."""
        return read_numbers(self.paths.trajectories("expert"))

    @cached_property
    def explored(self) -> list[Trajectory]:
        """Explored episodes, sorted by key."""
        return read_sorted(self.explored_file)

    @cached_property
    def explored_numbers(self) -> list[EpisodeNumbers]:
        """Numbers of the explored episodes, in the order of `explored`."""
        return [numbers_of(one) for one in self.explored]

    @cached_property
    def pairs(self) -> list[PreferencePair]:
        """Preference pairs."""
        file = self.paths.pairs(self.mark)
        return read_pairs(file) if file.is_file() else []

    @property
    def confidence(self) -> list[Row]:
        """One row for each pair; empty if the file is missing or does not match the pairs."""
        return self._confidence[0]

    @cached_property
    def _confidence(self) -> tuple[list[Row], list[str]]:
        return _read_confidence(self.paths, self.mark, len(self.pairs))

    def reference(self, pairs: Collection[int]) -> Mapping[int, Row]:
        """Return the reference log-probabilities of the tokens of some pairs, by index.

        The result is empty if the file is missing or does not match the pairs.
        """
        found = read_sides(self.paths.reference(self.mark), Reference, only=frozenset(pairs))
        return {index: found[index] for index in pairs} if len(found) == len(self.pairs) else {}

    @cached_property
    def base(self) -> list[Row]:
        """Metrics of the training of the base."""
        return read_notes(self.paths.metrics("base"), Metrics)

    @cached_property
    def sft(self) -> list[Row]:
        """Metrics of SFT."""
        return read_notes(self.paths.metrics("sft"), Metrics)

    @cached_property
    def align(self) -> list[Row]:
        """Metrics of the alignment, of all iterations."""
        metrics = self.paths.metrics(f"align{self.mark}")
        return joined_metrics(self.iterations) or read_notes(metrics, Metrics)

    @cached_property
    def loss(self) -> Mapping[str, Any]:
        """Settings of the alignment's loss, including defaults."""
        return read_note(self.paths.loss(self.mark), Loss) or {}

    @property
    def pivot(self) -> float | None:
        """Confidence above which a turn gets the low weight, from the recipe or the loss."""
        return _pivot(self.settings, self.loss)

    @cached_property
    def texts(self) -> Mapping[str, str]:
        """Text of each token id that occurs in the run."""
        return read_note(self.paths.tokens, dict[str, str]) or {}

    @property
    def credits(self) -> Mapping[str, list[CreditRow]]:
        """Rows of each credit for the explored episodes, by the credit's name. The run's own credit is first."""
        return self._credits[0]

    @cached_property
    def _credits(self) -> tuple[dict[str, list[CreditRow]], list[str]]:
        return _read_credits(self.paths, self.mark, self.explored, self.manifest["files"])

    @cached_property
    def notes(self) -> list[str]:
        """Notes on missing files and contradictions, one sentence each."""
        missing = _missing(self.paths, self.mark, self.scored, self.settings)
        misfits = [*self.unfinished.values(), *self._open_stages(), *self._confidence[1], *self._credits[1]]
        return [*_mark_notes(self.mark), *missing, *misfits, *_task_list_notes(self.evaluation)]

    @property
    def stages(self) -> Mapping[str, Mapping[str, Any]]:
        """Seconds, peak memory and counts of each stage."""
        stages: Mapping[str, Mapping[str, Any]] = self.manifest["stages"]
        return stages

    @property
    def is_explored(self) -> bool:
        """Whether the exploration of the shown episodes is finished."""
        return is_explored(self.stages, self.mark)

    @property
    def over(self) -> list[EpisodeNumbers]:
        """Finished episodes of a finished exploration.

        The success and some signals of an unfinished episode are not known yet.
        """
        if not self.is_explored:
            return []
        return [one for one in self.explored_numbers if not one.unfinished]

    @property
    def explored_file(self) -> Path:
        """File of the shown explored episodes."""
        return self.paths.trajectories(f"explore{self.mark}")

    @property
    def compared(self) -> tuple[str, str] | None:
        """The last aligned policy, and `sft` (or `base` in a recipe without SFT); None if either was not evaluated."""
        last = aligned_policy(self.evaluation)
        start = "base" if self.settings.get("sft", "") is None else "sft"
        return (last, start) if last is not None and start in self.evaluation else None

    def evaluated(self, policy: str) -> str:
        """Return the name of a policy's evaluated episodes in the links of the page."""
        return self.paths.label(self.paths.evaluation(policy))


def read_run(path: Path) -> RecordedRun:
    """Read a run folder.

    Args:
        path: The run folder.

    Returns:
        The contents of the folder, with a note on each missing part.

    Raises:
        RunError: If the folder does not exist or holds no run, or if a file is malformed.
    """
    if not path.is_dir():
        fault = "is no folder" if path.exists() else "does not exist"
        raise RunError(f"run folder {str(path)!r} {fault}. Give the folder that `perturn run` made.")
    paths = RunPaths(path)
    listed = paths.evaluated(())  # before the manifest, which would lack an evaluation that begins later
    manifest = read_manifest(path)
    files: Mapping[str, Mapping[str, Any]] = manifest["files"]
    finished = {file: one for file, one in files.items() if one["stage"] and not checkpoint_of(file)}
    refuse_damage(path, finished)  # shared files and files of a running stage are not checked
    stages = manifest["stages"]
    files_of = {policy: file for policy, file in paths.evaluated(stages).items() if policy in listed}
    scored = {policy: rows for policy, file in files_of.items() if (rows := read_numbers(file))}
    mark = _shown(paths)
    recipe = read_text(paths.recipe, RunError) if paths.recipe.is_file() else None
    settings = parse_settings(recipe or "", str(paths.recipe))
    _missing(paths, mark, scored, settings)  # rejects a folder that holds nothing of a run
    return RecordedRun(
        paths=paths,
        recipe=recipe,
        settings=settings,
        manifest=manifest,
        protocol=read_note(paths.stamp, Stamp),
        scored=scored,
        mark=mark,
        iterations=read_iterations(paths, stages),
    )


def _read_confidence(paths: RunPaths, mark: str, pairs: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the confidence and weight of each pair's turns; a note if their number does not match."""
    file = paths.confidence(mark)
    found = read_sides(file, Confidences)
    if not found or len(found) == pairs:
        return found, []
    return [], [
        f"{paths.name(file)} has {len(found)} rows and {paths.pairs(mark).name} {pairs}; confidences are left out. Run "
        "the alignment again to write them anew."
    ]


def _shown(paths: RunPaths) -> str:
    """Return the end of an iteration's file names: the newest with pairs or a credit, or else the newest iteration."""
    marks = paths.marks
    return next(
        (mark for mark in reversed(marks) if paths.pairs(mark).exists() or paths.credits(mark)), marks[-1]
    )


def _read_credits(
    paths: RunPaths, mark: str, explored: Sequence[Trajectory], sealed: Mapping[str, Any]
) -> tuple[dict[str, list[CreditRow]], list[str]]:
    """Return the credits of the explored episodes, and a note on each credit that belongs to other episodes.

    The run's own credit comes first. Rows of branches are left out.
    """
    turns = {one.key: len(one.turns) for one in explored}
    found = {name: (file, read_credits(file)) for name, file in paths.credits(mark).items()}
    branches = read_sorted(paths.trajectories(f"branch{mark}")) if found else []
    most = turns | {one.key: len(one.turns) for one in branches}
    weighed = {name: {row.key: len(row.weight) for row in rows} for name, (_, rows) in found.items()}
    fitting = {name: turns.items() <= its.items() <= most.items() for name, its in weighed.items()}
    notes = [
        f"{paths.name(file)} is not of the explored episodes and is left out. Give the credit again: perturn credit."
        for name, (file, _) in found.items()
        if not fitting[name]
    ]
    own_first = sorted(found, key=lambda name: paths.name(found[name][0]) not in sealed)
    return {
        name: [row for row in found[name][1] if row.key in turns] for name in own_first if fitting[name]
    }, notes


def aligned_policy(evaluation: Iterable[str]) -> str | None:
    """Return the last evaluated policy other than `base` and `sft`; None if there is none."""
    aligned = [name for name in evaluation if name not in ("base", "sft")]
    return aligned[-1] if aligned else None


def _row_traits(rows: Any, paths: RunPaths, mark: str) -> RowTraits:
    """Return the traits of a run's row maker.

    The traits of a user's own entry are guessed from the run's files. Its code may be gone or untrusted, and is not
    imported.
    """
    if not isinstance(rows, Mapping):
        return RowTraits("pairs", expert=True)
    with suppress(ConfigError):
        if ":" not in str(rows.get("name")):
            found: RowTraits = build_entry(ROWS, rows, "rows").traits
            return found
    makes: Kind = "pairs" if paths.pairs(mark).exists() else "groups"
    return RowTraits(makes, expert=paths.trajectories("expert").exists())


def _missing(
    paths: RunPaths, mark: str, evaluation: Collection[str], settings: Mapping[str, Any]
) -> list[str]:
    """Return notes on the missing parts of a run, except parts whose sections the recipe leaves out."""
    expected = {
        paths.recipe: ("recipe",),
        paths.manifest: ("versions, counts and cost",),
        paths.trajectories("expert"): ("expert trajectories", "expert", "sft", "rows"),
        paths.trajectories(f"explore{mark}"): ("explored trajectories", "explore"),
        paths.pairs(mark): ("preference pairs", "rows"),
        paths.metrics("sft"): ("training curves of SFT", "sft"),
        paths.metrics(f"align{mark}"): ("training curves of the alignment", "align"),
        paths.confidence(mark): ("confidence of each turn", "align"),
        paths.evaluation("base"): ("evaluation of the base model", "evaluate"),
        paths.evaluation("sft"): ("evaluation of the SFT policy", "sft"),
        paths.stamp: ("protocol of the evaluation", "evaluate"),
    }
    traits = _row_traits(settings.get("rows"), paths, mark)
    if traits.makes != "pairs":
        del expected[paths.confidence(mark)], expected[paths.pairs(mark)]
    if not traits.expert and settings.get("sft") is None:
        del expected[paths.trajectories("expert")]
    if aligned_policy(evaluation) is None:
        expected[paths.evaluation("<loss>")] = ("evaluation of an aligned policy", "align")
    missing = [file for file in expected if not file.exists() or file.stat().st_size == 0]
    if not evaluation and len(missing) == len(expected):
        raise RunError(f"{str(paths.folder)!r} holds nothing of a run, such as {paths.manifest.name}.")
    return [
        f"This run has no {what} ({paths.name(file)})."
        for file, (what, *sections) in expected.items()
        if file in missing and not (sections and all(settings.get(each, "") is None for each in sections))
    ]


def _mark_notes(mark: str) -> list[str]:
    if not mark:
        return []
    return [f"Explored episodes and pairs are from iteration {int(mark[1:])}; curves and scores are of all."]


def _task_list_notes(evaluation: Mapping[str, list[EpisodeNumbers]]) -> list[str]:
    task_lists = {frozenset(one.task for one in episodes) for episodes in evaluation.values()}
    if len(task_lists) < 2:
        return []
    return ["The policies were not evaluated on the same tasks; only the paired comparison allows for that."]


def read_sorted(path: Path) -> list[Trajectory]:
    """Return trajectories sorted by key, so that resampling does not depend on the order in which episodes ended."""
    return sorted(read_trajectories(path), key=lambda one: one.key) if path.is_file() else []


def _pivot(settings: Mapping[str, Any], loss: Mapping[str, Any]) -> float | None:
    pivot = loss.get("pivot", _find(settings, "pivot"))
    return float(pivot) if isinstance(pivot, int | float) else None


def _find(settings: Any, key: str) -> Any:
    """Return the first value of a key at any depth of the recipe; None if the key does not occur."""
    if not isinstance(settings, Mapping):
        return None
    if key in settings:
        return settings[key]
    return next(
        (value for value in (_find(part, key) for part in settings.values()) if value is not None), None
    )
