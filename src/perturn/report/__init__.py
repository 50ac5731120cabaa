"""The report: `summary.json` and one self-contained `report.html`, made from the run folder alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from perturn.analysis.run_contents import read_run
from perturn.analysis.run_summary import summary_of
from perturn.data.run_paths import RunPaths
from perturn.io.atomic_write import write_whole
from perturn.table import locate


def summarize(run: Path) -> dict[str, Any]:
    """Return the numbers of a run, as `summary.json` holds them.

    A trajectory that FAILED counts with score 0 and as a failure; `failed` counts them. An end of an interval that the
    data cannot give is None.

    Args:
        run: The run folder.

    Returns: `policies`; `comparison` (the last policy against `sft`, or against `base` where the recipe has no SFT, or
        None); `by_kind` (kind, then policy); `protocol` (or None); `seconds` of all stages; and `iterations`, an object
        each, as `report.iterations.iteration_rows` and docs/report.md describe.

    Raises:
        RunError: The folder does not exist, holds nothing of a run, or a file of it is malformed.
        DataError: A trajectory or pair in it is malformed.
    """
    return summary_of(read_run(run))


def write_report(run: Path, *others: Path, output: Path | None = None) -> Path:
    """Write `summary.json` of each run, and one page of all of them, each file whole or not at all.

    Args:
        run: The run folder.
        others: Further runs, shown next to the first and compared with it; a folder that is named twice counts once.
        output: The page; None: `report.html` in the folder, or next to it where there are several runs.

    Returns:
        The path of the page.
    """
    named: dict[Path, Path] = {}
    for path in (run, *others):
        named.setdefault(path.resolve(), path)
    paths = list(named.values())
    runs = [read_run(path) for path in paths]
    summaries = [summary_of(each) for each in runs]
    html = locate("perturn.report.report_page:page")(
        runs, summaries
    )  # a score is summarized without the page's figures
    for path, summary in zip(paths, summaries, strict=True):
        text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        write_whole(RunPaths(path).summary, text)
    target = output or _page_path(paths)
    write_whole(target, html, errors="backslashreplace")
    return target


def _page_path(paths: list[Path]) -> Path:
    """Return the default place of the page."""
    if len(paths) == 1:
        return RunPaths(paths[0]).page
    return paths[0].resolve().parent / f"report-{'-'.join(path.resolve().name for path in paths)}.html"
