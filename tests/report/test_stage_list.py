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
