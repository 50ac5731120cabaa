"""Run folders of others, whose files are not as they should be: `report` and `watch` read them."""

import io
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fuzz.mutations import answers, fuzzed, mutated, mutated_lines
from perturn.data.records import LARGEST
from perturn.errors import RunError
from perturn.report import write_report
from perturn.watch import Watcher, render
from support.fuzzed_rows import OTHER, PAIR, TRAJECTORY

NUMBERS = {"confidence": [0.5, 0.9], "weight": [1.0, 0.2], "turn": [0, 1]}
TOKENS = {"ids": [5, 6], "turn": [0, 1], "logprobs": [-0.5, -0.1]}
STAGE = {"seconds": 1.5, "peak_memory_gb": 0.5, "counts": {"episodes": 2, "tokens": 10}, "done": True}
OBJECTS = {
    "manifest.json": {"recipe": "r", "seed": 1, "commit": "c", "versions": {"torch": "2"}, "stages": {"sft": STAGE}},
    "progress.json": {
        "host": "h", "pid": 7, "process_started": 1.5, "steps": ["sft", "align"], "stage": "align", "began": 2.5,
        "file": "metrics/align.jsonl", "total": 9, "done_before": 0, "unit": "steps", "counting_since": 3.5,
    },
    "evaluation/protocol.json": {
        "name": "p", "environment": "e", "panel_sha256": "ab" * 32, "n": 1, "max_turns": {"k": 9}, "history": 3,
        "decoding": {"temperature": 0, "top_p": 1}, "departures": {"top_p": {"here": 1, "protocol": 0.5}}, "seed": 0,
    },
    "metrics/loss.json": {"name": "tlm-dre", "pivot": 0.9},
    "metrics/ranking.json": {"pairs": 4, "before": 0.5, "after": 0.75},
    "tokens.json": {"5": "a", "6": "b"},
    "recipe.yaml": {"name": "r", "explore": {"sampling": {"temperature": 1.0}}, "align": {"loss": {"name": "sft"}}},
}  # fmt: skip
LINES = {
    "metrics/sft.jsonl": [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.4}],
    "metrics/align.jsonl": [{"step": 1, "loss": 0.5, "rewards/margins": 0.1}, {"step": 2, "clamped": 0}],
    "metrics/confidence.jsonl": [{"chosen": NUMBERS, "rejected": NUMBERS}],
    "metrics/reference.jsonl": [{"chosen": TOKENS, "rejected": TOKENS}],
    "trajectories/explore.jsonl": [TRAJECTORY, OTHER],
    "evaluation/sft.jsonl": [TRAJECTORY],
    "evaluation/tlm-dre.jsonl": [TRAJECTORY],
    "pairs.jsonl": [PAIR],
}
BAD = st.one_of(
    *(st.tuples(st.just(name), mutated(data)) for name, data in OBJECTS.items()),
    *(st.tuples(st.just(name), mutated_lines(rows)) for name, rows in LINES.items()),
)


def fill(folder, name, content):
    """A whole run with one bad file."""
    files = {each: json.dumps(data).encode() for each, data in OBJECTS.items()}
    files |= {
        each: b"".join(json.dumps(row).encode() + b"\n" for row in rows) for each, rows in LINES.items()
    }
    for each, data in (files | {name: content}).items():
        file = folder / each
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("progress.json", {**OBJECTS["progress.json"], "file": "\ud800"}),
        ("progress.json", {**OBJECTS["progress.json"], "stage": "\ud800"}),
        ("metrics/align.jsonl", {"step": 1, "\ud800": 0.5}),
    ],
)
def test_half_a_character_in_a_run_folder_is_refused(tmp_path, name, content):
    """It could neither be printed nor name a file."""
    fill(tmp_path, name, json.dumps(content).encode() + b"\n")

    with pytest.raises(RunError, match=f"{name}.*expected valid Unicode"):
        write_report(tmp_path) if name.startswith("metrics") else Watcher(tmp_path).look()


@pytest.mark.parametrize(
    ("key", "value"), [("recipe", ["r"]), ("commit", 7), ("versions", ["torch"]), ("data", {"a": 1})]
)
def test_a_manifest_of_other_kinds_is_refused_by_its_key(tmp_path, key, value):
    """The page would meet it in the midst."""
    fill(tmp_path, "manifest.json", json.dumps({**OBJECTS["manifest.json"], key: value}).encode())

    with pytest.raises(RunError, match=f"manifest.json: {key}"):
        write_report(tmp_path)


@pytest.mark.parametrize("name", ["evaluation/sft.jsonl", "trajectories/explore.jsonl"])
def test_the_largest_numbers_overflow_nothing(tmp_path, name):
    """Sums and squares of what the store takes are floats still; warnings are errors here."""
    turns = json.loads(json.dumps(TRAJECTORY["turns"]))
    turns[0]["action"]["logprobs"] = [-LARGEST, -LARGEST]
    row = TRAJECTORY | {"total_reward": LARGEST, "turns": turns}
    rows = [row | {"task": {"id": str(number)}} for number in range(5)]
    fill(tmp_path, name, b"".join(json.dumps(each).encode() + b"\n" for each in rows))

    shown = io.StringIO()
    Console(file=shown).print(render(Watcher(tmp_path).look()))
    page = write_report(tmp_path)

    assert shown.getvalue().strip()
    assert page.name == "report.html"
    assert not re.search(r"\b(NaN|Infinity)\b", (tmp_path / "summary.json").read_text())


@fuzzed
@given(bad=BAD)
def test_watched(tmp_path_factory, bad):
    folder = tmp_path_factory.getbasetemp() / "watched"
    fill(folder, *bad)

    with answers(bad[0]):
        state = Watcher(folder).look()
        shown = io.StringIO()
        Console(file=shown).print(render(state))
        assert shown.getvalue().strip()
        assert json.loads(json.dumps(state.to_dict()))


@pytest.mark.slow
@fuzzed
@given(bad=BAD)
def test_reported(tmp_path_factory, bad):
    folder = tmp_path_factory.getbasetemp() / "reported"
    fill(folder, *bad)

    with answers(bad[0]):
        assert write_report(folder).read_text(encoding="utf-8").endswith("</html>")
