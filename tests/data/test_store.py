import errno
import json
import logging
import os
import subprocess
import sys
import tracemalloc
from dataclasses import make_dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perturn.data import records
from perturn.data.records import trajectory_from_dict, trajectory_to_dict
from perturn.data.store import TrajectoryStore, read_pairs, read_trajectories, write_pairs
from perturn.errors import DataError, StorageError
from perturn.types import Action, PreferencePair, Status, Task, Trajectory, Turn

TEXT = st.text(max_size=8) | st.sampled_from(
    ["", "a\nb", "\r\n", "\u2028\u2029\x85", "né 漢 🙂", '"\\', "\x00"]
)
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOAT | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=5,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=2)
MESSAGE = st.builds(
    lambda role, content, rest: {**rest, "role": role, "content": content},
    st.sampled_from(["system", "user", "assistant", "tool"]),
    TEXT | st.none(),
    OBJECT,
)
NUMBER = st.floats(-records.LARGEST, records.LARGEST)
TOKENS = st.lists(st.tuples(st.integers(0, 10**6), NUMBER), min_size=1, max_size=4)


@st.composite
def actions(draw):
    tokens = draw(st.none() | TOKENS)
    ids = None if tokens is None else tuple(token for token, _ in tokens)
    logprobs = None if tokens is None or draw(st.booleans()) else tuple(value for _, value in tokens)
    return Action(draw(TEXT), ids, logprobs, draw(st.booleans()), tuple(draw(st.lists(OBJECT, max_size=2))))


TURN = st.builds(
    Turn, st.lists(MESSAGE, max_size=2).map(tuple), actions(), NUMBER, st.booleans(), st.none() | TEXT
)
TRAJECTORY = st.builds(
    Trajectory,
    task=st.builds(Task, TEXT, TEXT, TEXT, OBJECT),
    turns=st.lists(TURN, max_size=3).map(tuple),
    environment=TEXT,
    protocol=TEXT,
    prompt=st.lists(MESSAGE, max_size=2).map(tuple),
    tools=st.lists(OBJECT, max_size=2).map(tuple),
    total_reward=NUMBER,
    success=st.booleans(),
    terminated=st.booleans(),
    truncated=st.booleans(),
    status=st.sampled_from(Status),
    error=st.none() | TEXT,
    sample=st.integers(0, 5),
    seed=st.integers(),
    policy=TEXT,
    history=st.none() | st.integers(0, 3),
    taken_over=st.integers(0, 3),
)


def trajectory(task="plant/1", sample=0, **changes):
    observation = ({"role": "user", "content": "You are in a hall."},)
    action = Action("open door", token_ids=(5, 7), logprobs=(-0.5, -0.25))
    turns = (Turn(observation, action), Turn(observation, Action("take pot")))
    return Trajectory(Task(task), turns, sample=sample, **changes)


def changed(path, value):
    """The record of `trajectory()` with one value replaced; `path` is a list of keys and indices."""
    record = trajectory_to_dict(trajectory())
    inner = record
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return record


@pytest.fixture
def file(tmp_path):
    return tmp_path / "runs" / "trajectories.jsonl"


@given(TRAJECTORY)
def test_record_round_trips_through_json_text(original):
    """Unicode, line separators, None ids, free data and floats come back exactly."""
    restored = trajectory_from_dict(json.loads(json.dumps(trajectory_to_dict(original))))

    assert restored == original


@given(TRAJECTORY)
def test_a_line_is_one_line_to_every_reader(original):
    """str.splitlines also splits at U+2028, U+0085 and others; an ASCII line has none of them."""
    line = records.line_of(original).decode("utf-8")

    assert line.isascii()
    assert len(line.splitlines()) == 1


def test_a_field_is_read_by_its_type():
    """One added to `types` cannot be forgotten: without a schema for its type the module would not load."""
    grown = records.SchemaValidator(
        records._record(make_dataclass("Grown", [("old", int), ("new", str, "a")]))
    )

    assert grown.validate_json('{"old": 1}').new == "a"
    with pytest.raises(records.ValidationError):
        grown.validate_json('{"old": 1, "new": 2}')
    with pytest.raises(KeyError, match="complex"):
        records._record(make_dataclass("Odd", [("novelty", complex)]))


