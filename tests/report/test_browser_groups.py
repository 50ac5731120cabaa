"""A run of many iterations in a real browser: learning curve, groups, the weights in the margin."""

import pytest

from perturn.report import write_report

from .views import faults, texts

pytestmark = pytest.mark.slow  # a browser takes several seconds for each view

GROUP = "#group?run=online&set=trajectories%2Fexplore-003&task=a"
VIEWS = {"report": "", "list": "#episodes?mode=groups", "group": GROUP, "nowhere": GROUP + "z"}


@pytest.fixture(scope="module")
def file(tmp_path_factory, make):
    """Its report."""
    return write_report(make.online_run(tmp_path_factory.mktemp("groups") / "online"))


@pytest.mark.parametrize(("width", "theme"), [(375, "light"), (1440, "dark")])
def test_every_view_opens_fits_and_is_accessible(visit, file, width, theme):
    """As `test_browser` has it for a loop that is done once."""
    assert faults(visit, file, VIEWS, width, theme) == {name: [] for name in VIEWS}


def test_groups_are_listed_and_stand_side_by_side(visit, file):
    """The one with spread first.

    A column per sample, best first, a row per turn, with weights and what is invalid.
    """
    with visit(file, "#episodes?mode=groups") as tab:
        assert texts(tab, ".row .figure") == ["1 of 2", "2 of 2"]
        assert texts(tab, ".found") == ["2 groups"]
        tab.locator(".row").first.click()
        tab.wait_for_selector(".group table")

        assert texts(tab, ".group thead th") == [
            "turn", "#0success" "score 1.00 · 2 turns · trained", "#1no successscore 0.00 · 3 turns · trained",
        ]  # fmt: skip
        assert texts(tab, ".group tbody tr") == [
            "1go 00.50go 0−0.50",
            "2go 11.00 · invalidgo 1−1.00",
            "3go 2−1.50",
        ]
        assert tab.locator(".row.open").count() == 1
        tab.keyboard.press("n")
        tab.wait_for_selector(".group thead small:has-text('no spread')")
        assert texts(tab, ".group thead small") == [
            "score 1.00 · 2 turns · no spread",
            "score 1.00 · 3 turns · no spread",
        ]
        tab.locator(".group .cell a").nth(1).click()
        tab.wait_for_selector(".turn.target")
        assert texts(tab, ".turn.target .anchor") == ["turn 1"]


def test_the_page_leads_to_its_group(visit, file):
    with visit(file) as tab:
        tab.get_by_role("link", name="all its samples, turn by turn").click()
        tab.wait_for_selector(".group table")

        assert texts(tab, ".detail h2")[0].startswith("a")
        assert (
            texts(tab, ".group .soft")[0]
            == "The number under an action is the turn's weight by rloo: above 0 blue, below 0 red."
        )


def test_the_margin_draws_weights_below_zero_to_the_left(visit, file):
    """Of three turns, -0.5, -1 and -1.5: the bar of the first ends at the middle and begins a sixth before it."""
    with visit(file, "#episode?run=online&set=trajectories%2Fexplore-003&task=a&sample=1") as tab:
        assert texts(tab, ".bar.weight") == ["weight−0.50", "weight−1.00", "weight−1.50"]
        fill = tab.locator(".bar.weight.below .fill").first.evaluate(
            "one => [one.style.left, one.style.width]"
        )
        assert [round(float(each.rstrip("%")), 1) for each in fill] == [33.3, 16.7]
        assert "weight: what the credit rloo gave the turn" in texts(tab, ".legend li")
        assert "trained" in texts(tab, ".facts-line .chip")
