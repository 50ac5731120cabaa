"""The report on small run folders made of real trajectories: numbers by hand, escaping, self-containment."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from turnwise.errors import RunError
from turnwise.report import summarize, write_report
from turnwise.report.page import script_json
from turnwise.store import TrajectoryStore, write_pairs
from turnwise.types import Action, PreferencePair, Status, Task, Trajectory, Turn

HOSTILE = "</script><script>alert('x')</script><!-- \"' \u2028 <img src=http://evil.example/a.png> ${7*7}"


def trajectory(
    task, score, *, kind="boil", valid=(True, True), failed=False, success=None, text="go", policy="sft"
):
    turns = tuple(
        Turn(({"role": "user", "content": f"you see {text}"},), Action(f"Action: {text} {i}"), valid=ok)
        for i, ok in enumerate(valid)
    )
    return Trajectory(
        Task(task, kind, "test"),
        turns,
        environment="toy-1",
        prompt=({"role": "system", "content": f"Play. {text}"},),
        total_reward=score,
        success=score == 1 if success is None else success,
        terminated=True,
        status=Status.FAILED if failed else Status.COMPLETED,
        error=f"EngineFailure: {text}" if failed else None,
        policy=policy,
    )


def put(path, trajectories):
    with TrajectoryStore(path) as store:
        for item in trajectories:
            store.append(item)


def put_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def put_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def evaluate(run):
    """Four tasks. tlm-dre against sft: +0.5, +0.25, -0.25, 0."""
    sft = [
        trajectory("t1", 0.5, valid=(True, False)),
        trajectory("t2", 0.5, kind="melt"),
        trajectory("t3", 1.0, kind="melt", valid=(True, True, True, False)),
        trajectory("t4", 0.9, failed=True, success=True, valid=()),
    ]
    aligned = [
        trajectory("t1", 1.0),
        trajectory("t2", 0.75, kind="melt"),
        trajectory("t3", 0.75, kind="melt"),
        trajectory("t4", 0.0),
    ]
    put(run / "evaluation" / "base.jsonl", [trajectory(f"t{i}", 0.0) for i in range(1, 5)])
    put(run / "evaluation" / "sft.jsonl", sft)
    put(run / "evaluation" / "tlm-dre.jsonl", aligned)
    put_json(
        run / "evaluation" / "protocol.json", {"name": "toy-protocol", "panel_sha256": "ab" * 32, "n": 4}
    )


def manifest(run, **changes):
    stages = {
        "sft": {"seconds": 100.5, "peak_memory_gb": 3.25, "counts": {"tokens": 1234567}},
        "pair": {"seconds": 2.0, "peak_memory_gb": 0.5, "counts": {"pairs": 2, "dropped_small_gap": 7}},
        "align": {"seconds": 7200.0, "peak_memory_gb": 9.75, "counts": {}},
    }
    put_json(
        run / "manifest.json",
        {"recipe": "toy_tlm-dre", "seed": 3, "commit": "c0ffee" * 6, "stages": stages} | changes,
    )


@pytest.fixture
def run(tmp_path):
    """A whole run."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(
        "name: toy\nloss:\n  name: tlm-dre\n  pivot: 0.85\n", encoding="utf-8"
    )
    manifest(folder)
    experts = [trajectory(f"p{i}", 1.0, policy="expert", text=f"expert{i}") for i in range(2)]
    explored = [trajectory(f"p{i}", 0.25, valid=(True,) * 3, text=f"explored{i}") for i in range(2)]
    put(folder / "trajectories" / "expert.jsonl", experts)
    put(folder / "trajectories" / "explore.jsonl", explored)
    write_pairs(
        folder / "pairs.jsonl", [PreferencePair(*pair) for pair in zip(experts, explored, strict=True)]
    )
    sure = {"confidence": [0.95, 0.96], "weight": [0.2, 0.2]}
    rows = [
        {"chosen": sure, "rejected": {"confidence": [0.97, 0.98, 0.99], "weight": [0.2, 0.2, 0.2]}},
        {"chosen": sure, "rejected": {"confidence": [0.95, 0.375, 1.0000001], "weight": [0.2, 1.0, 0.2]}},
    ]
    put_rows(folder / "metrics" / "confidence.jsonl", rows)
    put_rows(
        folder / "metrics" / "sft.jsonl", [{"step": i, "loss": 2 / (i + 1), "mystery/a": i} for i in range(5)]
    )
    put_rows(
        folder / "metrics" / "align.jsonl",
        [
            {"step": i, "loss": 0.7, "rewards/margins": 0.125 * i, "coefficient": 10.0**-i, "clamped": 0,
             "log_ratio/chosen": float("nan") if i == 0 else 0.1 * i, "log_ratio/rejected": -0.1 * i}
            for i in range(6)
        ],
    )  # fmt: skip
    evaluate(folder)
    return folder


