"""The figures hold the numbers of the run, and no others."""

import pytest

from perturn.report import summarize
from perturn.report.figures.score_figures import errors_by_turn, passes_by_episodes, success_by_length
from perturn.report.figures.training_curves import Chart, metric_lines
from perturn.report.figures.turn_figures import confidence_bars, values_by_turn
from perturn.stats import cluster_interval, rate_interval


def test_confidence_bars_are_split_by_weight(run, make):
    """Pair 2 is shown: the first whose rejected side has both weights. Its turn 2 has weight 1."""
    figure = make.page_of(run).figure("confidence-rejected")

    low, high = figure["data"]
    assert (low["name"], low["x"], low["y"]) == ("weight 0.2", [1, 3], [0.95, 1.0000001])
    assert (high["name"], high["x"], high["y"]) == ("weight 1", [2], [0.375])
    assert low["marker"]["color"] != high["marker"]["color"]
    assert [shape["y0"] for shape in figure["layout"]["shapes"]] == [0.85]


def test_mean_confidence_by_turn_by_hand(run, make):
    """Rejected side: (0.97 + 0.95)/2, (0.98 + 0.375)/2, (0.99 + 1)/2, rounding above 1 cut; two pairs of two tasks."""
    figure = make.page_of(run).figure("confidence-all")

    line = next(trace for trace in figure["data"] if trace.get("name") == "rejected")
    assert line["y"] == pytest.approx([0.96, 0.6775, 0.995])
    assert line["customdata"] == [[2, 2]] * 3


def test_equal_weights_have_no_band():
    """Two pairs weigh both turns 1; the confidences differ, so they have one."""
    sides = [{"turn": [0, 1], "confidence": [low, 0.5], "weight": [1.0, 1.0]} for low in (0.2, 0.4)]
    rows = [{"chosen": side, "rejected": side} for side in sides]

    weights, _, *_ = values_by_turn(rows, ["a", "b"], "weight", "mean weight").data
    confidence, _, *_ = values_by_turn(rows, ["a", "b"], "confidence", "mean confidence").data

    assert list(weights.y) == [1.0] * 4
    assert confidence.y[0] > 0.3 > confidence.y[-1]


def test_curves_leave_out_what_is_not_a_number(run, make):
    page = make.page_of(run)

    chosen, rejected = page.figure("density-0")["data"]
    assert chosen["x"] == [1, 2, 3, 4, 5]
    assert rejected["x"] == [0, 1, 2, 3, 4, 5]
    assert page.figure("margin-0")["data"][0]["y"] == [0.0, 0.125, 0.25, 0.375, 0.5, 0.625]
    assert page.figure("density-2")["layout"]["yaxis"]["type"] == "log"


def test_bars_by_kind_carry_their_intervals(run, make):
    figure = make.page_of(run).figure("kind")

    bars = next(trace for trace in figure["data"] if trace["name"] == "tlm-dre")
    cell = summarize(run)["by_kind"]["melt"]["tlm-dre"]
    assert (bars["y"], bars["x"]) == (["boil", "melt"], [0.5, 0.75])
    assert bars["error_x"]["array"][1] == pytest.approx(cell["interval"][1] - 0.75)
    assert bars["error_x"]["arrayminus"][1] == pytest.approx(0.75 - cell["interval"][0])


def test_only_ratios_are_drawn_on_a_logarithmic_axis(run, make):
    make.put_rows(run / "metrics" / "sft.jsonl", [{"step": i, "learning_rate": 10.0**-i} for i in range(6)])

    assert "type" not in make.page_of(run).figure("sft-2")["layout"]["yaxis"]


def test_confidence_of_other_pairs_is_left_out_and_said(run, make):
    empty = {"confidence": [], "weight": []}
    make.put_rows(run / "metrics" / "confidence.jsonl", [{"chosen": empty, "rejected": empty}])

    page = make.page_of(run)

    assert "metrics/confidence.jsonl has 1 rows and pairs.jsonl 2" in page.text
    assert "confidence-all" not in page.figures
    _, body, tokens = page.episode(set="trajectories/expert", task="p0")
    assert "confidence" not in body
    assert tokens["by"] == "reference"


def test_a_line_being_written_is_left_out(run, make):
    with (run / "metrics" / "align.jsonl").open("a") as file:
        file.write('{"step": 6, "rewards/mar')

    assert len(make.page_of(run).figure("margin-0")["data"][0]["x"]) == 6