@pytest.mark.parametrize(
    ("path", "value", "start"),
    [
        (["turns", 1, "action", "token_ids"], "5 7", "turns[1].action.token_ids: expected a list, got '5 7'"),
        (
            ["turns", 0, "action", "token_ids", 1],
            7.0,
            "turns[0].action.token_ids[1]: expected a whole number",
        ),
        (
            ["turns", 0, "action", "token_ids", 1],
            True,
            "turns[0].action.token_ids[1]: expected a whole number",
        ),
        (
            ["turns", 0, "action", "token_ids", 1],
            -1,
            "turns[0].action.token_ids[1]: expected a number >= 0",
        ),
        (["turns", 0, "action", "logprobs"], [-0.5], "turns[0].action.logprobs: expected one for each"),
        (["turns", 0, "action", "token_ids"], None, "turns[0].action.logprobs: expected one for each"),
        (
            ["turns", 0, "action", "logprobs", 0],
            float("-inf"),
            "turns[0].action.logprobs[0]: expected a finite",
        ),
        (["turns", 0, "reward"], float("nan"), "turns[0].reward: expected a finite number, got nan"),
        (["turns", 0, "reward"], 10**400, "turns[0].reward: expected a finite number"),
        (["turns", 0, "reward"], True, "turns[0].reward: expected a finite number, got True"),
        (["total_reward"], 1e200, "total_reward: expected a number <= 1e+150, got 1e+200 (float)"),
        (
            ["turns", 0, "action", "logprobs", 0],
            -1e308,
            "turns[0].action.logprobs[0]: expected a number >= -1e+150",
        ),
        (["total_reward"], float("inf"), "total_reward: expected a finite number, got inf"),
        (["turns", 1, "observation", 0], {"content": "x"}, "turns[1].observation[0].role: expected a role"),
        (["turns", 1, "observation", 0, "role"], "", "turns[1].observation[0].role: expected a role"),
        (
            ["turns", 1, "observation", 0, "content"],
            float("nan"),
            "turns[1].observation[0].content: expected",
        ),
        (["turns", 1, "valid"], 1, "turns[1].valid: expected true or false, got 1 (int)"),
        (["turns", 0, "state_key"], 3, "turns[0].state_key: expected text, got 3"),
        (["turns", 0], "x", "turns[0]: expected a Turn object, got 'x'"),
        (["task", "data"], [], "task.data: expected a JSON object, got []"),
        (["status"], "done", "status: expected one of completed, failed, unfinished, got 'done'"),
        (["status"], ["failed"], "status: expected one of completed, failed"),
        (["sample"], -1, "sample: expected a number >= 0"),
        (["version"], None, "version: expected the version of the format"),
        (["version"], 0, "version: expected the version of the format"),
        (["totl_reward"], 1.0, "totl_reward: unknown key. Did you mean 'total_reward'? Known: "),
        (
            ["turns", 1, "action", "tokens"],
            [],
            "turns[1].action.tokens: unknown key. Did you mean 'token_ids'?",
        ),
    ],
)
def test_a_malformed_record_is_refused_by_path(path, value, start):
    """One value of a good record replaced: the message opens with where it is and what was expected."""
    with pytest.raises(DataError) as caught:
        trajectory_from_dict(changed(path, value))

    assert str(caught.value).startswith(start)


def test_a_line_with_a_million_mistakes_is_refused_by_the_first(file):
    """The others are not counted, which would take the memory of a million messages."""
    record = changed(["turns", 0, "action", "token_ids"], ["x"] * 10**6)
    file.parent.mkdir()
    file.write_text(json.dumps(record) + "\n")

    tracemalloc.start()
    with pytest.raises(DataError, match=r":1: turns\[0\]\.action\.token_ids\[0\]: expected a whole number"):
        list(read_trajectories(file))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 100e6


@pytest.mark.parametrize(
    ("path", "missing"),
    [([], "turns"), (["task"], "id"), (["turns", 1], "action"), (["turns", 1, "action"], "text")],
)
def test_a_missing_required_key_is_refused_by_path(path, missing):
    """Fields without a default are required."""
    record = trajectory_to_dict(trajectory())
    inner = record
    for key in path:
        inner = inner[key]
    del inner[missing]

    with pytest.raises(DataError, match=rf"{missing}: expected a value, got no such key\. Add it\."):
        trajectory_from_dict(record)


