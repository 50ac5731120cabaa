"""The page of a study: it shows what the summary says, stays text, and is drawn in a real browser."""

import json
import shutil
import subprocess

import pytest

from perturn.report.report_page import script
from perturn.study.tables.study_figures import differences
from perturn.study.tables.study_page import _CODE, write_study_page
from perturn.study.tables.verdicts import summarize
from study.recorded_studies import make as make_study
from study.recorded_studies import write

from .views import faults, texts


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A whole study of two environments, with its page."""
    folder = tmp_path_factory.mktemp("study") / "offline"
    settings, cells, rows = make_study(folder, environments=("alfworld", "alfworld-like"))
    cells.append(cells[-1] | {"seed": 9, "state": "failed", "error": "CUDA out of memory"})
    write(folder, settings, cells, rows)
    write_study_page(folder)
    return folder


@pytest.fixture
def page(study, make):
    """The page as a browser splits it."""
    return make.Page((study / "report.html").read_text(encoding="utf-8"))


def test_the_summary_is_written_beside_the_page(study):
    assert json.loads((study / "summary.json").read_text(encoding="utf-8")) == summarize(study)


def test_the_page_is_the_same_each_time(study):
    before = (study / "report.html").read_bytes()

    assert write_study_page(study).read_bytes() == before


def test_the_page_says_what_the_summary_says(study, page):
    online = next(
        row for row in summarize(study)["environments"]["alfworld"]["methods"] if row["method"] == "online"
    )
    found = online["success"]["against"]

    assert "online is better than sft." in page.text
    assert "No difference between dpo and sft was seen; this study detects a true difference of" in page.text
    assert f"{100 * online['success']['mean']:.1f}\u00a0%" in " ".join(page.words)
    assert f"{100 * found['mean_difference']:+.1f}" in page.text
    assert "3 × 140" in page.text
    assert "q is the Benjamini-Hochberg q-value over 4 comparisons." in page.text
    assert "CUDA out of memory" in page.text
    assert "3 seeds are few" in page.text


def test_figures_of_each_environment(page):
    drawn = {f"{name}-{i}" for name in ("differences-success", "length") for i in (0, 1)}

    assert page.figures == drawn | {"tuning-0-0", "tuning-1-0"}


def test_differences_are_drawn_with_their_seeds(study, page):
    figure = page.figure("differences-success-0")
    found = next(trace for trace in figure["data"] if trace["name"].startswith("all seeds"))
    summary = summarize(study)["environments"]["alfworld"]["methods"]
    counted = {
        row["method"]: row["success"]["against"] for row in summary if row["method"] not in ("base", "sft")
    }

    assert found["y"] == list(counted)
    assert found["x"] == pytest.approx([100 * row["mean_difference"] for row in counted.values()])
    assert found["error_x"]["arrayminus"] == pytest.approx(
        [100 * (row["mean_difference"] - row["interval"][0]) for row in counted.values()]
    )
    seeds = next(trace for trace in figure["data"] if trace["name"] == "a seed")
    assert len(seeds["x"]) == 3 * len(counted)
    each = [one for row in counted.values() for one in row["by_seed"]]
    assert seeds["customdata"] == [
        [one["seed"], *(f"{100 * end:+.3g}" for end in one["interval"])] for one in each
    ]


def test_a_primary_comparison_is_drawn_with_the_interval_of_its_family():
    """2 points [-1, 5] in its family, and [1, 3] alone."""
    row = {
        "mean_difference": 0.02,
        "interval": [0.01, 0.03],
        "family_interval": [-0.01, 0.05],
        "by_seed": [],
    }
    named = [
        {"name": family, "method": family, "success": row | {"family": family}}
        for family in ("primary", "others")
    ]
    figure = differences(named, "success", {name: {"color": "red"} for name in ("primary", "others")})

    drawn = next(trace for trace in figure.data if trace.name.startswith("all seeds"))
    assert drawn.error_x.arrayminus == pytest.approx([3, 1])
    assert drawn.error_x.array == pytest.approx([3, 1])


def test_the_tested_points_sort_above_the_others(study):
    """An empty cell would count as missing, and would be last in both directions."""
    text = (study / "report.html").read_text(encoding="utf-8")

    assert '<td data-value="1">yes</td>' in text
    assert '<td data-value="0"></td>' in text


def test_tuning_is_drawn_on_a_logarithmic_axis_with_the_tested_point_large(page):
    figure = page.figure("tuning-0-0")
    line = next(trace for trace in figure["data"] if trace["name"] == "online")

    assert line["x"] == [1e-6, 1e-5, 1e-4]
    assert sorted(line["marker"]["size"]) == [7, 7, 13]
    assert figure["layout"]["xaxis"]["type"] == "log"
    assert [each["text"] for each in figure["layout"]["annotations"]] == ["sft"]


def test_two_swept_settings_have_a_figure_each(tmp_path, make):
    """Another setting is part of a line's name; values that are no numbers stand as they are."""
    settings, cells, rows = make_study(tmp_path, methods=("sft", "dpo"))
    kernels = {1e-6: "ukl", 1e-5: "ukl", 1e-4: "bce"}
    for one in cells:
        if rate := one["point"].get("align.learning_rate"):
            one["point"] = {"align.learning_rate": rate, "align.loss.kernel": kernels[rate]}
    for row in rows:
        if row["point"]:
            row["point"] += f", align.loss.kernel={kernels[float(row['point'].partition('=')[2])]}"
    write(tmp_path, settings, cells, rows)

    page = make.Page(write_study_page(tmp_path).read_text(encoding="utf-8"))

    names = {trace["name"] for trace in page.figure("tuning-0-0")["data"]}
    assert names == {"dpo, kernel ukl", "dpo, kernel bce"}
    assert {value for trace in page.figure("tuning-0-1")["data"] for value in trace["x"]} == {"ukl", "bce"}


