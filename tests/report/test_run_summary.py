"""The numbers of a run, by hand, and the words for them."""

import json
from dataclasses import replace

import pytest

from perturn.analysis.episode_numbers import numbers_of
from perturn.analysis.run_summary import policy_row
from perturn.report import summarize, write_report
from perturn.types import Action, Task, Trajectory, Turn


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
    assert sft["turns_p75"] == 2  # of 0, 2, 2 and 4
    assert sft["mean_tokens"] is None
    assert sft["invalid_rate"] == 0.25
    # t(3) = 3.18245, error 0.408/2 as of 6 trials: half 3.18245/2.688 * sqrt(0.25/6 + 10.128/144) = 0.39622
    assert sft["interval"] == pytest.approx([0.10378, 0.89622], abs=1e-4)
    assert sft["success_interval"] == pytest.approx([0.0456, 0.6994], abs=1e-4)
    assert summary["policies"][0]["interval"] == pytest.approx([0.0, 0.48989], abs=1e-5)  # z^2/(4 + z^2)


@pytest.mark.parametrize(
    ("lengths", "most"), [([7], 7), ([1, 2, 3, 4], 3), ([5, 1, 4, 2, 3], 4), ([1, 1, 1, 9], 1)]
)
def test_three_quarters_of_the_episodes_end_within(lengths, most):
    """The least such number, which is that of some episode: of 5 episodes 4 are needed."""
    turn = Turn((), Action("x", (1, 2)))

    episodes = [Trajectory(Task(f"{n}"), (turn,) * length) for n, length in enumerate(lengths)]
    row = policy_row([numbers_of(one) for one in episodes])

    assert row["turns_p75"] == most
    assert row["mean_tokens"] == 2 * sum(lengths) / len(lengths)


def test_comparison_by_hand(run):
    """Differences 0.5, 0.25, -0.25 and 0 (failed against 0): mean 0.125; 6 of 8 sign flips are as extreme."""
    comparison = summarize(run)["comparison"]

    assert (comparison["a"], comparison["b"], comparison["n"]) == ("tlm-dre", "sft", 4)
    assert comparison["mean_difference"] == 0.125
    assert comparison["p_value"] == 0.75
    assert (comparison["wins"], comparison["losses"], comparison["ties"]) == (2, 1, 1)
    assert comparison["interval"][0] < 0 < comparison["interval"][1]


def test_a_score_above_one_leaves_all_scores_of_the_run_unbounded(run, make):
    """The scores of sft lie between 0 and 1. Its interval by Student's t is 0.5 +- 3.18245 * 0.408 / 2."""
    (run / "evaluation" / "base.jsonl").unlink()
    make.put(run / "evaluation" / "base.jsonl", [make.trajectory(f"t{n}", 2.0 * n) for n in range(1, 5)])

    summary = summarize(run)

    assert summary["policies"][1]["interval"] == pytest.approx([-0.14962, 1.14962], abs=1e-4)
    assert summary["by_kind"]["boil"]["sft"]["interval"][0] < 0


def test_summary_has_the_agreed_keys(run):
    summary = summarize(run)

    assert list(summary) == [
        "policies",
        "comparison",
        "by_kind",
        "protocol",
        "unfinished",
        "seconds",
        "iterations",
    ]
    assert set(summary["policies"][0]) == {
        "name", "n", "mean_score", "interval", "success_rate", "success_interval", "mean_turns",
        "turns_p75", "mean_tokens", "invalid_rate", "failed", "errors",
    }  # fmt: skip
    assert set(summary["comparison"]) == {
        "a", "b", "n", "mean_difference", "interval", "p_value", "mcnemar_p_value", "wins", "losses", "ties",
    }  # fmt: skip
    assert summary["seconds"] == 7302.5
    assert summary["protocol"] == {"name": "toy-protocol", "panel_sha256": "ab" * 32, "n": 4}
    assert summary["by_kind"]["melt"]["sft"]["mean_score"] == 0.75
    assert summary["by_kind"]["boil"]["sft"] == {
        "n": 2, "mean_score": 0.25, "interval": pytest.approx([0.00115, 0.98973], abs=1e-5),
    }  # fmt: skip


