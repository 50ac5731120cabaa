"""Stages of several iterations as one row."""

from perturn.report.report_page import by_stem


def test_counts_are_summed_and_means_are_not():
    """2 + 3 forks at turns 1.5 and 2.5; the predictor said something once."""
    stages = {
        "branch-001": {"seconds": 1.0, "counts": {"forks": 2, "mean_turn": 1.5, "explained_variance": 0.25}},
        "branch-002": {"seconds": 2.0, "counts": {"forks": 3, "mean_turn": 2.5}},
    }

    found = by_stem(stages)["branch, 2 times"]

    assert found["seconds"] == 3
    assert found["counts"] == {"forks": 5, "mean_turn": 2.0, "explained_variance": 0.25}


def test_a_largest_count_of_all_iterations_is_no_sum():
    """Tokens lagged by one version at most, in each of three iterations."""
    stages = {f"credit-00{number}": {"counts": {"lag_most": number % 2, "asked": 4}} for number in (1, 2, 3)}

    assert by_stem(stages)["credit, 3 times"]["counts"] == {"lag_most": 1, "asked": 12}