def test_keys_with_defaults_may_be_left_out():
    """The least record is a version, a task and its turns."""
    restored = trajectory_from_dict({"version": 1, "task": {"id": "a"}, "turns": []})

    assert restored == Trajectory(Task("a"), ())


def test_a_newer_version_asks_for_an_upgrade():
    """Its unknown keys are not blamed first."""
    with pytest.raises(DataError, match=r"version: expected at most 1, got 2\. Upgrade Perturn"):
        trajectory_from_dict(changed(["version"], 2) | {"novelty": 1})


@pytest.mark.parametrize(
    ("data", "start"),
    [
        ({"when": object()}, "task.data.when: expected JSON data"),
        ({"scores": {1: 0.5}}, "task.data.scores.1: expected a text key"),
        ({"scores": [0.0, float("nan")]}, "task.data.scores[1]: expected a finite number"),
    ],
)
def test_what_json_cannot_hold_is_refused_on_writing(file, data, start):
    """A line that could not be read back is never written, and its key stays free."""
    odd = replace(trajectory(), task=Task("plant/1", data=data))

    with TrajectoryStore(file) as writer:
        with pytest.raises(DataError) as caught:
            writer.append(odd)
        writer.append(trajectory())

    assert str(caught.value).startswith(start)
    assert list(read_trajectories(file)) == [trajectory()]


def test_appended_trajectories_are_read_in_order(file):
    """Across two openings; keys and length count both."""
    with TrajectoryStore(file) as writer:
        writer.append(trajectory("b"))
    with TrajectoryStore(file) as writer:
        writer.append(trajectory("a"))
        writer.append(trajectory("b", sample=1))
        keys, length, read = writer.keys(), len(writer), list(writer)

    assert keys == {("b", 0), ("a", 0), ("b", 1)}
    assert length == 3
    assert read == [trajectory("b"), trajectory("a"), trajectory("b", sample=1)]


def test_append_is_one_write_and_then_a_sync(file, monkeypatch):
    """So a kill tears at most the last line, and a returned append is durable."""
    calls = []
    write, sync = os.write, os.fsync
    with TrajectoryStore(file) as writer:
        monkeypatch.setattr(os, "write", lambda fd, data: (calls.append(data), write(fd, data))[1])
        monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("sync"), sync(fd))[1])
        writer.append(trajectory())
        monkeypatch.undo()

    assert calls == [file.read_bytes(), "sync"]


def test_a_second_trajectory_with_the_same_key_is_refused(file):
    """Also when the first was written before the file was opened."""
    with TrajectoryStore(file) as writer:
        writer.append(trajectory())
    taken = r"task 'plant/1', sample 0, which is already recorded"
    with TrajectoryStore(file) as writer, pytest.raises(DataError, match=taken):
        writer.append(trajectory(total_reward=1.0))

    assert len(list(read_trajectories(file))) == 1


def test_a_repeated_key_in_a_file_is_refused(file):
    """Two files put together by hand: the message names both lines."""
    with TrajectoryStore(file) as writer:
        writer.append(trajectory())
    file.write_bytes(file.read_bytes() * 2)

    with pytest.raises(DataError, match=r"trajectories.jsonl:2: task\.id: .* got the same key in line 1\."):
        list(read_trajectories(file))


@pytest.mark.parametrize("torn", ["cut", "whole"])
def test_a_torn_last_line_is_dropped(file, caplog, torn):
    """Whether or not it parses; reading leaves the file as it is, opening cuts it and appending goes on."""
    with TrajectoryStore(file) as writer:
        writer.append(trajectory("a"))
    complete = file.read_bytes()
    line = complete.replace(b'"a"', b'"b"').rstrip(b"\n")
    file.write_bytes(complete + (line[:50] if torn == "cut" else line))
    before = file.read_bytes()

    with caplog.at_level(logging.WARNING):
        read = list(read_trajectories(file))
    after_reading = file.read_bytes()
    with TrajectoryStore(file) as writer:
        after_opening = file.read_bytes()
        writer.append(trajectory("b"))

    assert read == [trajectory("a")]
    assert all(record.getMessage().startswith(f"{file}:2: dropped") for record in caplog.records)
    assert len(caplog.records) == 2
    assert after_reading == before
    assert after_opening == complete
    assert list(read_trajectories(file)) == [trajectory("a"), trajectory("b")]


