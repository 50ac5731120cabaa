"""Tables of studies on the pages of results: filled from the studies' folders, and equal to them."""

import importlib.util
import json
import re
import shutil
import sys

import pytest

from perturn.study.tables.episode_table import EPISODES, read_episodes
from perturn.study.tables.study_page import write_study_page
from support.docs import ROOT

PAGE = "Before.\n\n<!-- study lab -->\nold\n<!-- end -->\n\nBetween.\n\n<!-- study two -->\n<!-- end -->\nAfter.\n"


def load():
    """The script."""
    spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "docs/tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def page(tmp_path):
    """A page with two blocks beside two studies."""
    for name in ("lab", "two"):
        (tmp_path / "studies/results" / name).mkdir(parents=True)
        (tmp_path / "studies/results" / name / "table.md").write_text(f"| {name} |\n|---|\n")
    file = tmp_path / "docs/results/lab.md"
    file.parent.mkdir(parents=True)
    file.write_text(PAGE)
    return file


def call(page, *words):
    return load().main([*words, "--root", str(page.parents[2])])


@pytest.mark.parametrize(
    "study", sorted((ROOT / "studies/results").glob("*/study.yaml")), ids=lambda file: file.parent.name
)
def test_a_studys_numbers_follow_from_its_episodes(study, tmp_path):
    """Summary and table as they are in the repository, from `episodes.parquet` alone."""
    names = ("study.yaml", "cells.json", EPISODES, "protocols.json")
    for name in names:
        shutil.copy(study.parent / name, tmp_path / name)
    write_study_page(tmp_path)

    for name in ("summary.json", "table.md"):
        assert (tmp_path / name).read_text() == (study.parent / name).read_text()


def test_the_pages_have_the_tables_of_their_studies():
    assert load().main(["--check"]) is None


def test_each_block_gets_the_table_of_its_study(page):
    """Text around the blocks stays, and a second call changes nothing."""
    assert call(page) is None

    expected = PAGE.replace("\nold\n", "\n\n| lab |\n|---|\n\n").replace(
        "two -->\n", "two -->\n\n| two |\n|---|\n\n"
    )
    assert page.read_text() == expected
    assert call(page, "--check") is None
    assert call(page) is None
    assert page.read_text() == expected


def test_a_check_of_another_table_fails_and_writes_nothing(page):
    assert call(page, "--check") == "lab.md: a table is not that of its study; run `python docs/tables.py`."
    assert page.read_text() == PAGE


def test_a_block_without_an_end_is_refused(page):
    """Else it would swallow all that follows, up to the end of the next one."""
    page.write_text(PAGE.replace("<!-- end -->", "", 1))

    assert call(page) == "lab.md: <!-- study lab --> has no <!-- end -->; add it."


def test_a_study_without_a_table_is_refused(page):
    page.write_text(PAGE.replace("study two", "study three"))

    assert "studies/results/three/table.md" in call(page)


@pytest.mark.parametrize(
    "name", ["study.yaml", "cells.json", EPISODES, "protocols.json", "summary.json", "table.md"]
)
def test_results_of_studies_name_no_place_on_a_machine(name):
    """They are committed, and are to be the same wherever a study is made."""
    files = sorted((ROOT / "studies/results").glob(f"*/{name}"))
    assert files
    for file in files:
        text = json.dumps(read_episodes(file)) if name == EPISODES else file.read_text(encoding="utf-8")
        found = re.search(r"(?<![\w.])/(home|Users|root|tmp|work|mnt|data)/\S+", text)

        assert found is None, f"{file}: {found}"