def test_summary_file_is_what_summarize_returns(run):
    path = write_report(run)

    assert path == run / "report.html"
    assert json.loads((run / "summary.json").read_text(encoding="utf-8")) == summarize(run)
    assert sorted(item.name for item in run.iterdir() if item.is_file()) == [
        "manifest.json", "pairs.jsonl", "recipe.yaml", "report.html", "summary.json", "tokens.json",
    ]  # fmt: skip


def test_samples_of_a_task_are_averaged_before_they_are_compared(run, make):
    """Task t1: (1.0 + 0.5)/2 = 0.75 against 0.5."""
    (run / "evaluation" / "tlm-dre.jsonl").unlink()
    samples = [make.trajectory("t1", 1.0), replace(make.trajectory("t1", 0.5), sample=1)]
    make.put(run / "evaluation" / "tlm-dre.jsonl", samples)

    comparison = summarize(run)["comparison"]

    assert (comparison["n"], comparison["mean_difference"]) == (1, 0.25)


def test_policies_without_a_task_in_common_are_not_compared(run, make):
    (run / "evaluation" / "tlm-dre.jsonl").unlink()
    make.put(run / "evaluation" / "tlm-dre.jsonl", [make.trajectory("elsewhere", 1.0)])

    assert summarize(run)["comparison"] is None
    assert make.page_of(run).text


def test_numbers_that_are_none_do_not_stop_the_report(run):
    (run / "evaluation" / "protocol.json").write_text('{"temperature": NaN}')

    assert summarize(run)["protocol"] == {"temperature": None}
    assert json.loads((write_report(run).parent / "summary.json").read_text())


def test_policies_come_in_the_order_they_were_evaluated(run, make):
    for name in ("another", "zeta", "dpo"):
        make.put(run / "evaluation" / f"{name}.jsonl", [make.trajectory("t1", 0.5)])
    stages = {f"evaluate-{name}": {"seconds": 1} for name in ("tlm-dre", "sft", "zeta", "dpo", "never")}
    make.manifest(run, stages=stages)

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


def test_scores_outside_0_and_1_have_what_interval_the_data_gives(run, make):
    (run / "evaluation" / "base.jsonl").unlink()
    make.put(run / "evaluation" / "base.jsonl", [make.trajectory("t1", -100.0)])

    policy = summarize(run)["policies"][0]

    assert (policy["mean_score"], policy["interval"]) == (-100.0, [None, None])
    assert "-100.000 [?, ?]" in make.page_of(run).text


def test_equal_differences_without_bounds_are_unclear_rather_than_indistinguishable(run, make):
    """Scores below 0 have no known bounds, so eight equal gains have no interval, whatever the sign flips say."""
    for name, score in (("tlm-dre", -1.0), ("sft", -2.0)):
        (run / "evaluation" / f"{name}.jsonl").unlink()
        make.put(run / "evaluation" / f"{name}.jsonl", [make.trajectory(f"t{i}", score) for i in range(8)])

    text = make.page_of(run).text

    assert (
        "Whether tlm-dre differs from sft is unclear: differences that are all equal give no interval."
        in text
    )
    assert "p = 0.008" in text


@pytest.mark.parametrize(
    ("scores", "verdict"),
    [
        ((1.0, 0.5), "tlm-dre is better than sft."),
        ((0.5, 1.0), "tlm-dre is worse than sft."),
        ((0.5, 0.5), "tlm-dre is not distinguishable from sft"),
    ],
)
def test_the_verdict_follows_the_interval(run, scores, verdict, make):
    for name, score in zip(("tlm-dre", "sft"), scores, strict=True):
        (run / "evaluation" / f"{name}.jsonl").unlink()
        make.put(run / "evaluation" / f"{name}.jsonl", [make.trajectory(f"t{i}", score) for i in range(20)])

    assert verdict in make.page_of(run).text
