"""Convert logs of model calls to trajectories, labelled rows or pairs, with an account of every log entry."""

from __future__ import annotations

import re
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perturn.config.row_maker_settings import RowInputs
from perturn.data.records import line_of, parse_line
from perturn.data.store import write_records
from perturn.episodes.prefix_matching import Cause
from perturn.errors import DataError, StorageError, check_belongs, check_known, did_you_mean
from perturn.formats.logs.log_entries import Call, Fields, LostEntry, Rollout, Score, Trace, no_score
from perturn.formats.logs.read_logs import format_of, read_log
from perturn.formats.row_sources import Location
from perturn.rows.endings import weighted
from perturn.rows.group_pairs import GroupPairs
from perturn.run.log_import.log_episodes import episode_of, scored, trajectory_of
from perturn.run.log_import.log_spool import LogSpool, can_carry_loss
from perturn.types import Action, Trajectory, failed

FORMS = ("trajectories", "labelled", "pairs")
"""Kinds of rows that can be written."""

_KEPT = 100
"""Largest number of kinds of faults that are kept for messages."""
_VARIES = re.compile(r"'[^']*'|\d+|\(.*")
"""Parts of a fault's message that differ between entries with the same kind of fault."""


@dataclass
class LogAccount:
    """Account of all log entries. Each entry is counted in exactly one category."""

    format: str = ""
    score: str | None = None
    """Name of the score that is used as the reward. None: the log has no score."""
    calls: Counter[str] = field(default_factory=Counter)
    """Number of entries by category. `turns` and `rollouts` are in the rows. `unscored`, `unpaired`, `failed`,
    `duplicate`, `no_answer`, `unsupported`, `broken` and `no_call` are not."""
    episodes: Counter[str] = field(default_factory=Counter)
    """Number of episodes by category. `success`, `failure` and `no_score` are written; `unscored`, `unpaired` and
    `failed` are not."""
    scores: Counter[str] = field(default_factory=Counter)
    """Number of scores by category: `used`, `other_names`, `unmatched` and `unreadable`."""
    lacking: dict[str, int] = field(default_factory=dict)
    """Option, `--task` or `--session`, with the number of entries that lack the field that it names."""
    sequences: int = 0
    """Number of sequences of all episodes."""
    broke: Counter[Cause] = field(default_factory=Counter)
    """Number of requests that opened another sequence of their episode, by cause."""
    faults: dict[str, tuple[str, str, int]] = field(default_factory=dict)
    """For each kind of fault: the category of its entries, the first message with its position, and the number of
    entries."""
    shared_ids: int = 0
    """Number of calls that share their id with a call of other content."""
    unread: Counter[str] = field(default_factory=Counter)
    """Number of rollouts by ignored key of their records."""
    replaced_rewards: int = 0
    """Number of rollouts whose turn rewards do not sum to the score, so that the last turn gets the score."""
    rows: int = 0
    """Number of rows that were written."""

    @property
    def entries(self) -> int:
        """Number of all entries."""
        return self.calls.total()

    def shown_faults(self) -> Iterator[str]:
        """Yield a line for each reason to leave entries out, with the first example and the number of entries."""
        for why, said, count in self.faults.values():
            yield f"{why}: {said}{f' (and {count - 1} more)' if count > 1 else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Return the account as JSON data."""
        counts = {name: dict(getattr(self, name)) for name in ("calls", "episodes", "scores")}
        broke = {str(cause): count for cause, count in self.broke.items()}
        reported = {"format": self.format, "score": self.score, "entries": self.entries, "rows": self.rows}
        return {
            **reported,
            **counts,
            "sequences": self.sequences,
            "replaced_rewards": self.replaced_rewards,
            "lacking": self.lacking,
            "unread": dict(self.unread),
            "broke": broke,
            "faults": list(self.shown_faults()),
        }


