"""Command `import-logs`, which imports logs of model calls and rollouts of other trainers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perturn.cli._base import AsJson, command, results, say_json
from perturn.display.progress_bars import at_work
from perturn.display.progress_bars import console as notices
from perturn.errors import DataError, check_belongs, check_fit, within
from perturn.io.plain_data import error_text
from perturn.io.user_paths import user_path

if TYPE_CHECKING:
    from perturn.episodes.prefix_matching import Cause
    from perturn.formats.logs.log_entries import Decode
    from perturn.rows.group_pairs import GroupPairs
    from perturn.run.log_import.import_logs import LogAccount

_WORDS = {
    "turns": "turns",
    "rollouts": "rollouts",
    "unscored": "of episodes without a score",
    "unpaired": "of episodes in no pair",
    "failed": "that failed",
    "duplicate": "duplicates",
    "no_answer": "without an answer",
    "unsupported": "unsupported",
    "broken": "broken",
    "no_call": "no calls of a model",
    "success": "successes",
    "failure": "failures",
    "no_score": "without a score",
    "used": "used",
    "unmatched": "of no call of the log",
    "unreadable": "that are no numbers",
    "other_names": "of other names",
}
"""Descriptions of the bins into which imported turns, calls and entries are counted."""
_GROUPED = "their trace or messages group them"
"""How entries without a session form episodes."""
_SHOWN = 20
"""Maximum number of kinds of faults that are shown."""


@command(
    "import-logs",
    "calls.jsonl --score feedback --rows labelled",
    "observations.jsonl scores.jsonl --score thumbs --rows pairs --task metadata.task_id",
    "results.jsonl --format verifiers --output theirs.jsonl",
    panel="Prepare",
)
def import_logs(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE [FILE ...]", help="Files or folders of one log."),
    ],
    format_name: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Logs: otel, langsmith, langfuse, requests. Rollouts: verifiers, verl, skyrl, trl, art, "
            "agent-lightning, conversations. Default: recognised from the records.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; default: FILE-ROWS.jsonl.")
    ] = None,
    rows: Annotated[str, typer.Option(help="trajectories, labelled or pairs.")] = "trajectories",
    score: Annotated[
        str | None, typer.Option(help="Name of the score that is the reward, or the path of its field.")
    ] = None,
    success_at: Annotated[
        float | None, typer.Option(help="Lowest score of a success; default: any score above 0.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Score gap that a pair must exceed; default: 0.4.")
    ] = None,
    session: Annotated[
        str | None, typer.Option(help="Path of the field that names the episode, such as metadata.chat.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="Path of the field that names the task; default: the first user message."),
    ] = None,
    keep_unscored: Annotated[
        bool, typer.Option("--keep-unscored", help="Also write episodes without a score.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="Model whose tokenizer decodes token ids.")] = None,
    as_json: AsJson = False,
) -> None:
    """Turn logs of model calls, and other rollouts, into rows."""
    from perturn.formats.logs.log_entries import Fields
    from perturn.run.log_import.import_logs import LogSettings
    from perturn.run.log_import.import_logs import import_logs as bring

    paths = [user_path(file, "path of a log") for file in files]
    stem = paths[0].name.partition(".")[0] or "logs"
    target = Path(f"{stem}-{rows}.jsonl") if output is None else user_path(output, "output")
    logs = [path.resolve() for path in paths]
    check_fit(target.resolve() not in logs, "--output", "be another file than the logs", str(target))
    fields = Fields(session, task, score, None if model is None else _decoder(model))
    check_fit(math.isfinite(success_at or 0), "--success-at", "be a finite number", success_at)
    settings = LogSettings(format_name, rows, fields, success_at, keep_unscored, _pairs(threshold, rows))
    with at_work("reading logs"):
        found = bring(paths, target, settings)
    if as_json:
        say_json({"output": str(target), **found.to_dict()})
        return
    _print_faults(list(found.shown_faults()))
    for line in [*_summary(found), f"{target}: {found.rows} {rows}"]:
        results.print(line, markup=False, soft_wrap=True)


def _pairs(threshold: float | None, rows: str) -> GroupPairs:
    """Return the settings of pairs from the options."""
    from perturn.rows.group_pairs import GroupPairs

    with within("--"):
        pairs = GroupPairs(GroupPairs.threshold if threshold is None else threshold, per_group=None)
    check_belongs({"--threshold": threshold}, rows == "pairs", "--rows pairs", "add it, or leave it out")
    return pairs


def _print_faults(faults: Sequence[str]) -> None:
    """Print the first kinds of faults, and the number of the others."""
    for fault in faults[:_SHOWN]:
        notices.print(fault, markup=False, soft_wrap=True)
    if len(faults) > _SHOWN:
        notices.print(f"{len(faults) - _SHOWN} other kinds of faults; --json lists them", markup=False)


def _decoder(model: str) -> Decode:
    """Return a function that decodes token ids with a model's tokenizer."""
    from perturn.chat.model_names import load_tokenizer

    tokenizer = load_tokenizer(model)

    def decode(ids: Sequence[int], special: bool) -> str:
        try:
            return str(tokenizer.decode(list(ids), skip_special_tokens=not special))
        except (OverflowError, TypeError, IndexError) as error:
            raise DataError(f"{model} cannot decode the token ids: {error_text(error)}.") from error

    return decode


def _summary(found: LogAccount) -> list[str]:
    """Return a line of text for each kind of counted item."""
    from perturn.formats.trl_rows import describe_unread

    lines = [
        f"{found.format}: {_sum(found.calls, 'entries')}",
        _sum(found.episodes, "episodes"),
        f"{found.sequences} sequences of requests{_sum_of_breaks(found.broke)}",
    ]
    if found.score is not None:
        lines.append(f"score {found.score}: {_sum(found.scores, 'scores')}")
    for option, count in found.lacking.items():
        by_task = option == "--task"
        instead = "their session, or else the first user message, names the task" if by_task else _GROUPED
        lines.append(f"{option}: {count} entries lack the field; {instead}")
    if found.replaced_rewards:
        lines.append(
            f"{found.replaced_rewards} rollouts have rewards of turns that do not sum up to the score; their last turn "
            "has the score"
        )
    if found.unread:
        lines.append(describe_unread(found.unread))
    if found.shared_ids:
        lines.append(
            f"{found.shared_ids} calls have the id of another call; a score of such an id is of the first of them"
        )
    return lines


def _sum(bins: Counter[str], unit: str) -> str:
    """Return a total with its bins as text."""
    parts = " + ".join(f"{bins[name]} {words}" for name, words in _WORDS.items() if bins[name])
    return f"{bins.total()} {unit}{f' = {parts}' if parts else ''}"


def _sum_of_breaks(broke: Counter[Cause]) -> str:
    """Return the causes of new sequences within episodes as text; empty if there are none."""
    causes = ", ".join(f"{count} {cause}" for cause, count in broke.most_common())
    return f"; opened within an episode: {causes}" if causes else ""
