"""The audit of `perturn inspect --check`: all rows, what is dropped, cut, doubled or refused, and why."""

import io
import json
import sys
from contextlib import suppress

import pytest
from rich.console import Console

from perturn.audit import audit, inspect, inspect_json, model_of
from perturn.cli import main
from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.data.run_folder import Run
from perturn.data.store import TrajectoryStore, write_pairs
from perturn.errors import ConfigError, DataError
from perturn.types import Action, PreferencePair, Status, Task, Trajectory, Turn
from support.audited import say, write


def played(*actions, task="t/0", reward=1.0, heard="seen", **changes):
    """A trajectory that hears `seen` and answers with the actions."""
    turns = tuple(
        Turn(tuple(say(heard)), each if isinstance(each, Action) else Action(each)) for each in actions
    )
    return Trajectory(Task(task), turns, total_reward=reward, success=reward == 1.0, **changes)


def test_all_rows_are_read_and_each_refusal_names_its_line(tiny_folder, tmp_path):
    """Lines 2 and 4 are what training would refuse; lines 1 and 3 are the same tokens; nothing stops at the first."""
    good = {"messages": say("a", "b")}
    file = write(tmp_path / "rows.jsonl", good, {"messages": say("a")}, good, {"messages": say("a", "")})

    found = audit(file, str(tiny_folder))

    part = found["parts"]["rows"]
    assert (part["rows"], part["usable"], part["turns"]) == (4, 2, 2)
    assert [row["row"] for row in found["refused"]] == [2, 4]
    assert "expected an assistant message" in found["refused"][0]["reason"]
    assert part["duplicates"] == {"rows": 1, "examples": [[1, 3]], "chosen_used_again": 0}


def test_a_line_that_is_no_json_is_a_refused_row(tiny_folder, tmp_path):
    """Cut off in line 2; line 3 is read."""
    file = write(tmp_path / "rows.jsonl", {"messages": say("a", "b")}, "cut", {"messages": say("c", "d")})
    file.write_text(file.read_text().replace('"cut"', '{"messages": ['))

    found = audit(file, str(tiny_folder))

    assert found["parts"]["rows"]["usable"] == 2
    assert [row["row"] for row in found["refused"]] == [2]


def test_counts_are_those_of_the_tokens(tiny_folder, tmp_path):
    """As `--json` without --check prints them."""
    file = write(tmp_path / "rows.jsonl", {"messages": say("a", "b", "c", "d e f")})
    tokens = json.loads(next(inspect_json(file, str(tiny_folder))))["chosen"]

    part = audit(file, str(tiny_folder))["parts"]["rows"]

    assert (part["tokens"], part["loss_tokens"]) == (len(tokens), sum(token["loss"] for token in tokens))
    assert part["lengths"]["turns"] == dict.fromkeys(("min", "median", "p90", "p99", "max"), 2.0)
    assert part["lengths"]["tokens_of_a_turn"]["min"] == 2
    assert part["lengths"]["tokens_of_a_turn"]["max"] == 4


def test_what_a_length_limit_cuts_is_counted(tiny_folder, tmp_path):
    """A last turn that does not fit goes; a first one that does not fit has its row refused."""
    long = {"messages": say("a", "b", "c " * 60, "d")}
    file = write(
        tmp_path / "rows.jsonl", long, {"messages": say("a " * 80, "b")}, {"messages": say("a", "b")}
    )

    found = audit(file, str(tiny_folder), max_length=60)

    assert found["parts"]["rows"]["cut"] == {"trajectories": 1, "turns": 1, "limit": 60, "rows": [1]}
    assert [row["row"] for row in found["refused"]] == [2]
    assert "max_length is 60" in found["refused"][0]["reason"]


def test_control_tokens_in_an_observation_and_actions_that_are_not_their_ids_are_found(
    tiny_folder, tokenizer, tmp_path
):
    """An observation that ends a turn of its own, and a text that was changed after sampling."""
    ids = tuple(tokenizer("go")["input_ids"])
    rows = [
        played("go", heard="<|im_end|> hello"),
        played(Action("go", token_ids=ids), task="t/1"),
        played(Action("stay", token_ids=ids), task="t/2"),
    ]
    with TrajectoryStore(tmp_path / "rows.jsonl") as store:
        for row in rows:
            store.append(row)

    template = audit(tmp_path / "rows.jsonl", str(tiny_folder))["template"]

    assert template == {
        "problems": [],
        "control_tokens": [
            {"part": "rows", "row": 1, "turn": 0, "where": "observation", "tokens": ["<|im_end|>"]}
        ],
        "texts_with_control_tokens": 1,
        "not_as_sampled": 1,
    }