def score_again(run, make, **scores):
    """Replace the scores of policies: task -> score."""
    for policy, of_tasks in scores.items():
        file = run / "evaluation" / f"{policy.replace('_', '-')}.jsonl"
        file.unlink()
        make.put(file, [make.trajectory(task, score) for task, score in of_tasks.items()])


@pytest.mark.parametrize(("n", "says"), [(3, "each of 3 tasks."), (1, "the one task.")])
def test_scores_that_all_tie_are_a_sentence_and_no_empty_plot(run, make, n, says):
    """All episodes also take two turns, which says nothing of their success."""
    scores = {f"t{i}": 0.5 for i in range(n)}
    score_again(run, make, base=scores, sft=scores, tlm_dre=scores)

    page = make.page_of(run)

    assert f"tlm-dre minus sft, task by task Both score the same on {says}" in page.text
    assert "All episodes took 2 turns, so their length says nothing of their success." in page.text
    assert {"tasks-0", "length"}.isdisjoint(page.figures)


def test_training_of_one_step_is_a_sentence_and_no_plot_of_a_point(run, make):
    """Both sides are named where there are two, as they were logged."""
    row = {"step": 1, "loss": 0.5, "rewards/chosen": 0.25, "rewards/rejected": -1.0, "x/a&b": 1, "x/c": 2}
    make.put_rows(run / "metrics" / "align.jsonl", [row])

    page = make.page_of(run)

    assert "Loss One optimizer step: 0.5. " in page.text
    assert "Rewards One optimizer step: chosen 0.25, rejected -1. Implicit rewards of the two" in page.text
    assert "One optimizer step: a&b 1, c 2." in page.text
    assert not any(name.startswith("align-") for name in page.figures)


def test_steps_are_counted_in_whole_numbers(run, make):
    """Six steps; and a value that is always 0 does not lie on the axis."""
    page = make.page_of(run)

    assert page.figure("margin-0")["layout"]["xaxis"]["dtick"] == 1
    assert page.figure("density-3")["layout"]["yaxis"]["range"] == [-0.05, 1]


def test_a_score_of_zero_is_seen(run, make):
    """A bar of no length has an outline in the colour of its policy."""
    base = next(trace for trace in make.page_of(run).figure("kind")["data"] if trace["name"] == "base")

    assert base["x"] == [0.0]
    assert base["marker"]["line"] == {"color": base["marker"]["color"], "width": 2}


def test_numbers_of_a_loss_have_a_title_and_a_unit(run, make):
    """A KL is named in full and is in nats; a number that nobody described has its key as title."""
    make.put_rows(
        run / "metrics" / "align.jsonl",
        [{"step": step, "loss": 0.5, "behavior_kl": 0.01 * step, "my_number": 1.0 * step} for step in (1, 2)],
    )

    page = make.page_of(run).text

    assert "KL to the behavior policy" in page
    assert "k3 of the sampling policy against the policy now, in nats a token." in page
    assert "My number" in page


def test_pass_at_k_and_pass_hat_k_are_drawn_for_policies_that_play_a_task_several_times():
    """A policy with single episodes has no line; a missing end of an interval has no bar."""
    found = {
        "pass_at": {
            "1": {"mean": 0.5, "interval": [0.2, 0.8], "n": 4},
            "2": {"mean": 0.75, "interval": [0.4, None], "n": 4},
        },
        "pass_hat": {
            "1": {"mean": 0.5, "interval": [0.2, 0.8], "n": 4},
            "2": {"mean": 0.25, "interval": [0.1, 0.6], "n": 4},
        },
    }

    figure = passes_by_episodes({"base": {"name": "base"}, "a<b": found})

    at, hat = figure.data
    assert (at.name, hat.name) == ("a&lt;b, pass@k", "a&lt;b, pass^k")
    assert (list(at.x), list(at.y), list(hat.y)) == ([1, 2], [0.5, 0.75], [0.5, 0.25])
    assert list(at.error_y.array) == pytest.approx([0.3, 0.0])
    assert list(at.error_y.arrayminus) == pytest.approx([0.3, 0.35])
    assert passes_by_episodes({"base": {"name": "base"}}) is None


