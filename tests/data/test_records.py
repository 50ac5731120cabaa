"""Trajectories as text and back: what is read by its type, and what is refused by its path."""

import json
import tracemalloc
from dataclasses import make_dataclass, replace

import pytest
from hypothesis import given

from perturn.data import records
from perturn.data.records import trajectory_from_dict, trajectory_to_dict
from perturn.data.store import TrajectoryStore, read_trajectories
from perturn.errors import DataError
from perturn.types import Task, Trajectory
from support.stored import TRAJECTORY, changed, trajectory


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