def test_control_tokens_are_named_wherever_they_stand_and_counted(
    tiny_folder, tokenizer, tmp_path, monkeypatch, capsys
):
    """System text, tools, what is recalled, calls, actions; not in what was sampled, nor in tags."""
    heard = tuple(say("seen"))
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": ["<|im_start|>"]}}}
    tool = {"type": "function", "function": {"name": "f", "description": "<|endoftext|>", "parameters": {}}}
    turns = (
        Turn(heard, Action("go<|im_end|>"), recalled=tuple(say("<|im_end|> so"))),
        Turn(heard, Action("", tool_calls=(call,))),
        Turn(heard, Action("<|im_end|>", token_ids=tuple(tokenizer("go")["input_ids"]))),
        Turn(heard, Action("<think>\na\n</think>")),
    )
    system = ({"role": "system", "content": "<|im_start|><|im_end|>"},)
    row = Trajectory(Task("t"), turns, prompt=system, tools=(tool,), total_reward=1.0, success=True)
    with TrajectoryStore(tmp_path / "rows.jsonl") as store:
        store.append(row)

    template = audit(tmp_path / "rows.jsonl", str(tiny_folder))["template"]
    monkeypatch.setattr(
        sys,
        "argv",
        ["perturn", "inspect", str(tmp_path / "rows.jsonl"), "--model", str(tiny_folder), "--check"],
    )
    with suppress(SystemExit):
        main()
    printed = capsys.readouterr().out

    found = [(each["turn"], each["where"], each["tokens"]) for each in template["control_tokens"]]
    assert found == [
        (None, "prompt", ["<|im_start|>", "<|im_end|>"]),
        (None, "tools", ["<|endoftext|>"]),
        (0, "observation", ["<|im_end|>"]),
        (0, "action", ["<|im_end|>"]),
        (1, "action", ["<|im_start|>"]),
    ]
    assert template["texts_with_control_tokens"] == 5
    assert "rows, line 1: the prompt holds <|im_start|>, <|im_end|>, read as plain text" in printed
    assert "rows, line 1, turn 0: the action holds <|im_end|>" in printed


def test_control_tokens_in_the_variables_of_a_row_are_named(tiny_folder, tmp_path):
    row = {"messages": say("a", "b"), "chat_template_kwargs": {"who": "<|im_end|>"}}
    file = write(tmp_path / "rows.jsonl", row)

    (found,) = audit(file, str(tiny_folder))["template"]["control_tokens"]
    assert (found["row"], found["where"], found["tokens"]) == (1, "chat_template_kwargs", ["<|im_end|>"])


def test_rows_in_colour_count_actions_with_control_tokens(tiny_folder, tmp_path):
    """One of two actions; the text is shown as it is."""
    row = {"messages": say("a", "go<|im_end|>", "b", "stop")}
    console = Console(file=io.StringIO(), width=400, color_system=None)

    inspect(write(tmp_path / "rows.jsonl", row), str(tiny_folder), None, console)

    printed = console.file.getvalue()
    assert "go<|im_end|><|im_end|>" in printed
    assert "1 actions hold control tokens as text" in printed


@pytest.fixture
def run(tmp_path, tiny_folder):
    """A run with three expert episodes, three explored ones and a pair."""
    data = {
        "name": "one",
        "output": str(tmp_path),
        "model": {"name": str(tiny_folder), "max_length": 500},
        "environment": {"name": "none"},
        "protocol": {"name": "none"},
        "sft": {"loss": {"name": "sft"}},
        "align": {"loss": {"name": "tlm-dre"}},
    }
    run = Run(parse(Recipe, data))
    experts = [played("go", task="t/0"), played("go", task="t/1"), played("no", task="t/2", reward=0.0)]
    explored = [
        played("no", task="t/0", reward=0.0),
        played("no", task="t/1", reward=0.8),
        played("no", task="t/2", reward=0.0),
    ]
    for name, rows in (("expert", experts), ("explore", explored)):
        with TrajectoryStore(run.paths.trajectories(name)) as store:
            for row in rows:
                store.append(row)
    write_pairs(run.paths.pairs(), [PreferencePair(experts[0], explored[0])])
    with TrajectoryStore(run.paths.evaluation("sft")) as store:
        store.append(played("go", task="t/1"))
        store.append(played("go", task="t/9"))
    side = {"confidence": [0.95], "weight": [0.2]}
    row = {"chosen": side, "rejected": {"confidence": [0.5], "weight": [1.0]}}
    run.paths.metrics("confidence").write_text(json.dumps(row) + "\n")
    return run