def test_every_cut_of_the_last_line_is_repaired(file):
    """A kill can stop a write at any byte; the trajectory before it survives all of them."""
    with TrajectoryStore(file) as writer:
        writer.append(trajectory("a"))
        first = file.read_bytes()
        writer.append(trajectory("b"))
    both = file.read_bytes()

    kept = []
    for end in range(len(first), len(both), 7):
        file.write_bytes(both[:end])
        with TrajectoryStore(file) as writer:
            kept.append((writer.keys(), file.read_bytes()))

    assert all(each == ({("a", 0)}, first) for each in kept)


@pytest.mark.parametrize("damage", [b"{'task': 1}", b"", b"\xff", b"[" * 100_000, b"[1]"])
def test_a_malformed_line_is_refused_with_file_and_line(file, damage):
    """Only the last line can be torn; opening for appending refuses too and leaves the file as it is."""
    with TrajectoryStore(file) as writer:
        writer.append(trajectory("a"))
    file.write_bytes(file.read_bytes() + damage + b"\n")
    before = file.read_bytes()

    with pytest.raises(DataError, match=r"trajectories.jsonl:2: .*expected .*, got .*Correct"):
        list(read_trajectories(file))
    with pytest.raises(DataError, match=r"trajectories.jsonl:2: "):
        TrajectoryStore(file)

    assert file.read_bytes() == before


def test_a_field_error_in_a_file_names_file_line_and_path(file):
    """path:line: field: what was expected."""
    file.parent.mkdir()
    file.write_text(json.dumps(changed(["turns", 1, "action", "text"], 3)) + "\n")

    with pytest.raises(DataError) as caught:
        list(read_trajectories(file))

    assert (
        str(caught.value) == f"{file}:1: turns[1].action.text: expected text, got 3 (int). Correct the value."
    )


def test_reading_a_missing_file_makes_none(file):
    """The error says so, and nothing is created."""
    with pytest.raises(DataError, match="expected a file, got none"):
        list(read_trajectories(file))

    assert not file.parent.exists()


def test_a_folder_cannot_be_opened_for_appending(tmp_path):
    """An error of the system becomes one of ours."""
    with pytest.raises(StorageError, match="cannot be written: Is a directory; correct the path"):
        TrajectoryStore(tmp_path)


def test_a_second_writer_is_refused_until_the_first_closes(file):
    """Also in another process; readers are not disturbed."""
    script = f"from perturn.data.store import TrajectoryStore; TrajectoryStore({str(file)!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with TrajectoryStore(file) as writer:
        writer.append(trajectory())
        with pytest.raises(DataError, match="another process is writing this file"):
            TrajectoryStore(file)
        other = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
        )
        read = list(read_trajectories(file))
    with TrajectoryStore(file) as again:
        keys = again.keys()

    assert "another process is writing this file" in other.stderr
    assert read == [trajectory()]
    assert keys == {("plant/1", 0)}


def test_a_refused_file_is_unlocked_again(file):
    """After the line is corrected the same process can open it."""
    file.parent.mkdir()
    file.write_text("{}\n")
    with pytest.raises(DataError):
        TrajectoryStore(file)
    file.write_text("")

    with TrajectoryStore(file) as writer:
        assert len(writer) == 0


