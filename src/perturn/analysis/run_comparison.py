"""Compare each further run's last policy with the first run's last policy, if the tasks are equal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from perturn.analysis.run_contents import RecordedRun, read_run
from perturn.analysis.run_summary import compare, comparison_row, has_bounded_scores
from perturn.errors import RunError

_TASK_LIST_KEYS = ("environment", "split", "panel_sha256", "n")
"""Keys of the protocol that must be equal for two scores on the same tasks."""
_FREE = ("seed",)
"""Keys that may differ, so that runs with different seeds can be compared."""


@dataclass(frozen=True)
class Versus:
    """Comparison of the last policies of two runs."""

    a: str
    b: str
    row: dict[str, Any] | None
    """The comparison as JSON data, as the measure returns it; None if the runs cannot be compared."""
    refused: str = ""
    """Reason why the runs cannot be compared."""
    differs: tuple[str, ...] = ()
    """Differences between the protocols of comparable runs, each as `key: theirs, ours`."""
    sides: tuple[str, str] = ("", "")
    """Names of the two compared sets of episodes, as in the links of the page."""


Evaluated = tuple[RecordedRun, str]
"""A run and the name of a policy that it evaluated."""
Measure = Callable[[Evaluated, Evaluated, str, str], dict[str, Any] | None]
"""Function that compares the evaluated episodes of two policies, given the display names of both. It returns JSON data;
None if the policies share no task."""


def by_score(a: Evaluated, b: Evaluated, a_name: str, b_name: str) -> dict[str, Any] | None:
    """Compare the scores of two policies task by task, as `comparison_row` describes."""
    bounded = all(has_bounded_scores(run) for run, _ in (a, b))
    result = compare(*(run.evaluation[policy] for run, policy in (a, b)), bounded=bounded)
    return None if result is None else comparison_row(result, a_name, b_name)


def compare_runs(folders: Sequence[Path], measure: Measure = by_score) -> list[Versus]:
    """Compare each further run's last policy with the first run's last policy; for one run, compare its policies.

    Args:
        folders: Folders of the runs.
        measure: How two policies are compared.

    Raises:
        RunError: If there is no folder, a folder holds no run, a file of it is malformed, or nothing can be compared.
    """
    if not folders:
        raise RunError("no run is named; give the folder of a run before any settings.")
    for index, folder in enumerate(folders):
        if folder.resolve() in [other.resolve() for other in folders[:index]]:
            raise RunError(f"{folder} is named twice; name each run once.")
    runs = [read_run(folder) for folder in folders]
    if len(runs) > 1:
        return against_first(runs, names_of(runs), measure)
    (run,) = runs
    if len(run.evaluation) < 2:
        needs = f"{folders[0]} has scores of {len(run.evaluation)} policies; a comparison needs two."
        raise RunError(" ".join([needs, *run.unfinished.values()]))
    return [_between(later, earlier, run, measure) for earlier, later in combinations(run.scored, 2)]


def _between(a: str, b: str, run: RecordedRun, measure: Measure) -> Versus:
    """Compare two policies of one run."""
    refused = run.unfinished.get(a) or run.unfinished.get(b)
    row = None if refused else measure((run, a), (run, b), a, b)
    return Versus(a, b, row, "" if row else refused or "they share no task.")


def names_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the display name of each run: its folder's name, with a number added where names repeat."""
    names: list[str] = []
    for run in runs:
        name, number = run.paths.folder.resolve().name, 2
        wanted = name
        while wanted in names:
            wanted, number = f"{name}-{number}", number + 1
        names.append(wanted)
    return names


def against_first(
    runs: Sequence[RecordedRun], names: Sequence[str], measure: Measure = by_score
) -> list[Versus]:
    """Compare each further run with the first run.

    Args:
        runs: At least two runs.
        names: Display names of the runs.
        measure: How two policies are compared.

    Returns:
        A comparison for each run after the first. It may carry differences of protocol, or a reason why the runs cannot
        be compared.
    """
    further = zip(runs[1:], names[1:], strict=True)
    return [_versus(run, runs[0], name, names[0], measure) for run, name in further]


def settings_that_differ(runs: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """Return the keys whose values differ between runs, with the value of each run; a dash means no value."""
    keys = dict.fromkeys(key for run in runs for key in run)
    rows = [(key, [run.get(key, "–") for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested settings to dotted keys with values as text."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return found


def _versus(run: RecordedRun, first: RecordedRun, name: str, first_name: str, measure: Measure) -> Versus:
    a, b = _last(run), _last(first)
    labels = (f"{name} / {a}", f"{first_name} / {b}")
    if a is None or b is None:
        missing = name if a is None else first_name
        return Versus(name, first_name, None, f"{missing} has no evaluation.")
    for each, policy, its in ((run, a, name), (first, b, first_name)):
        if policy in each.unfinished:
            return Versus(*labels, None, f"{its}: {each.unfinished[policy]}")
    sides = (f"{name}/{run.evaluated(a)}", f"{first_name}/{first.evaluated(b)}")
    refused, differs = _judge(run, first)
    row = None if refused else measure((run, a), (first, b), *labels)
    if row is None:
        return Versus(*labels, None, refused or "they share no task.", sides=sides)
    return Versus(*labels, row, "", differs, sides)


def _judge(run: RecordedRun, first: RecordedRun) -> tuple[str, tuple[str, ...]]:
    """Return why the scores of two runs cannot be compared, or else the differences of their protocols."""
    ours, theirs = run.protocol, first.protocol
    if ours is None or theirs is None:
        file = run.paths.name(run.paths.stamp)
        return f"a protocol ({file}) is missing, so nothing says whether the tasks are equal.", ()
    differ = [key for key in _TASK_LIST_KEYS if ours.get(key) != theirs.get(key)]
    if differ:
        names = ["task list" if key == "panel_sha256" else key for key in differ]
        return f"the tasks are not the same: {', '.join(names)} differ.", ()
    rows = settings_that_differ([flat(theirs), flat(ours)])
    kept = [(key, values) for key, values in rows if key not in _FREE]
    return "", tuple(f"{key}: {values[0]}, {values[1]}" for key, values in kept)


def _last(run: RecordedRun) -> str | None:
    """Return the last policy of a run with evaluated episodes; None if there is none."""
    return next(reversed(run.scored), None)
