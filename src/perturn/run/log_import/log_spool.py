"""Store a log's calls in a database, so that a log of any size can be sorted by episode in little memory."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from perturn.data.records import line_of
from perturn.episodes.prefix_matching import Sequences, in_call_order, is_broken
from perturn.errors import DataError
from perturn.formats.logs.log_entries import Call, Score, Trace
from perturn.io.plain_data import fault, mended
from perturn.types import Action, Message, Trajectory, failed

_TABLES = """
create table calls (n integer primary key, episode text, session text, trace text, time real, digest blob, data text);
create table ids (id text primary key, n integer) without rowid;
create table scores (name text, value real, target text, n integer);
create index by_call on scores (n);
create table traces (id text primary key, session text) without rowid;
create table ends (key blob primary key, episode text) without rowid;
create table continued (n integer primary key, episode text);
create table rollouts (n integer primary key, line blob, success integer);
create table episodes (n integer primary key, task text, policy text, calls integer, line blob);
create index by_task on episodes (task, abs(n));
"""
"""SQL that creates the tables. Indexes sort all queries, since sorted rows could fill the system's temporary folder."""
_GROUPED = """
create index by_trace on calls (trace, time, n);
create index by_session on calls (session, time, n);
update calls set episode = coalesce(
    's' || session,
    (select 't' || trace from calls other where other.trace = calls.trace and other.n != calls.n limit 1)
);
create index by_episode on calls (episode, time, n);
"""
"""SQL that assigns calls to the episodes of their sessions and traces. A trace with one call names no episode, since a
proxy may give each call its own trace."""
_SCORED = """
update scores set n = coalesce(
    n,
    (select n from ids where id = target),
    (select n from calls where trace = target order by time desc, n desc limit 1),
    (select n from calls where session = target order by time desc, n desc limit 1)
);
"""
"""SQL that assigns each score to a call. The score of a trace or session belongs to its last call."""


@dataclass(frozen=True)
class Logged:
    """A call from the database."""

    n: int
    """Number of the call in the log."""
    held: Mapping[str, Any]
    score: float | None
    """Mean of the call's scores; None if it has none."""

    @property
    def messages(self) -> list[Message]:
        """Messages of the request, with tool results in the order of their calls."""
        return list(self.held["messages"][:-1])

    @property
    def said(self) -> Message:
        """The answer, as a message."""
        return dict(self.held["messages"][-1])

    @property
    def action(self) -> Action:
        """The answer, as an action."""
        said = self.said
        return Action(
            said["content"],
            ended=self.held["ended"],
            tool_calls=tuple(said.get("tool_calls", ())),
            reasoning=said.get("reasoning_content", ""),
            token_ids=None if self.held["token_ids"] is None else tuple(self.held["token_ids"]),
            logprobs=None if self.held["logprobs"] is None else tuple(self.held["logprobs"]),
        )

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """Schemas of the tools that the model could call."""
        return tuple(self.held["tools"])


def can_carry_loss(answer: Action) -> bool:
    """Return whether an answer can be trained. If its calls become text, only its sampled tokens can be trained."""
    return answer.token_ids is not None or not is_broken(answer)


def _packed(call: Call) -> tuple[str, bytes]:
    """Return a call as text for the database, and a digest of its content.

    Raises:
        DataError: If the call's messages or its answer cannot be stored in an episode.
    """
    try:
        line_of(call.answer)  # its token ids may be negative, for example
    except DataError as error:
        raise DataError(f"{call.where}: answer: {error}") from error
    messages = in_call_order([*call.messages, call.answer.message()])
    content = {"messages": messages, "tools": list(call.tools)}
    if problem := fault(content, ""):
        raise DataError(f"{call.where}: {problem.removeprefix('.')}.")
    text = json.dumps(content, sort_keys=True)
    held = {
        **content,
        "ended": call.answer.ended,
        "trained": can_carry_loss(call.answer),
        "token_ids": call.answer.token_ids,
        "logprobs": call.answer.logprobs,
        "model": mended(call.model),
        "task": call.task,
        "where": call.where,
        "choice": call.choice,
    }
    return json.dumps(held), hashlib.blake2b(text.encode(), digest_size=16).digest()


