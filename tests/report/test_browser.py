"""The report in a real browser: opens, sorts, filters, compares, with the keyboard alone, and for all eyes."""

from dataclasses import replace

import pytest

from perturn.data.store import write_pairs
from perturn.report import write_report
from perturn.types import OPENS, Action, Opening, PreferencePair, Turn

from .views import faults, texts

pytestmark = pytest.mark.slow  # a browser takes several seconds for each view

VIEWS = {
    "report": "",
    "list": "#episodes?sort=-turns&kind=melt",
    "episode": "#episode?run=run&set=evaluation%2Fsft&task=t3&sample=0&turn=2",
    "pair": "#episode?run=run&set=trajectories%2Fexpert&task=p1&sample=0"
    "&run2=run&set2=trajectories%2Fexplore&task2=p1&sample2=0",
    "failed": "#episode?run=run&set=evaluation%2Fsft&task=t4&sample=0",
    "nowhere": "#episode?run=run&set=evaluation%2Fsft&task=gone&sample=0",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make):
    """A whole run, whose pair of task p1 shares two turns and parts in the third."""
    run = make.whole_run(tmp_path_factory.mktemp("browser") / "run")
    same = make.trajectory("p1", 1.0, valid=(True,) * 2, text="together")
    chosen = replace(same, turns=(*same.turns, _turn("the door", "open the red door")))
    rejected = replace(
        same,
        turns=(*same.turns, _turn("the door", "open the blue door", valid=False), _turn("no", "wait")),
        total_reward=0.0,
    )
    for name, score, one in (("expert", 1.0, chosen), ("explore", 0.0, rejected)):
        (run / "trajectories" / f"{name}.jsonl").unlink()
        make.put(run / "trajectories" / f"{name}.jsonl", [make.trajectory("p0", score), one])
    write_pairs(run / "pairs.jsonl", [PreferencePair(make.trajectory("p0", 1.0), make.trajectory("p0", 0.0)),
                                      PreferencePair(chosen, rejected)])  # fmt: skip
    return run


def _turn(seen, action, valid=True):
    text = f"Thought: It is there.\nAction: {action}"
    said = Action(text, token_ids=(5, 6, 7), logprobs=(-0.1, 0.0, -2.0))
    return Turn(({"role": "user", "content": seen},), said, valid=valid, reward=0.5 if valid else 0.0)


@pytest.fixture(scope="module")
def file(folder):
    """The report of the run."""
    return write_report(folder)


@pytest.mark.parametrize(("width", "theme"), [(390, "light"), (820, "dark"), (1440, "light"), (1440, "dark")])
def test_every_view_opens_fits_and_is_accessible(visit, file, width, theme):
    """No error, nothing fetched, nothing wider than the screen, all figures drawn, and axe finds no fault."""
    assert faults(visit, file, VIEWS, width, theme) == {name: [] for name in VIEWS}


def test_a_click_on_a_head_sorts_the_table(visit, file):
    with visit(file) as tab:
        column = "table.full tbody tr > :nth-child(3) b"
        head = tab.get_by_role("region", name="Scores of the policies").get_by_role(
            "button", name="average score"
        )
        before = texts(tab, column)
        head.click()
        down = texts(tab, column)
        head.click()

        assert before == ["0.000", "0.500", "0.625"]
        assert down == before[::-1]
        assert texts(tab, column) == before
        assert tab.locator("th[aria-sort=ascending]").count() == 1


def test_the_navigation_marks_where_the_reader_is(visit, file):
    """A section by its link and by scrolling, the list of episodes, and the first section at the start."""
    marked = ".top nav a[aria-current]"
    with visit(file) as tab:
        assert texts(tab, marked) == ["Result"]
        tab.click(".top nav a[href='#training']")
        tab.wait_for_selector(f"{marked}:text-is('Training')")
        tab.evaluate("window.scrollTo(0, document.body.scrollHeight)")
        tab.wait_for_selector(f"{marked}:text-is('Recipe')")
        tab.click(".top nav a[href='#episodes']")
        tab.wait_for_selector(f"{marked}:text-is('Episodes')")
        assert texts(tab, marked) == ["Episodes"]
    with visit(file, VIEWS["episode"]) as tab:
        assert texts(tab, marked) == ["Episodes"]
    with visit(file, "#data") as tab:
        tab.wait_for_selector(f"{marked}:text-is('Data')")
        assert texts(tab, marked) == ["Data"]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ("", 16),
        ("?set=run%2Fevaluation%2Fsft", 4),
        ("?q=t3+sft", 1),
        ("?kind=melt&outcome=success", 1),
        ("?outcome=failed", 1),
        ("?signal=failure&set=run%2Fevaluation%2Fsft", 2),
        ("?low=0.6&high=0.8", 2),
        ("?q=blue+door&deep=1", 1),
        ("?q=nothing+has+this&deep=1", 0),
        ("?mode=pairs", 2),
        ("?mode=compare", 4),
    ],
)
def test_links_filter_the_list(visit, file, filters, expected):
    """3 policies of 4 tasks each, 2 expert and 2 explored episodes; side by side, sft and tlm-dre."""
    with visit(file, f"#episodes{filters}") as tab:
        assert tab.locator(".row").count() == expected
        assert f"{expected} " in texts(tab, ".found")[0]


