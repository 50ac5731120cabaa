"""Trajectories, pairs, training rows and a server's answers that are not as they should be."""

import json
from contextlib import suppress

import pytest
from hypothesis import given

from fuzz.mutations import answers, fuzzed, mutated, mutated_lines
from perturn.data.store import read_pairs, read_trajectories
from perturn.engines.api.completion import read_completion, read_usage
from perturn.engines.api.ledger import Ledger
from perturn.errors import DataError, PerturnError
from perturn.formats.chat_messages import read_answer
from perturn.formats.read_rows import open_rows, read_each, read_rows
from perturn.policy.examples import encode_example
from perturn.types import Action, Task, Trajectory, Turn
from support.fuzzed_rows import CALL, OTHER, PAIR, TRAJECTORY

ASKED = [
    {"role": "system", "content": "Play."},
    {"role": "user", "content": [{"type": "text", "text": "go"}]},
]
SAID = [{"role": "assistant", "content": "look", "tool_calls": [CALL]}, {"role": "tool", "content": "a"}]
TRL = [
    {"messages": ASKED + SAID, "tools": json.dumps([{"type": "function", "function": {"name": "find"}}])},
    {"prompt": ASKED, "completion": SAID},
    {"prompt": ASKED, "chosen": SAID, "rejected": [{"role": "assistant", "content": "no"}]},
]
SHAREGPT = [
    {
        "conversations": [
            {"from": "human", "value": "go"},
            {"from": "function_call", "value": '{"name": "find", "arguments": {}}'},
            {"from": "observation", "value": "seen"},
            {"from": "gpt", "value": "done"},
        ],
        "system": "Play.",
        "kto_tag": True,
    },
    {
        "input": {"messages": ASKED},
        "preferred_output": SAID[:1],
        "non_preferred_output": [{"from": "gpt", "value": "no"}],
    },
]
TEXTS = [
    {"prompt": "go", "chosen": "look", "rejected": "wait"},
    {"instruction": "go", "input": "now", "output": "look", "history": [["a", "b"]]},
    {"conversation": [{"human": "go", "assistant": "look"}]},
]


def put(tmp_path_factory, name, content):
    file = tmp_path_factory.getbasetemp() / name
    file.write_bytes(content)
    return file


@fuzzed
@given(content=mutated_lines([TRAJECTORY, OTHER]))
def test_trajectories(tmp_path_factory, content):
    file = put(tmp_path_factory, "rows.jsonl", content)

    with answers("rows.jsonl"):
        list(read_trajectories(file))


@fuzzed
@given(content=mutated_lines([PAIR]))
def test_pairs(tmp_path_factory, content):
    file = put(tmp_path_factory, "pairs.jsonl", content)

    with answers("pairs.jsonl"):
        read_pairs(file)


def inspected(rows):
    @fuzzed
    @given(content=mutated_lines(rows))
    def test(tmp_path_factory, renderer, content):
        """All rows or none, one by one, and as tokens."""
        file = put(tmp_path_factory, "data.jsonl", content)
        with answers("data.jsonl"):
            for row in read_rows(file):
                encode(row, renderer)
        with answers("data.jsonl"):
            for _, row in read_each(open_rows(file)):
                if not isinstance(row, DataError):
                    encode(row, renderer)

    return test


def encode(row, renderer):
    with suppress(PerturnError):  # which row it is, the caller says
        encode_example(row, renderer, 512)


test_inspected_trajectories = inspected([TRAJECTORY, OTHER])
test_inspected_pairs = inspected([PAIR])
test_inspected_messages = inspected(TRL[:1])
test_inspected_completions = inspected(TRL[1:2])
test_inspected_preferences = inspected(TRL[2:])
test_inspected_sharegpt = inspected(SHAREGPT)
test_inspected_texts = inspected(TEXTS)

COMPLETION = {
    "id": "c", "choices": [{"index": 0, "finish_reason": "stop", "message": {
        "role": "assistant", "content": "look", "refusal": None,
        "tool_calls": [CALL | {"function": {"name": "find", "arguments": '{"room": "hall"}'}}]}}],
    "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
}  # fmt: skip


@fuzzed
@given(body=mutated(COMPLETION))
def test_answers_of_servers(body):
    with answers("answer"):
        completion = read_completion(body)
        usage = read_usage(completion)
        assert usage is None or all(type(count) is int and count >= 0 for count in usage)
        message = completion["choices"][0]["message"]
        json.dumps(read_answer(message, "answer").message())


LINE = {
    "request": "ab", "prompt_tokens": 10, "completion_tokens": 5,
    "answer": {"text": "look", "ended": True, "tool_calls": [CALL]},
}  # fmt: skip


@fuzzed
@given(content=mutated_lines([LINE, LINE | {"answer": None}]))
def test_ledgers(tmp_path_factory, content):
    file = put(tmp_path_factory, "ledger.jsonl", content)

    with answers("ledger.jsonl"):
        ledger = Ledger(file)
        ledger.close()
        assert ledger.tokens >= 0


@pytest.mark.parametrize("token", [2**31, 10**30, 2**63])
def test_an_id_beyond_all_vocabularies_is_refused_by_its_place(renderer, token):
    """A tensor could not hold it, nor a tokenizer read it."""
    row = Trajectory(
        Task("t"), (Turn(({"role": "user", "content": "go"},), Action("a", (5, token), (-1.0, -1.0))),)
    )

    with pytest.raises(DataError, match=r"task 't': turns\[0\]\.action\.token_ids\[1\]: expected a token id"):
        renderer.encode(row)
