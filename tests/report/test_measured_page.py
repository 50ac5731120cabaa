"""The section of the page on a measurement, from a stored result, and the note on intervals of the policies."""

import pytest

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


@pytest.mark.parametrize("few", [{}, {"few_tasks": False}, {"few_tasks": True}])
def test_few_tasks_are_told(run, make, few):
    """A file of an earlier version does not say it."""
    make.put_json(RunPaths(run).measured(), FOUND | few)

    assert ("There are too few tasks" in make.page_of(run).text) == few.get("few_tasks", False)


@pytest.mark.parametrize("calls", [{}, {"calls": [[], [{"name": "look"}]]}])
def test_the_actions_of_a_measured_episode_are_without_thoughts(run, make, calls):
    """A file of an earlier version has no calls. A score that is shown as a dash sorts as missing."""
    numbers = {
        "advantage": [0.5, None],
        "low": [0.25, None],
        "high": [0.75, None],
        "credits": {"rloo": [1.0, 0.0]},
    }
    texts = ["Thought: so\nAction: open cabinet 3", ""]
    episode = {"task": "a", "sample": 0, "success": False, "actions": texts, **numbers, **calls}
    unknown = {"rloo": ROW | {"auc": [0.7125, None, None]}}
    make.put_json(RunPaths(run).measured(), FOUND | {"by_episode": [episode], "credits": unknown})

    page = make.page_of(run)

    assert "1 open cabinet 3 0.500" in page.text
    assert ('{"name": "look"}' in page.text) == bool(calls)
    assert "0.7125" not in [attributes.get("data-value") for _, attributes in page.elements]


def test_the_note_on_intervals_says_how_they_are_clustered(run, make):
    """By task, as they are computed."""
    assert "Intervals of invalid turns are clustered by task" in make.page_of(run).text
