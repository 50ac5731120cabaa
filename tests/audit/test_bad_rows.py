"""Rows that the audit refuses or warns of: malformed rows, files that are none, unknown words, and wrong arguments."""

import json
import sys

import pytest

from perturn.audit import audit, inspect_json
from perturn.cli import main
from perturn.errors import ConfigError, DataError
from support.audited import RECORD, record, say, shown, write

BAD = {
    "without assistant": (
        [{"messages": say("a")}],
        "rows.jsonl:1: row: messages: expected an assistant message",
    ),
    "later line": ([{"messages": say("a", "b")}, {"messages": say("a")}], "rows.jsonl:2: "),
    "equal": ([{"chosen": say("a", "b"), "rejected": say("a", "b")}], "expected another text than in chosen"),
    "empty text": (
        [{"messages": say("a", "")}],
        "expected an assistant message that carries loss, but all of them are empty",
    ),
    "list": (
        [{"messages": say("a", "b")}, [1, 2]],
        "rows.jsonl:2: row: expected a JSON object, got [1, 2]",
    ),
    "array": (
        [[1, 2]],
        "rows.jsonl: row 1 (line 1) (and 1 more: row 2 (line 1)): row: expected a JSON object",
    ),
}


@pytest.mark.parametrize(("rows", "says"), BAD.values(), ids=BAD.keys())
def test_a_malformed_row_is_refused_with_its_line(tiny_folder, tmp_path, rows, says):
    """Nothing is shown of rows that training would refuse."""
    file = write(tmp_path / "rows.jsonl", *rows)

    with pytest.raises(DataError) as caught:
        list(inspect_json(file, str(tiny_folder)))

    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (record(reward=float("nan")), "turns[0].reward: expected a finite number, got nan"),
        (
            record(text=""),
            "the trajectory has no turn that carries loss: of 1 turns 1 are empty or cut inside, 0 are marked",
        ),
        (record(token_ids=[], logprobs=[]), "token_ids must hold at least one token or be None"),
        (RECORD | {"turns": []}, "has no assistant turn; remove the row"),
        ({"chosen": record(), "rejected": record()}, "chosen equals rejected for task 't'; remove the pair"),
        (
            {"chosen": record(), "rejected": record(text="")},
            "rejected has no turn that carries loss: of 1 turns",
        ),
    ],
)
@pytest.mark.parametrize("as_json", [True, False])
def test_a_malformed_record_is_refused(tiny_folder, tmp_path, monkeypatch, capsys, row, says, as_json):
    """NaN reward, an action of nothing, no turns, equal sides: code 2 and one line; JSON has the reason too."""
    file = write(tmp_path / "rows.jsonl", row)
    words = ["inspect", str(file), "--model", str(tiny_folder)] + ["--json"] * as_json
    monkeypatch.setattr(sys, "argv", ["perturn", *words])

    with pytest.raises(SystemExit, match="2"):
        main()

    printed = capsys.readouterr()
    if as_json:
        assert json.loads(printed.out)["row"] == 1
        assert says in json.loads(printed.out)["reason"]
    else:
        assert printed.out == ""
    assert printed.err.startswith(f"error: {file}:1: ")
    assert says in printed.err
    assert len(printed.err.splitlines()) == 1