def test_a_failed_write_closes_the_store(file, monkeypatch):
    """A disk that fills up midway takes half a line, which is taken back."""
    write = os.write

    def fill_up(descriptor, data):
        monkeypatch.setattr(os, "write", refuse)
        return write(descriptor, data[:20])

    def refuse(descriptor, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with TrajectoryStore(file) as writer:
        writer.append(trajectory("a"))
        whole = file.read_bytes()
        monkeypatch.setattr(os, "write", fill_up)
        with pytest.raises(StorageError, match="cannot be written: No space left on device; free space"):
            writer.append(trajectory("b"))
        monkeypatch.undo()
        assert file.read_bytes() == whole
        with pytest.raises(DataError, match="the store is closed"):
            writer.append(trajectory("c"))
    with TrajectoryStore(file) as writer:
        writer.append(trajectory("b"))

    assert list(read_trajectories(file)) == [trajectory("a"), trajectory("b")]


def test_a_file_system_without_locks_is_warned_of(file, monkeypatch, caplog):
    """Some cluster file systems have none; writing goes on."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, "not supported")

    monkeypatch.setattr("filelock._unix.fcntl.flock", refuse)
    with caplog.at_level(logging.WARNING), TrajectoryStore(file) as writer:
        writer.append(trajectory())

    assert "no lock ([Errno 37] not supported)" in caplog.text


@given(pairs=st.lists(st.builds(PreferencePair, TRAJECTORY, TRAJECTORY), max_size=2))
def test_pairs_round_trip(pairs, tmp_path_factory):
    """In order, both sides exactly, in place of an older file; no temporary file stays."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    file.write_text("old")
    pairs = [PreferencePair(each.chosen, replace(each.rejected, task=each.chosen.task)) for each in pairs]

    count = write_pairs(file, pairs)

    assert count == len(pairs)
    assert read_pairs(file) == pairs
    assert os.listdir(file.parent) == ["pairs.jsonl"]


def test_failing_to_write_pairs_leaves_the_old_file(tmp_path):
    """The pairs come from a generator that raises after the first."""
    file = tmp_path / "pairs.jsonl"
    pair = PreferencePair(trajectory(), trajectory(sample=1))
    write_pairs(file, [pair])

    def failing():
        yield pair
        yield pair
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        write_pairs(file, failing())

    assert read_pairs(file) == [pair]
    assert os.listdir(tmp_path) == ["pairs.jsonl"]


def test_a_pair_is_of_one_task(tmp_path):
    """On writing, and on reading with file and line."""
    good = PreferencePair(trajectory("a"), trajectory("a", sample=1))
    with pytest.raises(DataError, match=r"rejected\.task\.id: expected the task of chosen \('a'\), got 'b'"):
        write_pairs(tmp_path / "new.jsonl", [replace(good, rejected=trajectory("b"))])
    file = tmp_path / "pairs.jsonl"
    write_pairs(file, [good])
    file.write_bytes(file.read_bytes().replace(b'"id":"a"', b'"id":"b"', 1))

    with pytest.raises(DataError, match=r"pairs\.jsonl:1: rejected\.task\.id: "):
        read_pairs(file)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["chosen", "turns", 1, "reward"], "1", r"chosen\.turns\[1\]\.reward: expected a finite number"),
        (["rejected", "version"], 2, r"rejected\.version: expected at most 1, got 2\. Upgrade"),
        (["rejectd"], {}, r"rejectd: unknown key\. Did you mean 'rejected'"),
    ],
)
def test_a_malformed_pair_is_refused_by_path(tmp_path, path, value, message):
    """As strict as trajectories are."""
    record = {"chosen": trajectory_to_dict(trajectory()), "rejected": trajectory_to_dict(trajectory())}
    inner = record
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(record) + "\n")

    with pytest.raises(DataError, match=rf"pairs\.jsonl:1: {message}"):
        read_pairs(file)


def test_a_torn_pair_is_refused(tmp_path):
    """Pair files are written whole, so this one was damaged."""
    file = tmp_path / "pairs.jsonl"
    write_pairs(file, [PreferencePair(trajectory(), trajectory(sample=1))] * 2)
    file.write_bytes(file.read_bytes()[:-30])

    with pytest.raises(DataError, match=r"pairs\.jsonl:2: expected JSON"):
        read_pairs(file)


@pytest.mark.parametrize("content", [7, ["go"], {"type": "text"}, [{"type": "image", "url": "door.png"}]])
def test_the_content_of_a_message_is_text_or_parts(content):
    """A page and a template would meet anything else; text, parts of it, which are joined, and none pass."""
    turn = {"observation": [{"role": "user", "content": content}], "action": {"text": "look"}}
    record = {"version": 1, "task": {"id": "t"}, "turns": [turn]}

    with pytest.raises(
        DataError,
        match=r"turns\[0\].observation\[0\].content(\[0\])?: expected (text, or a list of|a text part)",
    ):
        trajectory_from_dict(record)
    for good, kept in (("go", "go"), (None, None), ([{"type": "text", "text": each} for each in "go"], "go")):
        turn["observation"][0]["content"] = good
        assert trajectory_from_dict(record).turns[0].observation[0]["content"] == kept