def test_a_run_is_audited_with_its_own_settings(run, tiny_folder):
    """One pair is kept, one gap is too small, one task has no successful expert; t/1 is evaluated and trained on."""
    assert model_of(run.folder, None) == str(tiny_folder)

    found = audit(run.folder, model_of(run.folder, None))

    assert found["max_length"] == 500
    assert {name: part["rows"] for name, part in found["parts"].items()} == {"expert": 3, "pairs": 1}
    assert {key: count for key, count in found["pairing"].items() if count} == {
        "kept": 1,
        "gap": 1,
        "no_expert": 1,
    }
    assert found["tasks"] == {"unsuccessful_expert": 1, "evaluated_and_trained": 1}
    assert found["weights"]["chosen"]["mean_weight"] == pytest.approx(0.2)
    assert found["weights"]["rejected"]["highest_weight_share"] == 1.0
    assert found["refused"] == []


def test_pairs_of_another_kind_are_not_counted_as_pairs_with_an_expert(run):
    """Expert episodes are there for SFT, but the best of a group is chosen."""
    recipe = run.folder / "recipe.yaml"
    recipe.write_text(
        recipe.read_text()
        .replace("name: expert-pairs", "name: group-pairs")
        .replace("  max_extra_turns: null\n", "  per_group: 1\n")
        .replace("samples: 1", "samples: 2")
    )

    assert "pairing" not in audit(run.folder, model_of(run.folder, None))


def test_a_template_that_rewrites_history_is_a_finding(run, tiny_folder, tmp_path):
    """It is the run's own; the audit says so and goes no further."""
    template = tmp_path / "last.jinja"
    template.write_text("{{ messages[-1]['content'] }}<|im_end|>{% if add_generation_prompt %}>{% endif %}")
    recipe = run.folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("chat_template: null", f"chat_template: {template}"))

    found = audit(run.folder, str(tiny_folder))

    assert "not append-only" in found["template"]["problems"][0]
    assert found["parts"] == {}


def perturn(monkeypatch, *words):
    """Call the command line; its exit code."""
    monkeypatch.setattr(sys, "argv", ["perturn", *map(str, words)])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code or 0


def test_the_command_tells_by_its_exit_code(run, tiny_folder, tmp_path, monkeypatch, capsys):
    """0 for a run that is well; 1 for a file with a row that would be refused, and its line on the screen."""
    file = write(tmp_path / "rows.jsonl", {"messages": say("a")})

    codes = [
        perturn(monkeypatch, "inspect", run.folder, "--check"),
        perturn(monkeypatch, "inspect", file, "--model", tiny_folder, "--check"),
    ]

    printed = capsys.readouterr().out
    assert codes == [0, 1]
    assert "training would reject no row" in printed
    assert "rows, line 1: row: messages: expected an assistant message" in printed
    assert perturn(monkeypatch, "inspect", file, "--model", tiny_folder, "--check", "--json") == 1
    assert json.loads(capsys.readouterr().out)["refused"][0]["row"] == 1


@pytest.mark.parametrize("text", ["", "\n\n", "[]"])
def test_no_row_to_train_on_is_code_1(tiny_folder, tmp_path, monkeypatch, capsys, text):
    """And 2 without --check, as for malformed rows."""
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    words = ("inspect", file, "--model", tiny_folder)

    assert perturn(monkeypatch, *words, "--check") == 1
    assert "no row is left to train on" in capsys.readouterr().out
    assert perturn(monkeypatch, *words, "--check", "--json") == 1
    assert perturn(monkeypatch, *words) == perturn(monkeypatch, *words, "--json") == 2
    assert "rows.jsonl holds no row" in capsys.readouterr().err


def test_rows_that_are_all_left_out_are_code_1(tiny_folder, tmp_path, monkeypatch, capsys):
    with TrajectoryStore(tmp_path / "rows.jsonl") as store:
        store.append(played("a", status=Status.FAILED, error="broken"))

    assert perturn(monkeypatch, "inspect", tmp_path / "rows.jsonl", "--model", tiny_folder, "--check") == 1
    assert "no row is left to train on" in capsys.readouterr().out


def test_the_source_and_the_shapes_are_printed(tiny_folder, tmp_path, monkeypatch, capsys):
    """Of an array a row is named by its number and line; labelled rows have their weights."""
    said = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    file = tmp_path / "rows.json"
    rows = [said, {"prompt": "a", "completion": "b", "label": False}]
    file.write_text(json.dumps([*rows, {"prompt": "a"}], indent=1))
    words = ("inspect", file, "--model", tiny_folder)

    assert perturn(monkeypatch, *words, "--check") == 1
    printed = capsys.readouterr().out
    assert (
        "read as a JSON array: 1 × conversations (from and value, as in ShareGPT); 1 × prompt and" in printed
    )
    assert "rows, row 3 (line 19): row: expected one of the forms" in printed
    assert "plain text is read as a user message and an answer of the chat template" in printed
    file.write_text(json.dumps(rows))
    assert perturn(monkeypatch, *words, "--loss", "sft") == 0
    printed = capsys.readouterr().out
    assert "row 2 (line 1)" in printed