@pytest.mark.parametrize("as_json", [True, False])
def test_good_rows_are_shown_and_bad_ones_named_with_their_lines(
    tiny_folder, tmp_path, monkeypatch, capsys, as_json
):
    """Lines 1 and 4 of 7 are good; 2 and 3 lack the answer, 5 and 7 say nothing, 6 is cut off; code 2."""
    good, asked, silent = ({"messages": say(*texts)} for texts in (("a", "b"), ("a",), ("a", "")))
    file = write(tmp_path / "rows.jsonl", good, asked, asked, good, silent, "cut", silent)
    file.write_text(file.read_text().replace('"cut"', '{"messages": ['))
    words = ["inspect", str(file), "--model", str(tiny_folder)] + ["--json"] * as_json
    monkeypatch.setattr(sys, "argv", ["perturn", *words])

    with pytest.raises(SystemExit, match="2"):
        main()

    printed = capsys.readouterr()
    first, second, third = printed.err.splitlines()
    assert first.startswith(f"error: {file}:2 (and 1 more: line 3): row: messages: expected an assistant")
    assert second.startswith(
        f"{file}:5 (and 1 more: line 7): row: messages: expected an assistant message that"
    )
    assert third.startswith(f"{file}:6: row: expected JSON, got")
    if as_json:
        rows = [json.loads(line) for line in printed.out.splitlines()]
        assert [row.get("row") for row in rows] == [None, 2, 3, None, 5, 6, 7]
        assert rows[0]["chosen"] == rows[3]["chosen"] != []
    else:
        assert printed.out.count("w=1]") == 2
        assert "line 4" in printed.out
        assert "2 rows, 2 trajectories" in printed.out


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe\x00\x01", "this is text in UTF-16"),
        (b"not json\n", r"rows\.jsonl:1: .*this is text, not JSON"),
        (b"\n", r"rows\.jsonl holds no row \(JSON lines\)"),
    ],
)
def test_a_file_that_is_no_jsonl_is_refused(tiny_folder, tmp_path, content, says):
    """Binary, text, a blank line: each is named."""
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)

    with pytest.raises(DataError, match=says):
        list(inspect_json(file, str(tiny_folder)))


def test_a_missing_file_is_refused_by_name(tiny_folder, tmp_path):
    """Also a folder without rows."""
    (tmp_path / "none").mkdir()
    for missing, says in {
        "none.jsonl": "there is no such file or folder",
        "none": "holds no file of rows",
    }.items():
        with pytest.raises(DataError, match=f"{missing} .*{says}.* Correct the path, or give a file of rows"):
            list(inspect_json(tmp_path / missing, str(tiny_folder)))


def test_a_wrong_loss_or_limit_is_refused(tiny_folder, tmp_path):
    """Before the model is loaded."""
    with pytest.raises(ConfigError, match=r"unknown loss\.name 'tlm-der'\. Did you mean 'tlm-dre'\?"):
        shown(tmp_path, tiny_folder, "tlm-der")
    with pytest.raises(ConfigError, match=r"limit must be >= 0, got -1\."):
        shown(tmp_path, tiny_folder, "dpo", limit=-1)
    with pytest.raises(ConfigError, match=r"limit must be >= 0, got -1\."):
        list(inspect_json(tmp_path, str(tiny_folder), limit=-1))


def test_text_that_the_tokenizer_does_not_know_is_counted(tmp_path, monkeypatch, capsys):
    """tiny-agent knows `box` and no `kitchen`."""
    file = write(tmp_path / "rows.jsonl", {"messages": say("go to kitchen", "box")})
    monkeypatch.setattr(sys, "argv", ["perturn", "inspect", str(file), "--model", "tiny-agent", "--check"])
    with pytest.raises(SystemExit, match="0"):
        main()

    assert audit(file, "tiny-agent")["parts"]["rows"]["unknown_tokens"] == 1
    assert "tokens whose text the tokenizer does not know: 1 (" in capsys.readouterr().out


def test_with_a_loss_the_audit_rejects_rows_that_the_loss_cannot_read(tmp_path, tiny_folder):
    """A label of 1 is neither true nor false; without a loss, it is an ignored column."""
    conversation = {"prompt": say("a"), "completion": say("", "b")[1:]}
    file = write(tmp_path / "rows.jsonl", conversation | {"label": True}, conversation | {"label": 1})

    found = {name: audit(file, str(tiny_folder), loss_name=name) for name in ("kto", "sft", None)}

    rejected = {name: [row["row"] for row in each["refused"]] for name, each in found.items()}
    assert rejected == {"kto": [2], "sft": [1], None: []}
    assert "label must be true or false, got 1" in found["kto"]["refused"][0]["reason"]
