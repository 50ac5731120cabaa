"""The section of the page on a measurement, from a stored result, and the note on intervals of the policies."""

from perturn.data.run_paths import RunPaths

ROW = {"lost_auc": [0.5, 0.5, 0.5], "auc": [0.7, 0.6, 0.8], "cost": 1.0, "by_third": {}}
FOUND = {
    "iteration": 1, "sentences": [], "world": {"kind": "open"}, "credits": {"rloo": ROW}, "left_out": {},
    "by_episode": [], "measured": 4, "turns": 4, "episodes": 2, "tasks": 2, "continuations": 4, "played": 16,
    "failed": 0, "came_elsewhere": 0, "unscored": "No credit has a score: the advantages are noise.",
}  # fmt: skip


def test_an_exact_score_has_no_interval_and_missing_scores_a_reason(run, make):
    make.put_json(RunPaths(run).measured(), FOUND)

    page = make.page_of(run).text
    assert "No credit has a score: the advantages are noise." in page
    assert "0.500 [0.500, 0.500]" not in page.replace("<small>", " ")
    assert "[0.600, 0.800]" in page


def test_the_note_on_intervals_says_how_they_are_clustered(run, make):
    """By task, as they are computed."""
    assert "Intervals of invalid turns are clustered by task" in make.page_of(run).text