def test_errors_by_turn_are_drawn_before_and_after_the_first_error():
    def rate(mean):
        return {"mean": mean, "interval": [0.0, 1.0], "n": 2, "turns": 2}

    rows = [
        {"turn": 1, "before": rate(0.5), "after": None},
        {"turn": 2, "before": rate(0.0), "after": rate(1.0)},
        {"turn": 3, "before": None, "after": rate(0.25)},
    ]
    figure = errors_by_turn({"sft": {"errors": {"kind": "wrong", "by_turn": rows}}, "base": {"errors": None}})

    before, after = figure.data
    assert (before.name, list(before.x), list(before.y)) == ("sft, up to the first error", [1, 2], [0.5, 0.0])
    assert (after.name, list(after.x), list(after.y)) == ("sft, after it", [2, 3], [1.0, 0.25])
    without = [{"turn": 1, "before": rate(0.0), "after": None}]
    assert errors_by_turn({"sft": {"errors": {"kind": "invalid", "by_turn": without}}}) is None


def test_the_report_draws_the_errors_of_its_policies_by_turn(run, make):
    """The figure has the numbers of `summary.json`."""
    figure = make.page_of(run).figure("errors")
    row = next(each for each in summarize(run)["policies"] if each["name"] == "sft")

    line = next(trace for trace in figure["data"] if trace["name"] == "sft, up to the first error")
    expected = [each["before"]["mean"] for each in row["errors"]["by_turn"] if each["before"]]
    assert line["y"] == pytest.approx(expected)


def test_negative_weights_are_drawn():
    """Means -0.5 and 0.5 of two pairs; the axis begins below the lowest weight, -1."""
    sides = [{"turn": [0, 1], "confidence": [0.5, 0.5], "weight": [-each, each]} for each in (0.0, 1.0)]
    rows = [{"chosen": side, "rejected": side} for side in sides]
    figure = values_by_turn(rows, ["a", "b"], "weight", "mean weight")

    line = next(trace for trace in figure.data if trace.name == "chosen")
    assert list(line.y) == [-0.5, 0.5]
    assert figure.layout.yaxis.range[0] < -1


def test_pairs_that_share_their_chosen_episode_count_once_in_the_band():
    """Ten tasks with eight pairs each have the interval of ten values."""
    values = [0.05 * (index // 8) for index in range(80)]
    tasks = [f"t{index // 8}" for index in range(80)]
    sides = [{"turn": [0], "confidence": [value], "weight": [1.0]} for value in values]
    rows = [{"chosen": side, "rejected": side} for side in sides]

    band, line, *_ = values_by_turn(rows, tasks, "confidence", "mean confidence").data

    once = cluster_interval(values[::8], tasks[::8])
    assert list(band.y) == pytest.approx([once.high, once.low])
    assert list(line.customdata) == [[80, 10]]


def test_episodes_of_a_task_are_one_cluster_in_success_by_length():
    """Five seeds play ten tasks equally, which is as sure as one seed; single episodes have Wilson's interval."""
    once = [(10, task < 4, f"t{task}") for task in range(10)]
    figure = success_by_length({"five": once * 5, "one": [*once, (20, False, "other")]})

    five, one = figure.data
    found = cluster_interval([float(ok) for _, ok, _ in once * 5], [task for *_, task in once * 5])
    assert found.high - found.low > 0.9 * (rate_interval(4, 10).high - rate_interval(4, 10).low)
    assert five.error_y.array[0] == pytest.approx(found.high - 0.4)
    assert one.error_y.array[0] == pytest.approx(rate_interval(4, 10).high - 0.4)
    assert five.customdata[0][1] == 50


def test_many_weights_have_a_colour_bar():
    """Seven weights; six have an entry of the legend each."""
    side = {"confidence": [0.5] * 7, "weight": [float(n) for n in range(7)]}
    fewer = {key: values[:6] for key, values in side.items()}

    many, few = confidence_bars(side, ["go"] * 7, None), confidence_bars(fewer, ["go"] * 6, None)

    (bars,) = many.data
    assert list(bars.marker.color) == side["weight"]
    assert (many.layout.showlegend, bars.marker.colorbar.title.text) == (False, "weight")
    assert (few.layout.showlegend, len(few.data)) == (True, 6)


def test_runs_with_the_same_colour_have_other_dashes():
    """There are five colours."""
    rows = [{"step": step, "a/chosen": 0.5, "a/rejected": 0.5} for step in range(3)]
    figure = metric_lines({f"run {n}": rows for n in range(12)}, Chart("a", ("a/chosen", "a/rejected")))

    styles = [(trace.line.color, trace.line.dash) for trace in figure.data]
    assert len(set(styles)) == len(styles) == 24