@dataclass(frozen=True)
class LogSettings:
    """Settings for reading a log and writing its rows."""

    format: str | None = None
    """Name of the log's format. None: it is detected from the records."""
    form: str = "trajectories"
    """Kind of rows to write, one of `FORMS`."""
    fields: Fields = field(default_factory=Fields)
    """Names of the records' fields that hold the session, the task or the score."""
    success_at: float | None = None
    """Smallest score of a success. None: any score above 0."""
    keeps_unscored: bool = False
    """Whether to also write episodes without a score, as failures with a reward of 0."""
    pairs: GroupPairs = field(default_factory=lambda: GroupPairs(per_group=None))
    """Settings for pairing the episodes of a task."""

    def __post_init__(self) -> None:
        check_known(self.form, FORMS, f"unknown kind of rows {self.form!r}")
        remedy = f"leave it out, since {self.form} need the label that a score gives"
        unscored = {"--keep-unscored": self.keeps_unscored}
        check_belongs(unscored, self.form == "trajectories", "--rows trajectories", remedy)


def import_logs(files: Sequence[Location], output: Path, settings: LogSettings | None = None) -> LogAccount:
    """Write the episodes of logs as training rows, and return an account of every entry.

    The logs may have any size, since calls are sorted in a temporary file next to the output.

    Args:
        files: Files or folders, which are read as one log.
        output: File of JSON lines to write. An existing file is replaced.
        settings: Settings for reading the log and writing the rows.

    Raises:
        DataError: If a file cannot be read or is not a log, if several scores could be the reward, or if no row can be
            written.
        StorageError: If the disk is full.
    """
    settings = settings or LogSettings()
    account = LogAccount()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".import-logs-") as folder:
        spool = LogSpool(Path(folder) / "calls.db")
        try:
            _fill(spool, files, settings, account)
            _assemble(spool, settings, account)
            if not account.episodes:
                raise DataError(f"{_names(files)} holds no call with an answer.{_why(account)}")
            rows = _rows(spool, settings, account)
            account.rows = write_records(output, _some(rows, lambda: _nothing(settings, account)))
        except sqlite3.Error as error:
            raise StorageError(
                f"{folder}: the calls cannot be sorted there: {error}. Make room on the disk."
            ) from error
        finally:
            spool.close()
    return account


def _fill(spool: LogSpool, files: Sequence[Location], settings: LogSettings, account: LogAccount) -> None:
    """Read the entries of all files into the database."""
    found = [(file, format_of(file, settings.format)) for file in files]
    formats = [(file, name) for file, name in found if name is not None]
    account.format = " + ".join(dict.fromkeys(name for _, name in formats))
    counted: Counter[str | None] = Counter()
    for file, format_name in formats:
        for entry in read_log(file, format_name, settings.fields):
            match entry:
                case Call():
                    _add_call(spool, entry, account)
                    counted.update(_lacking(settings.fields, entry.task, entry.session))
                case Rollout():
                    _add_rollout(spool, entry, f"log-{format_name}", account)
                    counted.update(_lacking(settings.fields, entry.task))
                    counted["rollouts"] += 1
                case Score():
                    spool.add_score(entry)
                case Trace():
                    spool.add_trace(entry)
                case LostEntry():
                    _lose(account, entry.why, entry.where, entry.reason)
    _check_fields(settings.fields, counted, account)
    spool.sort()
    account.shared_ids = spool.shared_ids


def _lacking(fields: Fields, task: str | None, session: str | None = "") -> Iterator[str | None]:
    """Yield None for an entry, and each option that names a field which the entry lacks."""
    yield None
    if fields.task is not None and task is None:
        yield "--task"
    if fields.session is not None and session is None:
        yield "--session"


def _check_fields(fields: Fields, counted: Counter[str | None], account: LogAccount) -> None:
    """Record how many entries lack a field that the user names.

    Raises:
        DataError: If all entries lack it, or if a session is named and each record is a whole episode.
    """
    if fields.session is not None and counted[None] and counted["rollouts"] == counted[None]:
        raise DataError(
            f"--session has no effect on {account.format}, since each record is a whole episode. Leave it out."
        )
    for option, path in (("--task", fields.task), ("--session", fields.session)):
        if not counted[option]:
            continue
        if counted[option] == counted[None]:
            raise DataError(
                f"{option}: no call or rollout of the log has a text or whole number at {path!r}. Give the path from "
                "the record, such as metadata.task_id."
            )
        account.lacking[option] = counted[option]


