"""Comparisons beside those with the baseline: one family with them, and refused where they say nothing new."""

import pytest

from perturn.errors import ConfigError, RunError
from perturn.stats import crossed_comparison
from perturn.study.settings import read_study
from perturn.study.tables.study_page import tables, write_study_page
from perturn.study.tables.verdicts import _on_intervals, summarize
from study.recorded_studies import by_task, small, write

from .corridor import RECIPE, STUDY

WON, ONCE, NONE = (by_task(*[1] * n, *[0] * (16 - n)) for n in (8, 1, 0))


@pytest.fixture
def study(tmp_path):
    """Reads the study with `key=value` words."""
    (tmp_path / "corridor.yaml").write_text(RECIPE)
    (tmp_path / "study.yaml").write_text(STUDY)
    return lambda *words: read_study(tmp_path / "study.yaml", words)[0]


def record(folder, compare, *, scores, methods=("sft", "a", "c"), **further):
    """A study of hand-written successes with primary and further comparisons."""
    cells, rows = small(folder, scores)
    settings = {
        "name": "toy",
        "baseline": "sft",
        "compare": compare,
        "methods": {name: {} for name in methods},
        **further,
    }
    write(folder, settings, cells, rows)


def toy(folder):
    return summarize(folder)["environments"]["toy"]


def test_q_values_by_hand(tmp_path):
    """One seed, 16 games: a solves 8, c one of these, sft none.

    McNemar's p: a 2/2^8 = 1/128, c 1, a against c (seven won) 2/2^7 = 1/64. q of three: 3/128, which 1/64 * 3/2 is
    too, and 1; of the two with the baseline alone 2/128 and 1.
    """
    scores = {"sft": {0: NONE}, "a": {0: WON}, "c": {0: ONCE}}
    record(tmp_path / "two", [], scores=scores)
    record(tmp_path / "three", [["a", "c"]], scores=scores)

    two, three = (toy(tmp_path / name) for name in ("two", "three"))
    without, a, c = (
        row["success"]["against"] for row in (two["methods"][1], three["methods"][1], three["methods"][2])
    )
    [further] = three["further"]

    assert [each["comparisons"] for each in (two, three)] == [
        {"primary": 0, "others": 2},
        {"primary": 0, "others": 3},
    ]
    assert two["further"] == []
    assert (without["corrected"], a["corrected"], c["corrected"]) == (2 / 128, 3 / 128, 1.0)
    assert (further["method"], further["other"]) == ("a", "c")
    found = further["success"]
    assert (found["p_value"], found["corrected"], found["family"]) == (1 / 64, 3 / 128, "others")
    assert (found["mean_difference"], found["seeds"], found["tasks"]) == (7 / 16, [0], 16)
    assert [(each["wins"], each["losses"], each["ties"]) for each in found["by_seed"]] == [(7, 0, 9)]
    assert a["smallest_difference"] == without["smallest_difference"]


def test_a_pair_that_was_not_played_counts_too(tmp_path):
    """As a method without a score does: its p is taken to be 1, and every other one is corrected for it."""
    record(tmp_path, [["a", "c"], ["c", "a2"]], scores={"sft": {0: NONE}, "a": {0: WON}, "c": {0: ONCE}})

    found = toy(tmp_path)

    assert found["comparisons"] == {"primary": 0, "others": 4}
    assert found["further"][1] == {"method": "c", "other": "a2", "success": None}
    assert found["methods"][1]["success"]["against"]["corrected"] == 4 / 128


def test_holm_is_over_the_primary_comparisons_alone(tmp_path):
    """A against sft (p 1/128) and a against c (1/64) are primary: 2/128 each. c against sft is one comparison."""
    scores = {"sft": {0: NONE}, "a": {0: WON}, "c": {0: ONCE}}
    record(tmp_path, [], scores=scores, primary=[["a", "sft"], ["a", "c"]])

    found = toy(tmp_path)
    first, second = (row["success"] for row in found["primary"])
    other = found["methods"][2]["success"]["against"]

    assert found["comparisons"] == {"primary": 2, "others": 1}
    assert found["further"] == []
    assert (first["corrected"], second["corrected"]) == (2 / 128, 2 / 128)
    assert first == found["methods"][1]["success"]["against"]
    assert (other["p_value"], other["corrected"]) == (1.0, 1.0)