def test_the_form_filters_sorts_and_writes_the_link(visit, file):
    """The hash follows the form, without a step of the history for each letter, and opens the same list again."""
    with visit(file, "#episodes") as tab:
        steps = tab.evaluate("history.length")
        tab.get_by_label("Search").fill("t")
        tab.get_by_text("Filters and order").click()
        tab.get_by_label("Order").select_option("lowest score")
        tab.locator("select[name=set]").select_option("sft, evaluated")
        rows = texts(tab, ".row .figure")
        link = tab.evaluate("location.hash")

        assert rows == ["0.00", "0.50", "0.50", "1.00"]
        assert tab.evaluate("history.length") == steps
        tab.get_by_role("button", name="clear").click()
        tab.wait_for_function("() => document.querySelectorAll('.row').length === 16")
    with visit(file, link) as tab:
        assert texts(tab, ".row .figure") == rows


def test_an_episode_tells_thought_action_and_observation_apart(visit, file):
    with visit(file, VIEWS["pair"].replace("expert", "explore").partition("&run2")[0]) as tab:
        last = tab.locator(".turn").nth(2)

        assert texts(last, ".observation .text") == ["the door"]
        assert texts(last, ".thought .text") == ["It is there."]
        assert texts(last, ".action .text") == ["open the blue door"]
        assert "invalid" in texts(last, ".who")[0]
        assert texts(last, ".bar") == ["confidence1.000", "weight0.20", "reward0.000"]
        assert texts(tab.locator(".turn").nth(1), ".bar dt") == ["confidence", "weight", "reward"]


def test_tokens_open_on_demand_with_their_logprobs(visit, file):
    """The reference's, with the text of each token from the run folder."""
    with visit(file, VIEWS["pair"]) as tab:
        tab.locator(".shared summary").click()
        assert tab.locator(".token").count() == 0
        tab.locator(".shared button").first.click()
        tab.wait_for_selector(".token")

        assert texts(tab, ".token .piece") == ["go", "·0"]
        assert texts(tab, ".token small") == ["−0.50", "0"]
        assert "under the reference policy, in nats: -0.50 over 2 tokens" in texts(tab, ".talk .soft")[0]


def test_a_pair_is_aligned_at_its_shared_prefix(visit, file):
    """Two turns in common, then the same observation and another action; what differs of it is marked."""
    with visit(file, "#episodes?mode=pairs") as tab:
        tab.locator(".row").nth(1).click()
        tab.wait_for_selector(".comparison")

        assert texts(tab, ".heads h3") == ["chosen", "rejected"]
        assert texts(tab, ".shared summary") == ["2 turns in common, with the numbers of the left one"]
        assert texts(tab, ".divergence") == [
            "First divergence, turn 3: the same observation, another action."
        ]
        assert texts(tab, ".same .text") == ["the door"]
        assert texts(tab, "mark") == ["red door", "blue door"]
        assert texts(tab, ".two .left .turn")[-1] == "ended"


def test_before_and_after_of_one_task(visit, file):
    """The largest gain first; then another episode of the task is chosen to stand beside it."""
    with visit(file, "#episodes?mode=compare&sort=-difference") as tab:
        assert texts(tab, ".row .figure")[0] == "0.50 → 1.00"
        tab.locator(".row").first.click()
        tab.wait_for_selector(".comparison")
        assert texts(tab, ".heads h3") == ["sft, evaluated", "tlm-dre, evaluated"]
        tab.get_by_label("beside").select_option(index=0)
        tab.wait_for_selector(".conversation")

        assert texts(tab, "h2 small") == ["boil"]
        tab.go_back()
        tab.wait_for_selector(".comparison")


