"""Write the report of a run, `summary.json` and a self-contained `report.html`, from the files in the run folder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from perturn.analysis.run_contents import read_run
from perturn.analysis.run_summary import summary_of
from perturn.data.run_paths import RunPaths
from perturn.errors import StorageError
from perturn.io.atomic_write import write_whole
from perturn.table import locate

_LONGEST = 200
"""Maximum length of the names of runs in the name of a page, in bytes."""
_log = logging.getLogger(__name__)


def summarize(run: Path) -> dict[str, Any]:
    """Return the numbers of a run in the format of `summary.json`.

    A FAILED trajectory has score 0 and no success, and is counted under `failed`. An interval end that the data do not
    determine is None.

    Args:
        run: The run folder.

    Returns: `policies`; `comparison` (the last policy against `sft`, or against `base` in a recipe without SFT; None if
        either is missing); `by_kind` (scores by kind of task, then by policy); `protocol` (or None); `seconds` of all
        stages; and `iterations` (one object for each iteration, described in docs/report.md).

    Raises:
        RunError: If the folder does not exist or holds no run, or if a file is malformed.
        DataError: If a trajectory or pair is malformed.
    """
    return summary_of(read_run(run))


def write_report(run: Path, *others: Path, output: Path | None = None) -> Path:
    """Write `summary.json` of each run and one page of all runs. Each file is replaced atomically.

    Args:
        run: The run folder.
        others: Further runs, which are shown next to the first run and compared with it. Repeated folders are ignored.
        output: Path of the page. If None, it is `report.html` in the run folder, or for several runs a file next to the
            first folder. If a path is given, a run folder may be read-only: its `summary.json` is then left out with a
            warning.

    Returns:
        The path of the page.

    Raises:
        StorageError: If the page cannot be written, or a summary although no `output` is given.
    """
    named: dict[Path, Path] = {}
    for path in (run, *others):
        named.setdefault(path.resolve(), path)
    paths = list(named.values())
    runs = [read_run(path) for path in paths]
    summaries = [summary_of(each) for each in runs]
    for path, summary in zip(paths, summaries, strict=True):  # first, since the page may fail or take long
        text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            write_whole(RunPaths(path).summary, text)
        except StorageError as error:
            if output is None:
                raise
            _log.warning(
                "%s was not written (%s); the page does not need it.", RunPaths(path).summary, error.__cause__
            )
    html = locate("perturn.report.report_page:page")(
        runs, summaries
    )  # imported late: a score needs no figures
    target = output or _page_path(paths)
    write_whole(target, html, errors="backslashreplace")
    return target


def _page_path(paths: list[Path]) -> Path:
    """Return the default path of the page."""
    if len(paths) == 1:
        return RunPaths(paths[0]).page
    names = [path.resolve().name for path in paths]
    joined = "-".join(names)
    if len(raw := os.fsencode(joined)) > _LONGEST:
        digest = hashlib.sha256(raw).hexdigest()[:8]
        first = names[0][:30]  # a character has up to 4 bytes
        joined = f"{first}-and-{len(names) - 1}-others-{digest}"
    return paths[0].resolve().parent / f"report-{joined}.html"