def _key(end: tuple[bytes, tuple[str, str]]) -> bytes:
    """Return a digest that identifies a conversation up to an answer."""
    key, setting = end
    return hashlib.blake2b(key + json.dumps(setting).encode(), digest_size=16).digest()


class LogSpool:
    """A database of a log's calls, scores and traces, in a temporary file.

    Args:
        file: The file, which must not exist yet.
    """

    def __init__(self, file: Path) -> None:
        self._db = sqlite3.connect(file)
        self._db.executescript("pragma journal_mode = off; pragma synchronous = off;" + _TABLES)
        self.shared_ids = 0
        """Number of calls that share their id with another call."""
        self._rollouts = 0

    def add_call(self, call: Call) -> bool:
        """Add a call; return False if a call with the same id and content was added before.

        Raises:
            DataError: If the call's messages cannot be stored in an episode.
        """
        data, digest = _packed(call)
        ids = tuple(f"{each}#{call.choice}" for each in call.ids) if call.choice else call.ids
        marks = ", ".join("?" * len(ids))
        known = self._one(f"select min(n) from ids where id in ({marks})", *ids)
        if known is not None:
            if self._one("select digest from calls where n = ?", known) == digest:
                self._db.executemany(  # a score that the first record of the call lacks
                    "insert into scores (name, value, n) select ?, ?, ? where not exists "
                    "(select * from scores where n = ? and name = ?)",
                    [(one.name, one.value, known, known, one.name) for one in call.scores],
                )
                return False
            self.shared_ids += 1
        held = (call.session, call.trace, call.time, digest, data)
        n = self._db.execute(
            "insert into calls (session, trace, time, digest, data) values (?, ?, ?, ?, ?)", held
        ).lastrowid
        self._db.executemany("insert or ignore into ids values (?, ?)", [(each, n) for each in ids])
        self._db.executemany(
            "insert into scores (name, value, n) values (?, ?, ?)",
            [(one.name, one.value, n) for one in call.scores],
        )
        return True

    def add_rollout(self, line: bytes, scores: Sequence[Score], success: bool | None = None) -> None:
        """Add the trajectory of a whole rollout, as a line of JSON, with its scores and the success in its record."""
        self._rollouts += 1
        n = -self._rollouts  # negative, unlike the numbers of calls
        self._db.execute("insert into rollouts values (?, ?, ?)", (n, line, success))
        self._db.executemany(
            "insert into scores (name, value, n) values (?, ?, ?)",
            [(one.name, one.value, n) for one in scores],
        )

    def rollouts(self, score: str | None) -> Iterator[tuple[int, bytes, float | None, bool | None]]:
        """Yield `(number, trajectory as a line, score, success)` for each whole rollout, in the order of the log."""
        rows = self._db.execute(
            "select n, line, (select avg(value) from scores s where s.n = r.n and s.name is ?), success "
            "from rollouts r order by n desc",
            (score,),
        )
        for n, line, value, success in rows:
            yield n, line, value, None if success is None else bool(success)

    def add_score(self, score: Score) -> None:
        """Add a score that belongs to a call, trace or session."""
        self._db.execute(
            "insert into scores (name, value, target) values (?, ?, ?)", (score.name, score.value, score.of)
        )

    def add_trace(self, trace: Trace) -> None:
        """Add a trace with its session."""
        self._db.execute("insert or replace into traces values (?, ?)", (trace.id, trace.session))

    def sort(self) -> None:
        """Assign each call to an episode, and each score to a call. Call this once, after the last entry."""
        self._db.execute(
            "update calls set session = coalesce(session, (select session from traces where id = calls.trace))"
        )
        if self._one("select count(*) from calls where time is null"):
            self._db.execute("update calls set time = null")  # then only the order of the log is known
        self._db.executescript(_GROUPED)
        for n, data in self._db.execute("select n, data from calls where episode is null order by time, n"):
            self._db.execute("insert into continued values (?, ?)", (n, self._by_prefix(n, data)))
        self._db.execute(
            "update calls set episode = (select episode from continued c where c.n = calls.n) where episode is null"
        )
        self._db.executescript(_SCORED)

    def _by_prefix(self, n: int, data: str) -> str:
        """Return the episode that a call without session or shared trace continues, or a new episode."""
        call = Logged(n, json.loads(data), None)
        sequences = Sequences(reads_thoughts=False)  # a client may strip thoughts
        asked = sequences.position(call.messages, call.tools)
        found = None
        if asked.end_key is not None:
            found = self._one("select episode from ends where key = ?", _key(asked.end_key))
        episode = found or f"c{n}"
        for end in sequences.end_keys(sequences.add(asked, call.said)):
            self._db.execute("insert or replace into ends values (?, ?)", (_key(end), episode))
        return str(episode)

    def score_names(self) -> Counter[str]:
        """Return the number of scores of each name."""
        return Counter(dict(self._db.execute("select name, count(*) from scores group by name")))

    def unmatched(self, name: str | None) -> int:
        """Return the number of scores of a name that belong to no call, trace or session of the log."""
        return int(self._one("select count(*) from scores where n is null and name is ?", name) or 0)

    def unreadable(self, name: str | None) -> int:
        """Return the number of scores of a name that are no numbers."""
        return int(self._one("select count(*) from scores where value is null and name is ?", name) or 0)

    def by_episode(self, score: str | None) -> Iterator[list[Logged]]:
        """Yield the calls of each episode, in the order of time, with their scores of the given name.

        A session or trace whose calls name several tasks is an episode for each task. A call without a task has the
        task of the call before it, or else the first task that the session or trace names.
        """
        rows = self._db.execute(
            "select episode, n, data, (select avg(value) from scores s where s.n = calls.n and s.name is ?) from calls "
            "order by episode, time, n",
            (score,),
        )
        for _, held in groupby(rows, key=lambda row: row[0]):
            calls = [Logged(n, json.loads(data), value) for _, n, data, value in held]
            task = next((call.held["task"] for call in calls if call.held["task"] is not None), None)
            of_tasks: dict[str | None, list[Logged]] = {}
            for call in calls:
                task = task if call.held["task"] is None else call.held["task"]
                of_tasks.setdefault(task, []).append(replace(call, held={**call.held, "task": task}))
            yield from of_tasks.values()

    def add_episode(self, n: int, one: Trajectory, calls: int) -> None:
        """Add an episode, with the number of its calls; 0 for a whole rollout."""
        policy = None if failed(one) and not one.policy else one.policy
        self._db.execute(
            "insert into episodes values (?, ?, ?, ?, ?)", (n, one.task.id, policy, calls, line_of(one))
        )

    def by_task(self) -> Iterator[tuple[str, list[tuple[int, bytes]]]]:
        """Yield for each task a policy and the episodes as `(number of calls, line)`, in the order in which they began.

        A FAILED rollout may not name its policy, and a group has one policy. So it has the only policy of the task's
        other episodes; the policy is empty if they have several.
        """
        rows = self._db.execute("select task, policy, calls, line from episodes order by task, abs(n)")
        for _, group in groupby(rows, key=lambda row: row[0]):
            held = list(group)
            policies = {policy for _, policy, _, _ in held if policy is not None}
            yield policies.pop() if len(policies) == 1 else "", [(calls, line) for *_, calls, line in held]

    def _one(self, query: str, *values: Any) -> Any:
        row = self._db.execute(query, values).fetchone()
        return None if row is None else row[0]

    def close(self) -> None:
        """Close the database."""
        self._db.close()