def test_intervals_of_primary_comparisons_hold_at_once(tmp_path):
    """Two primary comparisons: each interval of the family is at 97.5 %, and the row of one comparison at 95 %."""
    scores = {
        "sft": dict.fromkeys(range(3), NONE),
        "a": {0: WON, 1: ONCE, 2: WON},
        "c": dict.fromkeys(range(3), ONCE),
    }
    record(tmp_path, [], scores=scores, primary=[["a", "sft"], ["a", "c"]])
    table = [[float(ok) for ok in row.values()] for row in scores["a"].values()]
    none = [[0.0] * 16] * 3

    found = toy(tmp_path)["primary"][0]["success"]

    wide, narrow = (crossed_comparison(table, none, level) for level in (0.975, 0.95))
    assert found["family_interval"] == pytest.approx([wide.low, wide.high])
    assert found["interval"] == pytest.approx([narrow.low, narrow.high])


def test_a_mean_of_methods_is_compared(tmp_path):
    """A solves 8 of 16, c one: their mean is 9/32 over sft's 0, and 7/32 below a."""
    scores = {"sft": {0: NONE}, "a": {0: WON}, "c": {0: ONCE}}
    record(tmp_path, [[["a", "c"], "a"]], scores=scores, primary=[[["a", "c"], "sft"]])

    found = toy(tmp_path)

    assert [(row["method"], row["other"]) for row in (*found["primary"], *found["further"])] == [
        ("mean of a, c", "sft"),
        ("mean of a, c", "a"),
    ]
    assert found["primary"][0]["success"]["mean_difference"] == 9 / 32
    assert found["further"][0]["success"]["mean_difference"] == -7 / 32
    assert found["comparisons"] == {"primary": 1, "others": 3}
    assert "mean of a, c against sft" in write_study_page(tmp_path).read_text(encoding="utf-8")


def test_two_bases_show_their_differences_and_no_interval(tmp_path):
    """7/16 and 1/16: no p-value, and the Markdown names both."""
    scores = {"sft": {0: NONE, 1: NONE}, "a": {0: WON, 1: ONCE}}
    record(tmp_path, [], scores=scores, methods=("sft", "a"), primary=[["a", "sft"]])

    found = toy(tmp_path)["primary"][0]["success"]

    assert found["by_base"] == [8 / 16, 1 / 16]
    assert (found["p_value"], found["corrected"]) == (None, None)
    assert found["interval"] == found["family_interval"] == found["bootstrap"] == [None, None]
    text = tables(summarize(tmp_path))
    assert "| a against sft | 16 × 2 | +50.0 and +6.2 | – | – |" in text
    assert "| a |  | 16 × 2 | 28.1 (50.0, 6.2) | +50.0 and +6.2 | – | primary | – |" in text
    assert "Two seeds give no interval and no p-value" in text


def test_a_study_says_that_its_primary_comparisons_came_late(tmp_path):
    scores = {"sft": {0: NONE}, "a": {0: WON}}
    record(tmp_path / "before", [], scores=scores, primary=[["a", "sft"]])
    record(tmp_path / "after", [], scores=scores, primary=[["a", "sft"]], primary_after_results=True)

    before, after = (toy(tmp_path / name)["notes"] for name in ("before", "after"))

    assert not any("primary" in note for note in before)
    assert any(
        note.startswith("The primary comparisons were named after the results were known") for note in after
    )


@pytest.mark.parametrize(
    ("verdict", "ends", "noted"),
    [
        ("better", [-0.01, 0.1], True),
        ("better", [0.01, 0.1], False),
        ("worse", [-0.2, 0.01], True),
        ("worse", [-0.2, -0.01], False),
        ("unseen", [-0.01, 0.1], False),
        ("better", [None, None], True),
    ],
)
def test_a_verdict_beside_an_interval_that_contains_zero_is_explained(verdict, ends, noted):
    """Holm's test finds more than the intervals of all primary comparisons at once."""
    row = {"method": "a", "other": "sft"}

    found = {"verdict": verdict, "family_interval": ends, "p_value": 0.03}
    notes = list(_on_intervals([(row, "success", found)]))
    several = list(_on_intervals([(row, "success", None), (row, "score", found)]))

    assert [note.startswith("a against sft differs in score by Holm's test") for note in several] == [
        True
    ] * noted
    assert [note.startswith("a against sft differs by Holm's test") for note in notes] == [True] * noted
    two = list(_on_intervals([(row, "success", found), (row, "success", None)]))
    assert ["bounds of the score" in note for note in notes] == [True] * noted
    assert ["Holm's test finds more" in note for note in two] == [True] * noted