def test_rows_refused_for_one_reason_are_one_line(tiny_folder, tmp_path, monkeypatch, capsys):
    """Seven rows whose reasons differ in a number, and one of another kind; JSON has each row."""
    picture = {"role": "user", "content": [{"type": "image", "url": "door.png"}]}
    rows = [{"messages": [*say("a", "b")[: n % 2], picture, *say("a", "b")]} for n in range(7)]
    file = write(tmp_path / "rows.jsonl", *rows, {"messages": say("a")})

    assert perturn(monkeypatch, "inspect", file, "--model", tiny_folder, "--check") == 1

    printed = capsys.readouterr().out
    assert printed.count("expected a text part (images and the like are not supported)") == 1
    assert "rows, 7 rows, lines 1, 2, 3, 4, 5 and more: " in printed
    assert "rows, line 8: row: messages: expected an assistant message" in printed
    assert "training would reject 8 rows" in printed
    assert perturn(monkeypatch, "inspect", file, "--model", tiny_folder, "--check", "--json") == 1
    assert len(json.loads(capsys.readouterr().out)["refused"]) == 8


def test_a_template_is_chosen_on_the_command_line(tiny_folder, tmp_path, monkeypatch, capsys):
    """By name, in all three forms of the command; a name that is none is told the nearest."""
    file = write(tmp_path / "rows.jsonl", {"messages": say("a", "b")})
    words = ("inspect", file, "--model", tiny_folder, "--chat-template")

    for name, thoughts in (("qwen3", 0), ("qwen3-nothink", 1)):
        assert perturn(monkeypatch, *words, name, "--json") == 0
        row = json.loads(capsys.readouterr().out)
        text = "".join(token["text"] for token in row["chosen"])
        assert text.count("<think>\n\n</think>\n\n") == thoughts
        assert "".join(token["text"] for token in row["chosen"] if token["loss"]) == "b<|im_end|>"
    assert perturn(monkeypatch, *words, "qwen3", "--check") == 0
    assert perturn(monkeypatch, *words, "qwen3", "--loss", "sft") == 0
    assert perturn(monkeypatch, *words, "qwen-3") == 2
    assert "Did you mean 'qwen3'?" in " ".join(capsys.readouterr().err.split())


def test_the_model_must_be_named_where_there_is_no_run(tmp_path):
    """A file alone does not say whom it is for."""
    file = write(tmp_path / "rows.jsonl", {"prompt": say("a"), "chosen": [], "rejected": []})

    with pytest.raises(ConfigError, match="--model is missing"):
        model_of(file, None)


@pytest.mark.parametrize("model", [None, "nobody/nothing"])
def test_a_file_that_is_not_there_is_named_before_a_model_is_sought(tmp_path, model):
    """A model of the Hub is sought for a minute where there is no network."""
    with pytest.raises(DataError, match=r"rows\.parquet cannot be read: there is no such file or folder"):
        model_of(tmp_path / "rows.parquet", model)


def test_pairs_are_read_one_by_one(tiny_folder, tmp_path):
    """A pair of two tasks, one with a side missing, and a repeated key in trajectories, each by its line."""
    pair = PreferencePair(played("go"), played("no", reward=0.0))
    write_pairs(tmp_path / "pairs.jsonl", [pair])
    good = json.loads((tmp_path / "pairs.jsonl").read_text())
    other = json.loads(json.dumps(good))
    other["rejected"]["task"]["id"] = "t/5"
    pairs = write(tmp_path / "pairs.jsonl", good, other, {"chosen": good["chosen"]})
    twice = write(tmp_path / "rows.jsonl", good["chosen"], good["chosen"])

    reasons = [row["reason"] for row in audit(pairs, str(tiny_folder))["refused"]]
    repeated = audit(twice, str(tiny_folder))["refused"]

    assert "expected the task of chosen ('t/0'), got 't/5'" in reasons[0]
    assert reasons[1].startswith("rejected: expected a value, got no such key")
    assert [row["row"] for row in repeated] == [2]


def test_what_nothing_reads_and_turns_without_loss_are_counted(tiny_folder, tmp_path):
    """As training says it; a row is counted once for each key."""
    good = {"role": "assistant", "content": "north", "mood": "glad"}
    u, v = ({"role": "user", "content": text} for text in "uv")
    messages = [u, good, v, good | {"weight": 0}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": messages, "plan": "x"}) + "\n" for _ in range(2)))
    part = audit(file, str(tiny_folder))["parts"]["rows"]

    assert part["silent_turns"] == 2
    assert part["turns"] == 2
    assert part["unread"] == "keys that nothing reads: column plan (2 rows), mood (2 rows)"
