"""The page: what it shows, what it leaves out and says so, and which files it refuses."""

import base64
import gzip
import hashlib
import re

import pytest

from perturn.errors import RunError
from perturn.report import summarize, write_report
from perturn.report.report_sections import script_json


def test_report_is_the_same_each_time(run):
    first = write_report(run).read_bytes()

    assert write_report(run).read_bytes() == first


def test_page_shows_what_the_run_holds(run, make):
    page = make.page_of(run)

    assert "tlm-dre is not distinguishable from sft" in page.text
    assert "differs from sft by +0.125 on average" in page.text
    assert "4 tasks: 2 won, 1 lost, 1 tied" in page.text
    assert "dropped small gap 7" in page.text
    assert "1,234,567 tokens" in page.text
    assert "2 h 00 min" in page.text
    assert "perturn run recipe.yaml" in page.text
    assert "pivot: 0.85" in page.text
    assert "panel_sha256 " + "ab" * 32 in page.text
    assert "Not everything is here" not in page.text
    assert page.figures == {
        "kind", "confidence-chosen", "confidence-rejected", "confidence-all", "sft-0", "sft-3", "margin-0",
        "align-0", "density-0", "density-2", "density-3", "confidence-spread", "confidence-weight", "length",
        "errors", "tasks-0",
    }  # fmt: skip


def test_page_fetches_nothing(run, make):
    """No element refers outside the page, and the policy would stop it if one did."""
    page = make.page_of(run)

    links = [
        value
        for _, attrs in page.elements
        for key, value in attrs.items()
        if key in ("src", "href", "srcset", "action")
    ]
    assert all(link.startswith("#") for link in links)
    style = "".join(page.words)
    assert "@import" not in style
    assert "url(" not in style
    policy = page.content_policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert "unsafe-eval" not in policy
    assert "'unsafe-inline'" not in policy.replace("style-src-attr 'unsafe-inline'", "")
    assert "http" not in policy


def test_only_our_script_and_plotly_may_run(run, make):
    """The policy has the hashes of our script, of the packed library and of our style, and no others run."""
    page = make.page_of(run)

    packed = next("".join(body) for attrs, body in page.scripts if attrs.get("id") == "library")
    library = gzip.decompress(base64.b64decode(packed)).decode()
    assert len(page.code) == 1
    assert re.search("script-src ([^;]*);", page.content_policy)[1].split() == [
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in (library, page.code[0])
    ]
    assert {attrs["type"] for attrs, _ in page.scripts if "type" in attrs} == {
        "application/json",
        "text/plain",
    }


def test_hostile_text_stays_text(run, make):
    """The same text as kind, observation, action, policy, error, metric, recipe, manifest and protocol."""
    make.spoil(run)

    raw = write_report(run).read_text(encoding="utf-8")
    page = make.Page(raw)

    assert make.HOSTILE not in raw
    assert "<img" not in raw
    assert "\u2028" not in "".join("".join(body) for attrs, body in page.scripts if "type" in attrs)
    assert [tag for tag, _ in page.elements if tag == "img"] == []
    assert len(page.code) == 1
    assert " ".join(make.HOSTILE.split()) in page.text
    labels = page.figure("kind")["data"][-1][
        "y"
    ]  # plotly reads <b> and <a> in labels, so they are escaped too
    assert "&lt;/script&gt;" in labels[0]
    assert "<" not in "".join(labels)
    for name in page.figures:
        assert page.figure(name)["data"]


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        (["manifest.json"], {"cost": True}),
        (["recipe.yaml"], {}),
        (["trajectories/expert.jsonl", "metrics/sft.jsonl"], {}),
        (["pairs.jsonl"], {}),
        (["metrics/align.jsonl"], {}),
        (["evaluation/base.jsonl"], {"policies": ["base"]}),
        (["evaluation/base.jsonl", "evaluation/sft.jsonl", "manifest.json"], {"policies": ["base", "sft"]}),
        (["evaluation/tlm-dre.jsonl"], {"policies": ["tlm-dre"]}),
    ],
)
def test_partial_runs_report_what_exists(run, kept, expected, make):
    for path in sorted(run.rglob("*")):
        if path.is_file() and str(path.relative_to(run)) not in kept:
            path.unlink()

    summary, page = summarize(run), make.page_of(run)

    assert [policy["name"] for policy in summary["policies"]] == expected.get("policies", [])
    assert summary["comparison"] is None
    assert summary["protocol"] is None
    assert "Notes on missing parts" in page.text
    assert "This run has no protocol of the evaluation (evaluation/protocol.json)." in page.text
    assert ("This run has no preference pairs (pairs.jsonl)." in page.text) == ("pairs.jsonl" not in kept)
    missing = "no evaluation of an aligned policy"
    assert (missing in page.text) == ("evaluation/tlm-dre.jsonl" not in kept)