def _add_call(spool: LogSpool, call: Call, account: LogAccount) -> None:
    """Add a call to the database, or count the reason to leave it out."""
    try:
        if not spool.add_call(call):
            _lose(account, "duplicate", call.where, "the log has a call with its id and content before.")
            return
    except DataError as error:
        _lose(account, "unsupported", call.where, str(error))
        return
    _tell_faults(call, [call.answer], account)
    _tell(account, "note", call.where, call.note)


def _add_rollout(spool: LogSpool, rollout: Rollout, environment: str, account: LogAccount) -> None:
    """Add a whole rollout to the database, or count the reason to leave it out."""
    try:
        trajectory, found = trajectory_of(rollout, environment)
        spool.add_rollout(line_of(trajectory), rollout.scores, rollout.success)
    except DataError as error:
        _lose(account, "unsupported", rollout.where, str(error))
        return
    account.sequences += found.sequences
    account.broke += found.broke
    account.unread.update(rollout.unread)
    _tell_faults(rollout, [step.answer for step in rollout.steps], account)


def _tell_faults(entry: Call | Rollout, answers: Sequence[Action], account: LogAccount) -> None:
    """Record the scores of an entry that are no numbers, and its tool calls that cannot be read."""
    for one in entry.scores:
        if one.value is None:
            _tell(account, "score", entry.where, no_score(one))
    if not all(map(can_carry_loss, answers)):
        said = "a tool call without valid arguments, an object or its JSON text, is stored as text."
        _tell(account, "without loss", entry.where, said)


def _lose(account: LogAccount, why: str, where: str, reason: str) -> None:
    """Count an entry that is left out, with the reason."""
    account.calls[why] += 1
    _tell(account, why, where, reason)


def _tell(account: LogAccount, why: str, where: str, reason: str) -> None:
    """Record a fault of an entry, or a remark on it; do nothing if the reason is empty."""
    said = reason.removeprefix(f"{where}: ").removeprefix("row: ")
    kind = _VARIES.sub("", f"{why}: {said}")
    if reason and (kind in account.faults or len(account.faults) < _KEPT):
        _, first, count = account.faults.get(kind, (why, f"{where}: {said}", 0))
        account.faults[kind] = (why, first, count + 1)


def _assemble(spool: LogSpool, settings: LogSettings, account: LogAccount) -> None:
    """Assemble the trajectories of all episodes and add them to the database."""
    account.score = _score(spool, settings, account)
    for calls in spool.by_episode(account.score):
        episode = episode_of(calls, f"log-{account.format.replace(' + ', '-')}", settings.success_at)
        account.sequences += episode.sequences
        account.broke += episode.broke
        if not episode.is_scored and account.score is not None and not settings.keeps_unscored:
            account.calls["unscored"] += len(calls)
            account.episodes["unscored"] += 1
            continue
        ended = "success" if episode.trajectory.success else "failure" if episode.is_scored else "no_score"
        account.calls["turns"] += len(calls)
        account.episodes[ended] += 1
        spool.add_episode(calls[0].n, episode.trajectory, len(calls))
    for n, line, value, success in spool.rollouts(account.score):
        one = parse_line(Trajectory, line, "rollout")
        why = _left_out(one, value, settings, account)
        if why is not None:
            account.calls[why] += 1
            account.episodes[why] += 1
            continue
        one, replaced = scored(one, value, settings.success_at, success)
        account.replaced_rewards += replaced
        account.calls["rollouts"] += 1
        is_scored = value is not None or failed(one)
        account.episodes["success" if one.success else "failure" if is_scored else "no_score"] += 1
        spool.add_episode(n, one, 0)


def _left_out(one: Trajectory, value: float | None, settings: LogSettings, account: LogAccount) -> str | None:
    """Return the category of a rollout that gives no row; None if it gives a row.

    A FAILED rollout counts in its group, but is not trained on.
    """
    if failed(one):
        return None if settings.form == "trajectories" else "failed"
    if value is None and account.score is not None and not settings.keeps_unscored:
        return "unscored"
    return None