TABLE = """| primary comparison | tasks × seeds | difference, points | p (Holm) |
|---|---|---|---|
| tlm-dre against sft | 140 × 5 | +3.0 [+0.5, +5.5] | 0.04 |

| method | tasks × seeds | success, % | against sft, points | p | q |
|---|---|---|---|---|---|
| dpo | 140 × 5 | 55.0 [50.0, 60.0] | −1.0 [−2.0, +0.1] | 0.08 | 0.09 |

| A against B | tasks × seeds | A − B, points | p | q |
|---|---|---|---|---|
| tlm-dre against dpo | 139 × 4 | +0.5 [−1.0, +2.0] | 0.61 | 0.61 |

| method | tasks × seeds | score | against sft, score | p | q |
|---|---|---|---|---|---|
| dpo | 140 × 5 | 0.550 [0.500, 0.600] | −0.010 [−0.020, +0.001] | 0.07 | 0.09 |

| A against B | tasks × seeds | A − B, score | p | q |
|---|---|---|---|---|
| tlm-dre against dpo | 139 × 4 | +0.005 [−0.010, +0.020] | 0.62 | 0.62 |
"""


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("tlm-dre against sft", "+3.0 [+0.5, +5.5]; 140 × 5; p (Holm) 0.04"),
        ("dpo", "−1.0 [−2.0, +0.1]; 140 × 5; p 0.08"),
        ("tlm-dre against dpo", "+0.5 [−1.0, +2.0]; 139 × 4; p 0.61"),
        ("dpo, score", "−0.010 [−0.020, +0.001]; 140 × 5; p 0.07"),
        ("tlm-dre against dpo, score", "+0.005 [−0.010, +0.020]; 139 × 4; p 0.62"),
    ],
)
def test_a_cell_gets_the_difference_of_its_row(page, key, said):
    (page.parents[2] / "studies/results/lab/table.md").write_text(TABLE)
    page.write_text(f"| claim | <!-- row lab: {key} -->old<!-- --> | <!-- row lab: dpo --><!-- --> |\n")

    assert call(page) is None

    dpo = "−1.0 [−2.0, +0.1]; 140 × 5; p 0.08"
    assert page.read_text() == (
        f"| claim | <!-- row lab: {key} -->{said}<!-- --> | <!-- row lab: dpo -->{dpo}<!-- --> |\n"
    )
    assert call(page, "--check") is None


def test_a_row_that_no_table_has_is_refused(page):
    page.write_text("<!-- row lab: gone --><!-- -->\n")

    assert call(page) == "lab.md: no row of the table begins with 'gone' and has points."


def test_a_row_without_scores_is_refused(page):
    (page.parents[2] / "studies/results/lab/table.md").write_text(
        TABLE.partition("| method | tasks × seeds | score")[0]
    )
    page.write_text("<!-- row lab: dpo, score --><!-- -->\n")

    assert call(page) == "lab.md: no row of the table begins with 'dpo' and has score."


