"""Comparisons beside those with the baseline: one family with them, and refused where they say nothing new."""

import pytest

from perturn.errors import ConfigError, RunError
from perturn.study.settings import read_study
from perturn.study.tables.study_page import write_study_page
from perturn.study.tables.verdicts import summarize
from study.recorded_studies import panel, small, write

from .corridor import RECIPE, STUDY

WON, ONCE, NONE = (panel(*[1] * n, *[0] * (16 - n)) for n in (8, 1, 0))


@pytest.fixture
def study(tmp_path):
    """Reads the study with `key=value` words."""
    (tmp_path / "corridor.yaml").write_text(RECIPE)
    (tmp_path / "study.yaml").write_text(STUDY)
    return lambda *words: read_study(tmp_path / "study.yaml", words)[0]


def record(folder, compare, *, scores, methods=("sft", "a", "c")):
    """A study of hand-written successes with further comparisons."""
    cells, rows = small(folder, scores)
    settings = {
        "name": "toy",
        "baseline": "sft",
        "compare": compare,
        "methods": {name: {} for name in methods},
    }
    write(folder, settings, cells, rows)


def toy(folder):
    return summarize(folder)["environments"]["toy"]


def test_one_family_by_hand(tmp_path):
    """One seed, 16 games: a solves 8, c one of these, sft none.

    McNemar's p: a 2/2^8 = 1/128, c 1, a against c (seven won) 2/2^7 = 1/64. Holm of three: 3/128, 2/64, 1; of the two
    with the baseline alone 2/128 and 1.
    """
    scores = {"sft": {0: NONE}, "a": {0: WON}, "c": {0: ONCE}}
    record(tmp_path / "two", [], scores=scores)
    record(tmp_path / "three", [["a", "c"]], scores=scores)

    two, three = (toy(tmp_path / name) for name in ("two", "three"))
    without, a, c = (
        row["success"]["against"] for row in (two["methods"][1], three["methods"][1], three["methods"][2])
    )
    [further] = three["further"]

    assert (two["comparisons"], three["comparisons"]) == (2, 3)
    assert two["further"] == []
    assert (without["p_value_holm"], a["p_value_holm"], c["p_value_holm"]) == (2 / 128, 3 / 128, 1.0)
    assert (further["method"], further["other"]) == ("a", "c")
    found = further["success"]
    assert (found["p_value"], found["p_value_holm"], found["counted"]) == (1 / 64, 2 / 64, True)
    assert (found["mean_difference"], found["seeds"], found["tasks"]) == (7 / 16, [0], 16)
    assert [(each["wins"], each["losses"], each["ties"]) for each in found["by_seed"]] == [(7, 0, 9)]
    assert a["smallest_difference"] > without["smallest_difference"]


def test_a_pair_that_was_not_played_counts_too(tmp_path):
    """As a method without a score does: its p is taken to be 1, and every other one is corrected for it."""
    record(tmp_path, [["a", "c"], ["c", "a2"]], scores={"sft": {0: NONE}, "a": {0: WON}, "c": {0: ONCE}})

    found = toy(tmp_path)

    assert found["comparisons"] == 4
    assert found["further"][1] == {"method": "c", "other": "a2", "success": None}
    assert found["methods"][1]["success"]["against"]["p_value_holm"] == 4 / 128


def test_the_same_two_either_way_differ_in_sign(tmp_path):
    """Two seeds: the differences are 7/16 and 1/16."""
    scores = {"sft": {0: NONE, 1: NONE}, "a": {0: WON, 1: ONCE}, "c": {0: ONCE, 1: NONE}}
    for name, pair in {"one": ["a", "c"], "other": ["c", "a"]}.items():
        record(tmp_path / name, [pair], scores=scores)

    one, other = (toy(tmp_path / name)["further"][0]["success"] for name in ("one", "other"))

    assert one["mean_difference"] == -other["mean_difference"] == 4 / 16
    assert one["interval"] == pytest.approx([-end for end in reversed(other["interval"])])
    assert (one["p_value"], one["p_value_holm"]) == (other["p_value"], other["p_value_holm"])


def test_the_page_shows_them(tmp_path):
    record(tmp_path, [["a", "c"], ["c", "a2"]], scores={"sft": {0: NONE}, "a": {0: WON}, "c": {0: ONCE}})

    page = write_study_page(tmp_path).read_text(encoding="utf-8")

    assert "A against B" in page
    assert '<th scope="row">a against c</th>' in page
    assert "a is better than c under this one seed; that it would be under others is not shown." in page
    assert "no seed and task that both have" in page
    assert "corrected for 4 comparisons by Holm" in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("compare=[[dpo, tlm]]", "compare: unknown method 'tlm'. Did you mean 'tlm-dre'?"),
        ("compare=[[dpo, sft]]", "dpo and sft are compared anyhow, since sft is the baseline"),
        ("compare=[[sft, dpo]]", "sft and dpo are compared anyhow, since sft is the baseline"),
        ("compare=[[dpo, dpo]]", "must have lists of two methods that differ, got ['dpo', 'dpo']"),
        ("compare=[[dpo]]", "must have lists of two methods that differ, got ['dpo']"),
        ("compare=[[dpo, tlm-dre], [tlm-dre, dpo]]", "compare names two methods twice"),
        ("compare=dpo", "compare must be a valid list"),
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