def test_empty_evaluation_counts_as_missing(run, make):
    (run / "evaluation" / "tlm-dre.jsonl").write_text("")

    assert [policy["name"] for policy in summarize(run)["policies"]] == ["base", "sft"]
    assert "no evaluation of an aligned policy" in make.page_of(run).text


def test_empty_metrics_count_as_missing(run, make):
    (run / "metrics" / "sft.jsonl").write_text("")

    assert "This run has no training curves of SFT (metrics/sft.jsonl)." in make.page_of(run).text


def test_embedded_json_cannot_leave_its_element():
    """Each of these ends a script element, opens a comment, or ends a line for a script."""
    assert script_json('"</script><!--&\u2028\u2029"') == (
        '"\\u003c/script\\u003e\\u003c!--\\u0026\\u2028\\u2029"'
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics/sft.jsonl", '{"step": 1}\nnonsense\n', r"sft.jsonl:2: expected JSON"),
        ("metrics/sft.jsonl", "[1]\n", "sft.jsonl:1: expected a JSON object"),
        (
            "metrics/confidence.jsonl",
            '{"chosen": {}}\n',
            "jsonl:1: chosen: confidence: expected a value, got none",
        ),
        (
            "metrics/confidence.jsonl",
            '{"chosen": {"confidence": [1], "weight": []}, "rejected": {"confidence": [], "weight": []}}\n',
            "jsonl:1: chosen: expected lists of one length",
        ),
        ("manifest.json", "{", "manifest.json: expected JSON"),
        ("manifest.json", "[]", "manifest.json: expected a JSON object"),
        ("recipe.yaml", "a: [", "recipe.yaml is not YAML"),
    ],
)
def test_malformed_files_are_named(run, name, text, message):
    (run / name).write_text(text)

    with pytest.raises(RunError, match=message) as caught:
        write_report(run)
    assert "\n" not in str(caught.value)


def test_unreadable_text_is_named(run):
    (run / "recipe.yaml").write_bytes(b"\xff\xfe\xfa")

    with pytest.raises(RunError, match=r"recipe.yaml cannot be read"):
        summarize(run)


@pytest.mark.parametrize("call", [summarize, write_report])
def test_missing_folder_is_one_line(tmp_path, call):
    with pytest.raises(RunError, match=r"^run folder '.*nowhere' does not exist\. [^\n]*$"):
        call(tmp_path / "nowhere")


def test_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")

    with pytest.raises(RunError, match="holds nothing of a run"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_failed_write_leaves_the_old_report(run, monkeypatch):
    (run / "report.html").write_text("old")

    def refuse(self, target):
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.replace", refuse)

    with pytest.raises(RunError, match="cannot be written: disk full"):
        write_report(run)
    assert (run / "report.html").read_text() == "old"
    assert not list(run.glob(".*"))


def test_what_the_recipe_leaves_out_is_not_missed(run, make):
    """A run that scores one model has no SFT, pairs or alignment, and no weights of turns."""
    for each in [*run.rglob("*.jsonl"), run / "tokens.json"]:
        if each.name != "base.jsonl":
            each.unlink()
    sections = ("expert", "sft", "align", "explore", "rows")
    (run / "recipe.yaml").write_text("".join(f"{name}: null\n" for name in sections), encoding="utf-8")

    page = make.page_of(run)

    assert "This run has no" not in page.text
    assert "What the turns weigh" not in page.text
