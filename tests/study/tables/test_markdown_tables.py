"""The table of a study in Markdown."""

from perturn.study.tables.study_page import tables, write_study_page
from perturn.study.tables.verdicts import summarize
from study.recorded_studies import by_task, make, small, write


def cells(text, first):
    """Cells of the row that begins with a text."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {first} "))
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_a_table_by_hand(tmp_path):
    """One seed, 16 games: a solves 8 and sft none, c one; McNemar's p 2/2^8, a against c 2/2^7; q 3/128 each."""
    scores = {
        name: {0: by_task(*[1] * won, *[0] * (16 - won))} for name, won in {"sft": 0, "a": 8, "c": 1}.items()
    }
    found, rows = small(tmp_path, scores)
    methods = {name: {} for name in scores}
    write(tmp_path, {"baseline": "sft", "compare": [["a", "c"]], "methods": methods}, found, rows)

    text = tables(summarize(tmp_path))

    assert text.startswith(
        "**toy**.\n\n| method | setting | tasks × seeds | success, % | against sft, points | p | q |"
    )
    name, point, size, level, difference, p, q, seen, verdict = cells(text, "a")
    assert (name, point, size) == ("a", "", "16 × 1")
    assert level.startswith("50.0 [")
    assert difference.startswith("+50.0 [+")
    assert (p, q, verdict) == (f"{1 / 128:.3f}", f"{3 / 128:.3f}", "not shown for other seeds")
    assert float(seen) > 0
    assert cells(text, "sft")[4:] == ["–", "–", "–", "–", "baseline"]
    further = cells(text, "a against c")
    assert further[1] == "16 × 1"
    assert further[2].startswith(f"+{100 * 7 / 16:.1f} [")
    assert further[3:5] == [f"{1 / 64:.3f}", f"{3 / 128:.3f}"]
    assert "q is the Benjamini-Hochberg q-value over 3 comparisons." in text
    assert "- There is one seed, so the intervals are for other tasks only" in text
    assert "They cover other tasks. Methods are paired" in text


def test_it_has_the_numbers_of_the_summary_and_is_written_beside_it(tmp_path):
    """With points, bases, and the model that no p is corrected for; a minus is a minus."""
    settings, rows, episodes = make(tmp_path, seeds=(0, 1, 2, 3))
    write(tmp_path, settings | {"seeds": [0, 1, 2, 3], "by_seed": {"base.seed": [0, 1, 2]}}, rows, episodes)
    write_study_page(tmp_path)
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    summary = summarize(tmp_path)

    assert text == tables(summary)
    for row in summary["environments"]["alfworld"]["methods"]:
        found = cells(text, row["method"])
        against = row["success"]["against"]
        assert found[2] == "140 × 4, 3 bases"
        assert found[3].startswith(f"{100 * row['success']['mean']:.1f} [")
        if against:
            assert found[4].startswith(f"{100 * against['mean_difference']:+.1f} [".replace("-", "−"))
    assert cells(text, "online")[1] == "align.learning_rate=1e-06"
    assert cells(text, "base")[5:7] == ["< 0.001", "–"]


def test_a_score_has_a_table_of_its_own(tmp_path):
    scores = {"sft": dict.fromkeys(range(3), by_task(0, 1)), "rft": dict.fromkeys(range(3), by_task(0, 1))}
    small(tmp_path, scores, measure=lambda method, task: 0.5 if method == "rft" else 0.25)

    _, success, score, *_ = tables(summarize(tmp_path)).split("\n\n")

    assert "| success, % | against sft, points |" in success
    assert "| score | against sft, score |" in score
    assert cells(score, "rft")[4].startswith("+0.250 [")


def test_what_is_missing_is_said(tmp_path):
    settings, rows, _ = make(tmp_path, methods=("sft", "dpo"))
    write(
        tmp_path,
        settings,
        [row | {"state": "to do"} for row in rows[1:]] + [rows[0] | {"state": "failed"}],
        [],
    )

    text = tables(summarize(tmp_path))

    assert f"Not finished: 1 failed cells, {len(rows) - 1} cells left to do." in text
    assert cells(text, "dpo")[2:] == ["0 × 0", "–", "–", "–", "–", "–", "no episode"]


def test_text_ends_no_cell_and_is_no_html(tmp_path):
    """Nor does a comment end the block of a page."""
    scores = {"sft": {0: by_task(1, 0)}, "a|b <!-- end -->\nc": {0: by_task(1, 1)}}
    small(tmp_path, scores)

    text = tables(summarize(tmp_path))

    assert "<!--" not in text
    assert "| a\\|b &lt;!-- end --> c |" in text
