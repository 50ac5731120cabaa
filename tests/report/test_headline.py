"""The headline of a run: one line from its first policy to its last, the same on the page and in the terminal."""

import pytest

from perturn.analysis.number_text import comparison_sentences
from perturn.analysis.run_summary import headline
from perturn.cli._scores import print_summary
from perturn.report import summarize, write_report


def row(name, mean=0.5, n=4):
    """A policy's row of the summary."""
    return {"name": name, "n": n, "mean_score": mean, "interval": [mean - 0.25, mean + 0.25]} | {
        "success_rate": mean, "success_interval": [0.0, 1.0], "mean_turns": 2.0, "failed": 0
    }  # fmt: skip


def summary(*rows, iterations=1):
    """A summary with these policies."""
    return {"policies": list(rows), "iterations": [{}] * iterations, "protocol": None, "comparison": None}


END = "; n = 4, 95\u00a0% intervals."


@pytest.mark.parametrize(
    ("names", "iterations", "expected"),
    [
        (["base", "sft", "tlm-dre"], 1, ["base", "sft", "tlm-dre"]),
        (["base", "sft"], 1, ["base", "sft"]),
        (["base", "dpo"], 1, ["base", "dpo"]),
        (["sft", "dpo"], 0, ["sft", "dpo"]),
        (["base", "ppo-clip-002", "ppo-clip-003"], 3, ["start (base)", "last (ppo-clip-003)"]),
        (["base", "sft", "ppo-clip-001", "ppo-clip-002"], 2, ["start (sft)", "last (ppo-clip-002)"]),
        (["base", "sft"], 2, ["start (base)", "last (sft)"]),
    ],
)
def test_the_line_goes_from_the_first_policy_to_the_last(names, iterations, expected):
    """Of several iterations, from where the loop started; no policy stands there twice."""
    said = headline(summary(*map(row, names), iterations=iterations))

    scores = " → ".join(f"{name} 0.500 [0.250, 0.750]" for name in expected)
    assert said == f"Average score: {scores}{END}"


@pytest.mark.parametrize("rows", [[], [row("base")], [row("base"), row("base")]])
def test_one_policy_alone_has_no_headline(rows):
    """There is nothing that it could be set beside."""
    assert headline(summary(*rows)) is None


def test_other_numbers_of_episodes_are_told_of_each():
    """As where a score was stopped."""
    said = headline(summary(row("base", n=3), row("sft")))

    assert "base 0.500 [0.250, 0.750] (n = 3) → sft 0.500 [0.250, 0.750] (n = 4); 95" in said


def test_the_page_and_the_terminal_say_the_same(run, make, capsys):
    """Of a whole run."""
    said = headline(summarize(run))

    print_summary(summarize(run))

    assert said in capsys.readouterr().out
    assert f'<p class="headline">{said}</p>' in write_report(run).read_text(encoding="utf-8")


def test_a_run_that_is_named_twice_is_not_compared_with_itself(run, make, tmp_path):
    """By another spelling of its path, or by a link."""
    (tmp_path / "link").symlink_to(run)

    page = write_report(run, run.parent / "." / run.name, tmp_path / "link")

    assert page == run / "report.html"


def test_identical_scores_are_said_to_be_identical(run, make):
    """With neither p-value nor interval of nothing."""
    for policy in ("sft", "tlm-dre"):
        (run / "evaluation" / f"{policy}.jsonl").unlink()
        make.put(run / "evaluation" / f"{policy}.jsonl", [make.trajectory(f"t{i}", 0.5) for i in range(4)])

    verdict, facts = comparison_sentences(summarize(run)["comparison"])

    assert verdict == "tlm-dre is not distinguishable from sft: their scores are identical on all 4 tasks."
    assert facts == (
        "There is no difference to test. More tasks help only if the policies act differently: compare their "
        "episodes side by side."
    )


@pytest.mark.parametrize(
    ("interval", "p_value", "verdict"),
    [
        ([-0.1, 0.1], 0.5, "b is not distinguishable from a: the interval of the difference contains zero."),
        ([-0.1, 0.1], 0.008, "Whether b differs from a is unclear: the sign-flip test rejects zero, but"),
        ([0.01, 0.1], 0.06, "Whether b differs from a is unclear: the interval leaves zero out, but"),
        ([None, None], 0.008, "Whether b differs from a is unclear: differences that are all equal give no"),
    ],
)
def test_a_verdict_needs_both_the_interval_and_the_test(interval, p_value, verdict):
    comparison = {"a": "b", "b": "a", "n": 8, "mean_difference": 0.05, "interval": interval} | {
        "p_value": p_value, "mcnemar_p_value": None, "wins": 8, "losses": 0, "ties": 0
    }  # fmt: skip

    said, _ = comparison_sentences(comparison)

    assert said.startswith(verdict)