def findings():
    """The script that makes `docs/results.md`."""
    spec = importlib.util.spec_from_file_location("docs_findings", ROOT / "docs/findings.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_findings"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_page_of_results_and_its_figures_are_what_the_studies_say():
    script = findings()

    assert script.main(["--check"]) is None
    assert len(script.FINDINGS) == 10


def test_a_page_of_results_that_was_changed_by_hand_fails_the_check(tmp_path):
    script = findings()
    shutil.copytree(ROOT / "docs/figures/results", tmp_path / "docs/figures/results")
    for file in sorted((ROOT / "studies/results").glob("*/summary.json")):
        (tmp_path / "studies/results" / file.parent.name).mkdir(parents=True)
        for each in (file, file.with_name("study.yaml")):
            shutil.copy(each, tmp_path / "studies/results" / file.parent.name)
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    (tmp_path / "docs/results.md").write_text(
        text.replace("no loss on pairs", "every loss on pairs"), encoding="utf-8"
    )

    said = script.main(["--check", "--root", str(tmp_path)])

    assert said == "results.md is not what the recorded rows say; run `python docs/findings.py`."


@pytest.mark.parametrize(
    ("late", "said"),
    [([], ""), (["b"], "The starred comparisons of b were "), (["a", "b"], "The starred comparisons were ")],
)
def test_a_finding_says_which_starred_comparisons_were_named_after_their_results(tmp_path, late, said):
    for name in "abc":
        (tmp_path / name).mkdir()
        is_late = "true" if name in late else "false"
        (tmp_path / name / "study.yaml").write_text(f"name: {name}\nprimary_after_results: {is_late}\n")
    rows = [((name, "x", "sft"), {"family": "primary", "p_value": 0.1}) for name in "ab"]
    plain = [(("c", "x", "sft"), {"family": "others", "p_value": 0.1})]

    text = findings().after_results(tmp_path, rows + plain)

    assert text == (said and f"{said}named after their results were known, so they confirm nothing.\n\n")


def test_a_sentence_that_the_numbers_do_not_bear_is_refused():
    """An interval from -1 to 3 points is around zero."""
    row = {"interval": [-0.01, 0.03], "family": None}
    with pytest.raises(
        ValueError, match="the interval is around zero and the sentence says above; rewrite it"
    ):
        findings().check_place(("online", "rloo", "sft"), row, "above")


def test_a_primary_comparison_has_the_interval_of_its_family_in_sentence_and_figure():
    """Alone the interval is above zero, with the other primary comparisons it is not; the figure marks the row."""
    script = findings()
    row = {
        "mean_difference": 0.02,
        "interval": [0.01, 0.03],
        "family_interval": [-0.01, 0.05],
        "by_base": [0.01, 0.02, 0.03],
        "p_value": 0.02,
        "family": "primary",
    }
    key = ("toy", "one", "sft")
    figure = script.forest(script.Finding("toy", "A.", [key], []), [(key, row)])
    alone = script.forest(script.Finding("toy", "A.", [key], []), [(key, row | {"family": "others"})])

    script.check_place(key, row, "around")
    assert "+2.0 [−1.0, +5.0] *" in figure
    assert "* primary comparison" in figure
    assert "+2.0 [+1.0, +3.0]<" in alone
    assert "* primary" not in alone


def test_a_forest_plot_has_a_mark_for_each_row_sorted_and_two_for_two_bases():
    """Differences 1 and 2 points, the larger first; the third is of two bases, a mark each and no interval."""
    script = findings()
    row = {
        "mean_difference": 0.01,
        "interval": [-0.01, 0.03],
        "by_base": [0.0, 0.01, 0.02],
        "p_value": 0.3,
        "family": None,
    }
    keys = [("toy", name, "sft") for name in ("small", "large", "two")]
    rows = [
        row,
        row | {"mean_difference": 0.02},
        row | {"mean_difference": 0.0, "by_base": [-0.01, 0.01], "p_value": None},
    ]
    figure = script.forest(script.Finding("toy", "A < B.", keys, []), list(zip(keys, rows, strict=True)))

    assert figure.count("<circle") == 4
    assert figure.count('class="line"') == 2
    assert figure.index("large over sft") < figure.index("small over sft") < figure.index("two over sft")
    assert "<title>A &lt; B.</title>" in figure
    assert "+2.0 [−1.0, +3.0]" in figure
    assert "−1.0 and +1.0" in figure
    assert "prefers-color-scheme:dark" in figure


def test_the_page_of_measured_turns_is_what_its_rows_say(tmp_path):
    """The real page passes the check; with a number changed by hand it does not."""
    import measured

    assert measured.main(["--check"]) is None
    shutil.copytree(ROOT / "studies/results/measure", tmp_path / "studies/results/measure")
    for study in measured.predicts.STUDIES:
        (tmp_path / "studies/results" / study).mkdir()
        shutil.copy(ROOT / "studies/results" / study / "summary.json", tmp_path / "studies/results" / study)
    (tmp_path / "docs/results").mkdir(parents=True)
    text = (ROOT / "docs/results/measure.md").read_text(encoding="utf-8")
    (tmp_path / "docs/results/measure.md").write_text(
        text.replace("turns of", "words of", 2), encoding="utf-8"
    )
    said = measured.main(["--check", "--root", str(tmp_path)])
    assert said == "results/measure.md is not what the recorded rows say; run `python docs/measured.py`."


def test_a_forest_of_scores_has_its_line_at_chance_and_the_largest_first():
    import measured

    figure = measured.forest("AUC", {"low": [0.4, 0.3, 0.5], "high": [0.8, 0.6, 1.0]}, 0.5)
    assert figure.index("high") < figure.rindex(">low<")
    assert figure.count("<circle") == 2
    assert 'class="null"' in figure
    assert "0.80 [0.60, 1.00]" in figure


def test_rank_correlations_of_gains_have_the_interval_of_few_credits():
    """Six credits in the same order but for two neighbours: 0.89 [0.07, 0.99]; of four there is no interval."""
    import predicts

    found = predicts.rank_correlation([1, 2, 3, 4, 5, 6], [1, 3, 2, 4, 6, 5])
    assert found == pytest.approx((0.886, 0.066, 0.992), abs=0.001)
    assert str(predicts.rank_correlation([1, 2, 3, 4], [1, 2, 4, 3])[1]) == "nan"


def test_agreement_of_two_measurements_reads_credits_that_vary_within_an_episode():
    """Three credits in the opposite order, and a credit without a correlation that would change the result."""
    import predicts

    def credit(value: float, correlation: list[float] | None) -> dict[str, list[float] | None]:
        return {"correlation": correlation, "lost_auc": [value, 0.0, 1.0]}

    one = {
        "credits": {
            name: credit(value, [value, 0, 1]) for name, value in (("a", 0.1), ("b", 0.2), ("c", 0.3))
        }
    }
    other = {
        "credits": {
            name: credit(value, [value, 0, 1]) for name, value in (("a", 0.3), ("b", 0.2), ("c", 0.1))
        }
    }
    for found, value in ((one, 0.9), (other, 0.9)):
        found["credits"]["constant"] = credit(value, None)
    rows = predicts.agreement(one, other).splitlines()[2:]
    assert [row.split("|")[1:3] for row in rows] == [[" correlation ", " 3 "], [" AUC, lost turn ", " 3 "]]
    assert all("−1.00" in row for row in rows)