def test_a_link_leads_to_the_turn_again(visit, file):
    """What a turn's own link says is opened in a fresh browser: the same episode, at that turn."""
    with visit(file, VIEWS["episode"].replace("&turn=2", "")) as tab:
        tab.get_by_role("link", name="Link to turn 3").click()
        tab.wait_for_selector(".turn.target")
        link = tab.evaluate("location.hash")
    with visit(file, link) as tab:
        assert "turn=3" in link
        assert texts(tab, ".turn.target .anchor") == ["turn 3"]
        assert tab.evaluate("document.activeElement.id") == "turn-3"
        assert tab.locator(".row.open").count() == 1


def test_the_keyboard_suffices(visit, file):
    """Tab to the list, arrows, Enter; n, j and Escape."""
    with visit(file, "#episodes") as tab:
        tab.locator(".list").focus()
        for key in ("ArrowDown", "ArrowDown", "Enter"):
            tab.keyboard.press(key)
        tab.wait_for_selector(".conversation")
        first = texts(tab, ".detail h2")
        tab.keyboard.press("n")
        tab.wait_for_function(
            f"() => !document.querySelector('.detail h2').textContent.includes({first[0][:2]!r})"
        )
        tab.keyboard.press("j")
        assert tab.evaluate("document.activeElement.className").startswith("turn")
        tab.keyboard.press("Escape")
        tab.wait_for_selector("body[data-open=list]")

        assert tab.evaluate("location.hash").startswith("#episodes")


def test_colours_follow_the_system_or_the_button(visit, file):
    with visit(file, theme="dark") as tab:
        ground = "getComputedStyle(document.body).backgroundColor"
        dark = tab.evaluate(ground)
        tab.locator("#theme").click()

        assert tab.locator("html[data-theme=light]").count() == 1
        assert tab.evaluate(ground) != dark


def test_two_runs_stand_side_by_side(visit, make, folder, tmp_path):
    """Curves of both in one figure, what differs between them, and their tasks side by side."""
    other = make.whole_run(tmp_path / "other")
    with visit(write_report(folder, other, output=tmp_path / "both.html")) as tab:
        tab.wait_for_selector("[data-figure=figure-margin-0]").scroll_into_view_if_needed()
        tab.wait_for_selector("[data-figure=figure-margin-0][data-drawn] .legendtext")
        assert texts(tab, "[data-figure=figure-margin-0] .legendtext") == ["run", "other"]
        tab.get_by_role("link", name="Task by task").click()
        tab.wait_for_selector(".row")

        assert tab.locator(".row").count() == 4
        assert texts(tab, ".row .about")[0].startswith("tlm-dre → tlm-dre")


def test_a_file_that_was_cut_short_says_so(chromium, file, tmp_path):
    """The index is damaged: the report is there, and the episodes say what is wrong."""
    text = file.read_text(encoding="utf-8")
    start = text.index('id="piece-index">') + len('id="piece-index">')
    (tmp_path / "cut.html").write_text(
        text[: start + 40] + text[text.index("</script>", start) :], encoding="utf-8"
    )
    context = chromium.new_context()
    tab = context.new_page()

    tab.goto(f"file://{tmp_path / 'cut.html'}#episodes")
    tab.wait_for_selector("html[data-ready]", state="attached")

    assert texts(tab, "#browser .error")[0].startswith("The episodes cannot be unpacked: ")
    context.close()


def test_an_episode_of_several_sequences_is_drawn_as_their_tree(visit, make, tmp_path):
    """A helper's conversation and a retry: each names its place, and the tree links to it; axe finds no fault."""
    run = make.whole_run(tmp_path / "run")
    one = make.trajectory("p0", 0.5, valid=(True,) * 5)
    helper = Opening(({"role": "system", "content": "Sum up."},))
    turns = list(one.turns)
    turns[2] = replace(turns[2], follows=OPENS, opening=helper)
    turns[4] = replace(turns[4], follows=0)
    (run / "trajectories" / "explore.jsonl").unlink()
    make.put(run / "trajectories" / "explore.jsonl", [replace(one, turns=tuple(turns))])
    place = "#episode?run=run&set=trajectories%2Fexplore&task=p0&sample=0"
    file = write_report(run)

    with visit(file, place) as tab:
        assert texts(tab, ".sequences a") == ["turns 1 to 2", "turn 5", "turns 3 to 4"]
        assert texts(tab, ".who .chip") == ["opens another conversation", "follows turn 1"]
        assert texts(tab, ".turn .prompt summary") == ["prompt (1 message)"]
    assert faults(visit, file, {"tree": place}, 390, "light") == {"tree": []}