def test_a_page_of_hardly_anything(tmp_path, make):
    """No episode, no interval, no figure: the page says so."""
    settings, cells, _ = make_study(tmp_path, methods=("sft",))
    write(tmp_path, settings, [one | {"state": "to do", "seconds": None} for one in cells], [])

    page = make.Page(write_study_page(tmp_path).read_text(encoding="utf-8"))

    assert "The baseline, sft, has no episode on the test tasks, so there are no comparisons." in page.text
    assert page.figures == set()


def test_text_stays_text(tmp_path, make):
    settings, cells, rows = make_study(tmp_path, methods=("sft", "dpo"))
    names = {"dpo": make.HOSTILE, "sft": "sft", "alfworld": make.HOSTILE}
    for row in (*rows, *cells):
        row["method"], row["environment"] = names[row["method"]], names[row["environment"]]
    cells[0]["error"], cells[0]["state"] = make.HOSTILE, "failed"
    write(tmp_path, settings | {"name": make.HOSTILE}, cells, rows)

    page = make.Page(write_study_page(tmp_path).read_text(encoding="utf-8"))

    assert len(page.code) == 1
    assert not any(tag == "img" for tag, _ in page.elements)


def test_the_page_fetches_nothing(page):
    links = [value for _, attrs in page.elements for key, value in attrs.items() if key in ("src", "href")]

    assert all(link.startswith("#") for link in links)
    assert page.content_policy.startswith("default-src 'none'; script-src 'sha256-")


def test_the_joined_script_parses(tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    (tmp_path / "page.js").write_text(script(_CODE), encoding="utf-8")

    checked = subprocess.run([node, "--check", tmp_path / "page.js"], capture_output=True, text=True)

    assert checked.returncode == 0, checked.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("width", "theme"), [(1440, "light"), (380, "dark")])
def test_a_browser_draws_it_without_a_fault(visit, study, width, theme):
    """No error, nothing fetched, nothing wider than the screen, all figures drawn, and axe finds no fault."""
    assert faults(visit, study / "report.html", {"report": ""}, width, theme) == {"report": []}


@pytest.mark.slow
def test_a_table_sorts_by_its_column(visit, study):
    with visit(study / "report.html") as tab:
        tab.locator("#report table").first.get_by_role("button", name="success").click()

        names = texts(tab, "#report table >> nth=0 >> tbody th")
    assert [name.split()[0] for name in names] == ["online", "tlm-dre", "sft", "dpo", "harmful", "base"]