def _score(spool: LogSpool, settings: LogSettings, account: LogAccount) -> str | None:
    """Return the name of the score that is the reward: the named score, or the only score of the log."""
    names = spool.score_names()
    named = settings.fields.score
    if named is None and len(names) > 1:
        raise DataError(f"the log has the scores {', '.join(sorted(names))}. Name one with --score.")
    chosen = named or next(iter(names), None)
    if named is not None and named not in names:
        known = did_you_mean(named, names) if names else " The log has no score."
        raise DataError(f"no score of the log is named {named!r}.{known}")
    if chosen is None and settings.form != "trajectories":
        raise DataError(
            f"the log has no score, and {settings.form} rows need one. Name the field of a record that holds it with "
            "--score, or write trajectories."
        )
    unmatched, unreadable = spool.unmatched(chosen), spool.unreadable(chosen)
    found = names[chosen] if chosen is not None else 0
    used, others = found - unmatched - unreadable, names.total() - found
    account.scores.update(
        {"used": used, "unmatched": unmatched, "unreadable": unreadable, "other_names": others}
    )
    return chosen


def _rows(spool: LogSpool, settings: LogSettings, account: LogAccount) -> Iterator[Any]:
    """Yield the rows, task by task. The episodes of a task are numbered as its samples."""
    for policy, held in spool.by_task():
        calls = [count for count, _ in held]
        read = (parse_line(Trajectory, line, "episode") for _, line in held)
        episodes = (replace(one, sample=n, policy=one.policy or policy) for n, one in enumerate(read))
        if settings.form == "trajectories":
            yield from episodes
        elif settings.form == "labelled":
            yield from (weighted(one, 1.0 if one.success else -1.0) for one in episodes)
        else:
            yield from _pairs(list(episodes), calls, settings, account)


def _pairs(
    group: Sequence[Trajectory], calls: Sequence[int], settings: LogSettings, account: LogAccount
) -> Sequence[Any]:
    """Return the pairs of a task's episodes, and count the episodes that are in no pair."""
    pairs = settings.pairs(RowInputs(explored=group)).rows
    paired = {side.key for pair in pairs for side in (pair.chosen, pair.rejected)}
    for one in (each for each in group if each.key not in paired):
        of_calls = calls[one.sample]
        name, count = ("turns", of_calls) if of_calls else ("rollouts", 1)
        account.calls.update({"unpaired": count, name: -count})
        account.episodes.update({"unpaired": 1, "success" if one.success else "failure": -1})
    return pairs


def _some(rows: Iterator[Any], nothing: Any) -> Iterator[Any]:
    """Yield the rows, and check that there is at least one.

    Raises:
        DataError: If there is no row.
    """
    is_empty = True
    for row in rows:
        is_empty = False
        yield row
    if is_empty:
        raise DataError(nothing())


def _nothing(settings: LogSettings, account: LogAccount) -> str:
    """Return the message that says why no row can be written."""
    if settings.form == "pairs" and account.episodes["unpaired"]:
        return (
            f"no two of the {account.episodes['unpaired']} episodes with a score are of one task and differ by more "
            f"than {settings.pairs.threshold:g}. Name the field of a record that holds the task with --task, or write "
            "labelled rows, which need no pairs."
        )
    episodes, scores = account.episodes["unscored"], account.scores["unmatched"]
    if count := account.scores["unreadable"]:
        first = next((said for why, said, _ in account.faults.values() if why == "score"), "")
        return f"none of the {episodes} episodes has the score {account.score!r}; {count} values are no scores. {first}"
    return (
        f"none of the {episodes} episodes has the score {account.score!r}; {scores} scores are of no call of the log. "
        "Give the files of calls and of scores together."
    )


def _why(account: LogAccount) -> str:
    """Return the number of left-out entries by category, and the first reason."""
    found = ", ".join(f"{count} {name}" for name, count in account.calls.items())
    first = next(iter(account.shown_faults()), "")
    return f" Its entries: {found}. {first}" if found else ""


def _names(files: Sequence[Location]) -> str:
    return ", ".join(map(str, files))