class Page(HTMLParser):
    """Elements and text of a page, as a browser would split it."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.scripts, self.words, self._script = [], [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):  # noqa: D102
        self.elements.append((tag, dict(attrs)))
        self._script = tag == "script"
        if self._script:
            self.scripts.append((dict(attrs), []))

    def handle_endtag(self, tag):  # noqa: D102
        self._script = False

    def handle_data(self, data):  # noqa: D102
        (self.scripts[-1][1] if self._script else self.words).append(data)

    @property
    def text(self):
        """Visible text in one line."""
        return " ".join(" ".join(self.words).split())

    def figure(self, name):
        """One plotly figure."""
        return next(
            json.loads("".join(body)) for attrs, body in self.scripts if attrs.get("id") == f"figure-{name}"
        )

    @property
    def figures(self):
        """Names of the figures."""
        return {attrs["id"].removeprefix("figure-") for attrs, _ in self.scripts if "id" in attrs} - {
            "themes"
        }


def page_of(run):
    return Page(write_report(run).read_text(encoding="utf-8"))


def test_policy_numbers_by_hand(run):
    """SFT: scores 0.5, 0.5, 1, and 0 for the failure: mean 0.5. 8 turns, 2 invalid. 1 success of 4."""
    summary = summarize(run)

    assert [policy["name"] for policy in summary["policies"]] == ["base", "sft", "tlm-dre"]
    sft = summary["policies"][1]
    assert sft["n"] == 4
    assert sft["failed"] == 1
    assert sft["mean_score"] == 0.5
    assert sft["success_rate"] == 0.25
    assert sft["mean_turns"] == 2.0
    assert sft["invalid_rate"] == 0.25
    assert sft["interval"] == pytest.approx([0.0, 1.0])  # t(3) = 3.18, sd 0.408: half 0.65, cut at 0 and 1
    assert sft["success_interval"] == pytest.approx([0.0456, 0.6994], abs=1e-4)
    assert summary["policies"][0]["interval"] == pytest.approx([0.0, 0.60236], abs=1e-5)  # 1 - 0.025^(1/4)


def test_comparison_by_hand(run):
    """Differences 0.5, 0.25, -0.25 and 0 (failed against 0): mean 0.125; 6 of 8 sign flips are as extreme."""
    comparison = summarize(run)["comparison"]

    assert (comparison["a"], comparison["b"], comparison["n"]) == ("tlm-dre", "sft", 4)
    assert comparison["mean_difference"] == 0.125
    assert comparison["p_value"] == 0.75
    assert (comparison["wins"], comparison["losses"], comparison["ties"]) == (2, 1, 1)
    assert comparison["interval"][0] < 0 < comparison["interval"][1]


def test_summary_has_the_agreed_keys(run):
    summary = summarize(run)

    assert list(summary) == ["policies", "comparison", "by_kind", "protocol", "seconds"]
    assert set(summary["policies"][0]) == {
        "name", "n", "mean_score", "interval", "success_rate", "success_interval", "mean_turns",
        "invalid_rate", "failed",
    }  # fmt: skip
    assert set(summary["comparison"]) == {
        "a", "b", "n", "mean_difference", "interval", "p_value", "wins", "losses", "ties",
    }  # fmt: skip
    assert summary["seconds"] == 7302.5
    assert summary["protocol"] == {"name": "toy-protocol", "panel_sha256": "ab" * 32, "n": 4}
    assert summary["by_kind"]["melt"]["sft"]["mean_score"] == 0.75
    assert summary["by_kind"]["boil"]["sft"] == {"n": 2, "mean_score": 0.25, "interval": [0.0, 1.0]}


def test_summary_file_is_what_summarize_returns(run):
    path = write_report(run)

    assert path == run / "report.html"
    assert json.loads((run / "summary.json").read_text(encoding="utf-8")) == summarize(run)
    assert sorted(item.name for item in run.iterdir() if item.is_file()) == [
        "manifest.json", "pairs.jsonl", "recipe.yaml", "report.html", "summary.json",
    ]  # fmt: skip


def test_report_is_the_same_each_time(run):
    first = write_report(run).read_bytes()

    assert write_report(run).read_bytes() == first


def test_page_shows_what_the_run_holds(run):
    page = page_of(run)

    assert "tlm-dre is not distinguishable from sft" in page.text
    assert "differs from sft by +0.125 on average" in page.text
    assert "4 tasks: 2 won, 1 lost, 1 tied" in page.text
    assert "dropped small gap 7" in page.text
    assert "1,234,567 tokens" in page.text
    assert "2 h 00 min" in page.text
    assert "turnwise run recipe.yaml" in page.text
    assert "pivot: 0.85" in page.text
    assert "panel_sha256 " + "ab" * 32 in page.text
    assert (
        "FAILED: EngineFailure: go" not in page.text
    )  # the failure tied, so it is not among the episodes shown
    assert "Not everything is here" not in page.text
    assert page.figures == {
        "kind", "confidence-chosen", "confidence-rejected", "confidence-all", "sft-0", "sft-3", "margin-0",
        "align-0", "density-0", "density-2", "density-3",
    }  # fmt: skip


def test_episodes_are_a_pair_then_the_largest_gain_and_loss(run):
    text = page_of(run).text

    pair, gain, loss = (
        text.index(mark)
        for mark in ("Pair 2, task p1.", "the largest gain Task t1.", "the largest loss Task t3.")
    )
    assert pair < gain < loss
    assert "you see explored1 Action: explored1 1 turn 2 · confidence 0.375 · weight 1" in text
    assert "explored0" not in text


def test_failed_episodes_change_by_their_score_of_zero(run):
    """The failure of t4 claims 0.9, but counts 0: against 0.8 that is the largest gain."""
    (run / "evaluation" / "tlm-dre.jsonl").unlink()
    put(run / "evaluation" / "tlm-dre.jsonl", [trajectory("t4", 0.8), trajectory("t1", 0.5)])

    text = page_of(run).text

    assert "the largest gain Task t4. sft: score 0.00 in 0 turns" in text
    assert "FAILED: EngineFailure: go" in text
    assert "The policies were not evaluated on the same tasks" in text


def test_confidence_bars_are_split_by_weight(run):
    """Pair 2 is shown: the first whose rejected side has both weights. Its turn 2 has weight 1."""
    figure = page_of(run).figure("confidence-rejected")

    low, high = figure["data"]
    assert (low["name"], low["x"], low["y"]) == ("weight 0.2", [1, 3], [0.95, 1.0000001])
    assert (high["name"], high["x"], high["y"]) == ("weight 1", [2], [0.375])
    assert low["marker"]["color"] != high["marker"]["color"]
    assert [shape["y0"] for shape in figure["layout"]["shapes"]] == [0.85]


def test_mean_confidence_by_turn_by_hand(run):
    """Rejected side: (0.97 + 0.95)/2, (0.98 + 0.375)/2, (0.99 + 1)/2, rounding above 1 cut."""
    figure = page_of(run).figure("confidence-all")

    line = next(trace for trace in figure["data"] if trace.get("name") == "rejected")
    assert line["y"] == pytest.approx([0.96, 0.6775, 0.995])
    assert line["customdata"] == [[2], [2], [2]]


def test_curves_leave_out_what_is_not_a_number(run):
    page = page_of(run)

    chosen, rejected = page.figure("density-0")["data"]
    assert chosen["x"] == [1, 2, 3, 4, 5]
    assert rejected["x"] == [0, 1, 2, 3, 4, 5]
    assert page.figure("margin-0")["data"][0]["y"] == [0.0, 0.125, 0.25, 0.375, 0.5, 0.625]
    assert page.figure("density-2")["layout"]["yaxis"]["type"] == "log"


def test_bars_by_kind_carry_their_intervals(run):
    figure = page_of(run).figure("kind")

    bars = next(trace for trace in figure["data"] if trace["name"] == "tlm-dre")
    cell = summarize(run)["by_kind"]["melt"]["tlm-dre"]
    assert (bars["y"], bars["x"]) == (["boil", "melt"], [0.5, 0.75])
    assert bars["error_x"]["array"][1] == pytest.approx(cell["interval"][1] - 0.75)
    assert bars["error_x"]["arrayminus"][1] == pytest.approx(0.75 - cell["interval"][0])


def test_page_fetches_nothing(run):
    """No element refers outside the page, and the policy would stop it if one did."""
    page = page_of(run)

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
    policy = next(attrs["content"] for tag, attrs in page.elements if attrs.get("http-equiv"))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert "http" not in policy


def test_only_our_two_scripts_may_run(run):
    """Every script that is not data has its hash in the policy, and there are as many hashes."""
    page = page_of(run)

    policy = next(attrs["content"] for tag, attrs in page.elements if attrs.get("http-equiv"))
    code = ["".join(body) for attrs, body in page.scripts if "type" not in attrs]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in code]
    assert re.findall(r"'sha256-([^']+)'", policy) == hashes
    assert len(code) == 2
    assert {attrs["type"] for attrs, _ in page.scripts if "type" in attrs} == {"application/json"}


def test_hostile_text_stays_text(run):
    """The same text as kind, observation, action, policy, error, metric, recipe, manifest and protocol."""
    clean = page_of(run)
    spoil(run)

    raw = write_report(run).read_text(encoding="utf-8")
    page = Page(raw)

    own = raw.replace("".join(clean.scripts[-2][1]), "")
    assert HOSTILE not in own
    assert "<img" not in own
    assert "\u2028" not in "".join("".join(body) for attrs, body in page.scripts if "type" in attrs)
    assert [tag for tag, _ in page.elements if tag == "img"] == []
    assert len([1 for attrs, _ in page.scripts if "type" not in attrs]) == 2
    assert " ".join(HOSTILE.split()) in page.text
    labels = page.figure("kind")["data"][-1][
        "y"
    ]  # plotly reads <b> and <a> in labels, so they are escaped too
    assert "&lt;/script&gt;" in labels[0]
    assert "<" not in "".join(labels)
    for name in page.figures:
        assert page.figure(name)["data"]


def spoil(run):
    bad = trajectory("t1", 1.0, kind=HOSTILE, text=HOSTILE, policy=HOSTILE)
    worse = trajectory("t1", 0.0, kind=HOSTILE, text=HOSTILE, policy=HOSTILE, failed=True)
    for name in ("sft", "tlm-dre"):
        (run / "evaluation" / f"{name}.jsonl").unlink()
    put(run / "evaluation" / "sft.jsonl", [worse])
    put(run / "evaluation" / "<b>&loss.jsonl", [bad])
    write_pairs(run / "pairs.jsonl", [PreferencePair(bad, worse)] * 2)
    put_rows(run / "metrics" / "align.jsonl", [{"step": 0, HOSTILE: 1.0, "x/" + HOSTILE: 2.0}])
    (run / "recipe.yaml").write_text("# " + HOSTILE.replace("\u2028", ""), encoding="utf-8")
    put_json(run / "evaluation" / "protocol.json", {HOSTILE: HOSTILE})
    stages = {HOSTILE: {"seconds": 1.0, "peak_memory_gb": 1.0, "counts": {HOSTILE: 1}}}
    manifest(run, recipe=HOSTILE, commit=HOSTILE, stages=stages, extra={HOSTILE: [HOSTILE]})


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
def test_partial_runs_report_what_exists(run, kept, expected):
    for path in sorted(run.rglob("*")):
        if path.is_file() and str(path.relative_to(run)) not in kept:
            path.unlink()

    summary, page = summarize(run), page_of(run)

    assert [policy["name"] for policy in summary["policies"]] == expected.get("policies", [])
    assert summary["comparison"] is None
    assert summary["protocol"] is None
    assert "Not everything is here" in page.text
    assert ("This run has no preference pairs (pairs.jsonl)." in page.text) == ("pairs.jsonl" not in kept)
    missing = "no evaluation of an aligned policy"
    assert (missing in page.text) == ("evaluation/tlm-dre.jsonl" not in kept)


def test_empty_evaluation_counts_as_missing(run):
    (run / "evaluation" / "tlm-dre.jsonl").write_text("")

    assert [policy["name"] for policy in summarize(run)["policies"]] == ["base", "sft"]
    assert "no evaluation of an aligned policy" in page_of(run).text


def test_empty_metrics_count_as_missing(run):
    (run / "metrics" / "sft.jsonl").write_text("")

    assert "This run has no training curves of SFT (metrics/sft.jsonl)." in page_of(run).text


def test_samples_of_a_task_are_averaged_before_they_are_compared(run):
    """Task t1: (1.0 + 0.5)/2 = 0.75 against 0.5."""
    (run / "evaluation" / "tlm-dre.jsonl").unlink()
    samples = [trajectory("t1", 1.0), replace(trajectory("t1", 0.5), sample=1)]
    put(run / "evaluation" / "tlm-dre.jsonl", samples)

    comparison = summarize(run)["comparison"]

    assert (comparison["n"], comparison["mean_difference"]) == (1, 0.25)


def test_policies_without_a_task_in_common_are_not_compared(run):
    (run / "evaluation" / "tlm-dre.jsonl").unlink()
    put(run / "evaluation" / "tlm-dre.jsonl", [trajectory("elsewhere", 1.0)])

    assert summarize(run)["comparison"] is None
    assert page_of(run).text


def test_numbers_that_are_none_do_not_stop_the_report(run):
    (run / "evaluation" / "protocol.json").write_text('{"temperature": NaN}')

    assert summarize(run)["protocol"] == {"temperature": None}
    assert json.loads((write_report(run).parent / "summary.json").read_text())


def test_turns_show_weight_validity_calls_and_length(run):
    """Of the pair shown, turn 2 of the rejected side has the high weight. The others here are edge cases."""
    call = {"name": "search", "arguments": {"query": "tin"}}
    turn = Turn(({"role": "user", "content": "x" * 4500},), Action("", tool_calls=(call,)), valid=False)
    rejected = replace(trajectory("p1", 0.0), turns=(turn, turn, turn))
    write_pairs(run / "pairs.jsonl", [PreferencePair(trajectory("p1", 1.0), rejected)] * 2)

    page = page_of(run)

    classes = [attrs["class"] for tag, attrs in page.elements if attrs.get("class", "").startswith("turn ")]
    assert classes[:5] == ["turn low", "turn low", "turn low", "turn high", "turn low"]
    assert "x" * 4000 + " … (500 more characters)" in page.text
    assert "x" * 4001 not in page.text
    assert '{"name": "search", "arguments": {"query": "tin"}}' in page.text
    assert page.text.count("· invalid") == 3 + 2  # and those of sft on t1 and t3


def test_only_ratios_are_drawn_on_a_logarithmic_axis(run):
    put_rows(run / "metrics" / "sft.jsonl", [{"step": i, "learning_rate": 10.0**-i} for i in range(6)])

    assert "type" not in page_of(run).figure("sft-2")["layout"]["yaxis"]


def test_embedded_json_cannot_leave_its_element():
    """Each of these ends a script element, opens a comment, or ends a line for a script."""
    assert script_json('"</script><!--&\u2028\u2029"') == (
        '"\\u003c/script\\u003e\\u003c!--\\u0026\\u2028\\u2029"'
    )


def test_policies_come_in_the_order_they_were_evaluated(run):
    for name in ("another", "zeta", "dpo"):
        put(run / "evaluation" / f"{name}.jsonl", [trajectory("t1", 0.5)])
    stages = {f"evaluate-{name}": {"seconds": 1} for name in ("tlm-dre", "sft", "zeta", "dpo", "never")}
    manifest(run, stages=stages)

    summary = summarize(run)

    assert [policy["name"] for policy in summary["policies"]] == [
        "base",
        "sft",
        "tlm-dre",
        "zeta",
        "dpo",
        "another",
    ]
    assert summary["comparison"]["a"] == "another"


def test_scores_outside_0_and_1_have_what_interval_the_data_gives(run):
    (run / "evaluation" / "base.jsonl").unlink()
    put(run / "evaluation" / "base.jsonl", [trajectory("t1", -100.0)])

    policy = summarize(run)["policies"][0]

    assert (policy["mean_score"], policy["interval"]) == (-100.0, [None, None])
    assert "-100.000 ? to ?" in page_of(run).text


def test_confidence_of_other_pairs_is_left_out_and_said(run):
    empty = {"confidence": [], "weight": []}
    put_rows(run / "metrics" / "confidence.jsonl", [{"chosen": empty, "rejected": empty}])

    page = page_of(run)

    assert "metrics/confidence.jsonl has 1 rows and pairs.jsonl 2" in page.text
    assert "confidence-all" not in page.figures
    assert "Pair 1, task p0." in page.text


def test_a_line_being_written_is_left_out(run):
    with (run / "metrics" / "align.jsonl").open("a") as file:
        file.write('{"step": 6, "rewards/mar')

    assert len(page_of(run).figure("margin-0")["data"][0]["x"]) == 6


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics/sft.jsonl", '{"step": 1}\nnonsense\n', r"line 2 of '.*sft.jsonl' is not JSON"),
        ("metrics/sft.jsonl", "[1]\n", "line 1 of .* must be a JSON object"),
        ("metrics/confidence.jsonl", '{"chosen": {}}\n', "line 1 of .* must give chosen and rejected"),
        (
            "metrics/confidence.jsonl",
            '{"chosen": {"confidence": [1], "weight": []}, "rejected": {"confidence": [], "weight": []}}\n',
            "line 1 of",
        ),
        ("manifest.json", "{", "manifest.json' is not JSON"),
        ("manifest.json", "[]", "must hold a JSON object, got list"),
        ("recipe.yaml", "a: [", "recipe.yaml' is not YAML"),
    ],
)
def test_malformed_files_are_named(run, name, text, message):
    (run / name).write_text(text)

    with pytest.raises(RunError, match=message) as caught:
        write_report(run)
    assert "\n" not in str(caught.value)


def test_unreadable_text_is_named(run):
    (run / "recipe.yaml").write_bytes(b"\xff\xfe\xfa")

    with pytest.raises(RunError, match=r"recipe.yaml' cannot be read"):
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


@pytest.mark.parametrize(
    ("scores", "verdict"),
    [
        ((1.0, 0.5), "tlm-dre is better than sft."),
        ((0.5, 1.0), "tlm-dre is worse than sft."),
        ((0.5, 0.5), "tlm-dre is not distinguishable from sft"),
    ],
)
def test_the_verdict_follows_the_interval(run, scores, verdict):
    for name, score in zip(("tlm-dre", "sft"), scores, strict=True):
        (run / "evaluation" / f"{name}.jsonl").unlink()
        put(run / "evaluation" / f"{name}.jsonl", [trajectory(f"t{i}", score) for i in range(20)])

    assert verdict in page_of(run).text