def test_the_same_two_either_way_differ_in_sign(tmp_path):
    """Three seeds: the differences are 7/16, 1/16 and 1/16."""
    scores = {
        "sft": dict.fromkeys(range(3), NONE),
        "a": {0: WON, 1: ONCE, 2: ONCE},
        "c": {0: ONCE, 1: NONE, 2: NONE},
    }
    for name, pair in {"one": ["a", "c"], "other": ["c", "a"]}.items():
        record(tmp_path / name, [pair], scores=scores)

    one, other = (toy(tmp_path / name)["further"][0]["success"] for name in ("one", "other"))

    assert one["mean_difference"] == -other["mean_difference"] == 3 / 16
    assert one["interval"] == pytest.approx([-end for end in reversed(other["interval"])])
    assert (one["p_value"], one["corrected"]) == (other["p_value"], other["corrected"])


def test_the_page_shows_them(tmp_path):
    scores = {"sft": {0: NONE}, "a": {0: WON}, "c": {0: ONCE}}
    record(tmp_path, [["a", "c"], ["c", "a2"]], scores=scores, primary=[["a", "sft"]])

    page = write_study_page(tmp_path).read_text(encoding="utf-8")

    assert "A against B" in page
    assert '<th scope="row">a against c</th>' in page
    assert '<th scope="row">a against sft</th>' in page
    assert "a is better than c for this one seed. This is not shown for other seeds." in page
    assert "no seed and task that both have" in page
    assert "q is the Benjamini-Hochberg q-value over 3 comparisons." in page
    assert (
        "Primary comparisons have Holm&#39;s correction over 1 comparison. Their intervals are at 95 %"
        in page
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("compare=[[dpo, tlm]]", "compare: unknown method 'tlm'. Did you mean 'tlm-dre'?"),
        ("compare=[[dpo, sft]]", "dpo and sft are compared anyhow, since sft is the baseline"),
        ("compare=[[sft, dpo]]", "sft and dpo are compared anyhow, since sft is the baseline"),
        ("compare=[[dpo, dpo]]", "must have lists of two methods that differ, got ['dpo', 'dpo']"),
        ("compare=[[dpo]]", "must have lists of two methods that differ, got ['dpo']"),
        ("compare=[[dpo, tlm-dre], [tlm-dre, dpo]]", "primary and compare name two methods twice"),
        ("primary=[[dpo, sft], [sft, dpo]]", "primary and compare name two methods twice"),
        ("primary=[[[dpo, sft], [sft, dpo]]]", "must have lists of two methods that differ"),
        (
            "primary=[[[dpo, sft], tlm-dre], [[sft, dpo], tlm-dre]]",
            "primary and compare name two methods twice",
        ),
        ("primary=[[sft, dpo]]", "primary: sft is the baseline; name it second."),
        ("primary=[[[dpo], sft]]", "primary: a mean is of two methods or more that differ, got ['dpo']."),
        ("primary=[[[dpo, tlm], sft]]", "primary: unknown method 'tlm'. Did you mean 'tlm-dre'?"),
        (
            "primary=[[dpo, sft], [tlm-dre, sft], [dpo, tlm-dre], [base, sft]]",
            "primary must have at most 3 comparisons, got 4",
        ),
        ("compare=dpo", "compare must be a list"),
        ("compare=[[dpo, tlm-dre], base]", "compare[1] must be a list, got 'base'."),
        ("sweep={align.learning_rate: 0.1}", "sweep.align.learning_rate must be a list, got 0.1."),
        ("methods.dpo=null", "methods.dpo must be a mapping, got None."),
    ],
)
def test_what_is_refused(study, words, said):
    with pytest.raises(ConfigError) as caught:
        study(words)

    assert said in str(caught.value)


def test_methods_that_are_always_there_may_be_compared(study):
    assert study("compare=[[dpo, base], [dpo, tlm-dre]]").compare == [["dpo", "base"], ["dpo", "tlm-dre"]]


def test_a_study_file_whose_comparisons_are_no_pairs_is_refused(tmp_path):
    record(tmp_path, [["a"]], scores={"sft": {0: NONE}})

    with pytest.raises(RunError, match=r"study.yaml: compare"):
        summarize(tmp_path)
