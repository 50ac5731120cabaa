"""A run of many iterations: its numbers by iteration, by hand, and how the page shows them."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from perturn.analysis.run_contents import read_run
from perturn.analysis.run_summary import set_rows
from perturn.data.episode_outcomes import read_outcomes
from perturn.data.file_seals import seal
from perturn.data.group_account import read_credits, write_credits
from perturn.data.iteration_numbers import ledger_of, training_of
from perturn.data.run_paths import RunPaths
from perturn.data.store import read_trajectories, write_pairs, write_records
from perturn.errors import RunError
from perturn.report import summarize, write_report
from perturn.stats import cluster_interval
from perturn.types import PreferencePair, WeightedTrajectory, failed, score, succeeded
from perturn.watch import Watcher, render


@pytest.fixture
def online(tmp_path, make):
    """Three iterations; see `online_run`."""
    return make.online_run(tmp_path / "online")


def change(run, **stages):
    """Change counts of stages in the manifest."""
    manifest = json.loads((run / "manifest.json").read_text())
    for stage, counts in stages.items():
        manifest["stages"][stage.replace("_", "-")] |= counts
    (run / "manifest.json").write_text(json.dumps(manifest))


def uncredit(run):
    """Take the credit of the last iteration away, as if it were still to come."""
    manifest = json.loads((run / "manifest.json").read_text())
    del manifest["stages"]["credit-003"], manifest["files"]["credits/rloo-003.jsonl"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / "credits" / "rloo-003.jsonl").unlink()


def test_an_iteration_in_numbers_by_hand(online):
    """Iteration 2: 3 of 4 succeed, a once and b twice; 2, 3, 2 and 3 turns, one of them invalid."""
    found = summarize(online)["iterations"]

    assert [row["iteration"] for row in found] == [1, 2, 3]
    explored, ledger, training = (found[1][part] for part in ("explored", "ledger", "training"))
    assert (explored["policy"], explored["n"], explored["tasks"]) == ("ppo-clip-001", 4, 2)
    assert (explored["success_rate"], explored["mean_score"], explored["failed"]) == (0.75, 0.75, 0)
    clustered = cluster_interval([1.0, 0.0, 1.0, 1.0], ["a", "a", "b", "b"])
    assert explored["success_interval"] == explored["interval"] == [clustered.low, clustered.high]
    assert (explored["mean_turns"], explored["invalid_rate"]) == (2.5, 0.1)
    assert ledger == {
        "asked": 4,
        "bins": {"trained": 2, "no_spread": 2, "failed": 0, "stale": 0, "cut": 0, "filtered": 0},
        "groups": {"groups": 2, "alone": 0, "equal_outcomes": 1, "zero_credit": 1},
        "unit": "episodes",
    }
    assert training == {
        "steps": 2, "loss": 0.5, "grad_norm": 1.5, "entropy": 0.5, "kl": 0.3, "clip_share": 0.125,
        "mismatch": 0.01, "agreement": None,
    }  # fmt: skip
    assert found[1]["evaluation"] == {
        key: summarize(online)["policies"][1][key]
        for key in ("n", "mean_score", "interval", "success_rate", "success_interval")
    } | {"policy": "ppo-clip-002"}
    assert (found[0]["evaluation"], found[0]["seconds"]) == (None, 4.0)
    assert found[1]["seconds"] == 5.0  # with the evaluation of its policy


def test_memberships_of_branches_are_counted_and_named(online):
    """Two explored episodes of 4 were played on from two turns each, once: 2 * 2 * 2 memberships, 6 of them kept."""
    manifest = json.loads((online / "manifest.json").read_text())
    for mark in ("-001", "-002", "-003"):
        del manifest["stages"][f"credit{mark}"]
        manifest["stages"][f"explore{mark}"]["counts"] = {"episodes": 4, "success": 3}
        manifest["stages"][f"pair{mark}"] = {"done": True, "counts": {"kept": 6, "tie": 2, "memberships": 8}}
    (online / "manifest.json").write_text(json.dumps(manifest))

    rows = summarize(online)["iterations"]
    page, state = write_report(online).read_text(), Watcher(online).look()

    bins = {"kept": 6, "tie": 2}
    assert rows[1]["ledger"] == {"asked": 8, "bins": bins, "groups": {}, "unit": "memberships"}
    assert "memberships asked" in page
    assert "Every membership is in one bin" in page
    assert "Give its credit again" not in page
    assert (state.iterations[-1].asked, state.iterations[-1].unit) == (8, "memberships")
    console = Console(record=True, width=160, file=io.StringIO())
    console.print(render(replace(state, planned=3)))
    said = console.export_text()
    assert "memberships" in said
    assert "6 kept, 2 tie" in said
    assert "of 4" not in said


def test_a_loop_done_once_is_one_iteration_and_has_no_curve(run, make):
    """Two episodes were explored; nothing says where they ended."""
    (only,) = summarize(run)["iterations"]

    assert (only["iteration"], only["explored"]["n"], only["ledger"]) == (1, 2, None)
    assert only["evaluation"]["policy"] == "tlm-dre"
    assert 'id="learning"' not in write_report(run).read_text()


def test_an_exploration_that_goes_on_is_left_out(online):
    """Its short episodes ended first; of the iteration before, everything is shown."""
    change(online, explore_003={"done": False})
    uncredit(online)

    found = summarize(online)["iterations"]

    assert [row["iteration"] for row in found] == [1, 2]


def test_outcomes_are_those_of_whole_trajectories(run, make):
    """Read without their texts: the same numbers, a FAILED one too, and sampled tokens."""
    file = run / "evaluation" / "sft.jsonl"
    whole, found = list(read_trajectories(file)), read_outcomes(file)

    assert [(one.task, one.score, one.success, one.failed) for one in found] == [
        (each.task.id, score(each), succeeded(each), failed(each)) for each in whole
    ]
    assert [(one.turns, one.invalid) for one in found] == [(2, 1), (2, 0), (4, 1), (0, 0)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "task: expected a value, got none"),
        ('{"task": {"id": "a"}, "total_reward": NaN}', "total_reward: expected a finite number"),
        ("nonsense", r"jsonl:1: not a trajectory: [Ii]nvalid JSON"),
        ("[" * 5000, r"jsonl:1: not a trajectory"),
    ],
)
def test_a_line_that_is_no_trajectory_is_named(tmp_path, line, message):
    (tmp_path / "x.jsonl").write_text(line + "\n")

    with pytest.raises(RunError, match=message) as caught:
        read_outcomes(tmp_path / "x.jsonl")
    assert "\n" not in str(caught.value)


def test_pairs_have_a_ledger_too():
    """Each explored episode under one count; how many of the kept were cut is not a bin."""
    found = ledger_of({"failed": 1, "tie": 5, "kept": 2, "cut": 1}, 8)

    assert found == {"asked": 8, "bins": {"failed": 1, "tie": 5, "kept": 2}, "groups": {}, "unit": "episodes"}
    assert ledger_of({"pairs": 2}, 8) is None


def test_corrections_that_an_earlier_version_counted_as_too_long_are_no_episodes():
    counts = {"taught": 2, "success": 3, "failure": 1, "corrections": 1, "too_long": 2, "not_corrected": 0}

    assert ledger_of(counts, 4)["bins"]["too_long"] == 0
    assert ledger_of(counts | {"corrections_too_long": 0}, 6)["bins"]["too_long"] == 2


def test_outcomes_have_a_ledger_and_their_rows_are_what_was_trained(online, make):
    """Iteration 2 learns of one row of 3 turns, so KL is (0.1 + 0.2 + 0.6) / 3."""
    manifest = json.loads((online / "manifest.json").read_text())
    del manifest["stages"]["credit-002"], manifest["files"]["credits/rloo-002.jsonl"]
    counts = {"taught": 9, "expert": 2, "success": 3, "repeated": 1, "rows": 1}
    manifest["stages"]["outcomes-002"] = {"done": True, "seconds": 1.0, "counts": counts}
    paths = RunPaths(online)
    longest = max(read_trajectories(paths.trajectories("explore-002")), key=lambda one: len(one.turns))
    write_records(paths.outcomes("-002"), [WeightedTrajectory(longest, (0.0, 1.0, 1.0))])
    manifest["files"] |= seal(online, [paths.outcomes("-002")], "outcomes-002")
    (online / "manifest.json").write_text(json.dumps(manifest))

    found = summarize(online)["iterations"][1]
    assert found["ledger"] == {
        "asked": 4,
        "bins": {"failed": 0, "no_turns": 0, "too_long": 0, "repeated": 1, "success": 3, "failure": 0},
        "groups": {},
        "unit": "episodes",
    }
    assert found["training"]["kl"] == 0.3
    (watched,) = (one for one in Watcher(online).look().iterations if one.number == 2)
    assert (watched.asked, sum(watched.bins.values()), watched.bins["success"]) == (4, 4, 3)


def test_values_that_are_not_numbers_are_left_out():
    """Logged as text, or not finite; what nothing has is None."""
    found = training_of(
        [
            {"loss": 1.0, "kl/turns": 0.5, "kl/turn_1": 9.0},
            {"loss": "nan", "grad_norm": True},
            {"loss": -(10**400)},
        ]
    )

    assert (found["loss"], found["kl"], found["grad_norm"], found["entropy"]) == (1.0, 0.5, None, None)


def test_learning_is_drawn_with_the_training_behind_it(online, make):
    """Explored episodes of iteration k were played after k - 1; base was scored before all, ppo-clip-002 after two."""
    figure = make.page_of(online).figure("learning-0")

    band, line, points = figure["data"]
    assert (line["x"], line["y"]) == ([0, 1, 2], [0.25, 0.75, 0.75])
    assert [each[2] for each in line["customdata"]] == ["base", "ppo-clip-001", "ppo-clip-002"]
    assert band["y"][:3] == [
        row["explored"]["success_interval"][1] for row in summarize(online)["iterations"]
    ]
    assert (points["x"], points["y"]) == ([0, 2], [0.0, 0.75])
    assert "Mean reward An episode's reward is 1 or 0 here: its success." in make.page_of(online).text


def test_a_reward_that_is_no_success_has_its_own_curve(online, make):
    file = online / "trajectories" / "explore-001.jsonl"
    file.write_text(file.read_text().replace('"total_reward":1.0', '"total_reward":0.5'))

    page = make.page_of(online)

    assert page.figure("learning-1")["data"][1]["y"] == [0.125, 0.75, 0.75]


def test_small_curves_and_the_ledger(online, make):
    page = make.page_of(online)

    values = {i: page.figure(f"iteration-{i}")["data"][-1]["y"] for i in (2, 3, 4, 5, 6)}
    assert values[2] == pytest.approx([1.0, 0.5, 1 / 3])
    assert values[3] == pytest.approx([0.3] * 3)
    assert (values[4], values[5], values[6]) == ([0.125] * 3, [0.01] * 3, [1.5] * 3)
    assert [(trace["name"], trace["y"]) for trace in page.figure("ledger-0")["data"]] == [
        ("trained", [2, 2, 2]),
        ("no spread", [2, 2, 2]),
    ]


def test_bins_that_do_not_sum_are_noted(online, make):
    change(online, credit_002={"counts": {"asked": 4, "trained": 2, "no_spread": 1}})

    assert "The bins of iteration 2 hold 3 of the 4 episodes asked for." in make.page_of(online).text


def test_stages_of_all_iterations_are_one_row(online, make):
    """Three explorations of 2 s; the most memory of an alignment is 3 GB."""
    text = make.page_of(online).text

    assert "explore, 3 times 6.0 s" in text
    assert "align, 3 times 4.5 s 3.0 30 tokens" in text
    assert "evaluate-ppo-clip-002" in text
    assert "explore-001" not in text


def test_curves_of_the_alignment_go_on_from_one_iteration_to_the_next(online, make):
    assert make.page_of(online).figure("align-5")["data"][0]["x"] == [1, 2, 3, 4, 5, 6]


def test_the_margin_has_what_the_credit_gave(online, make):
    """Of the newest iteration, with the bin."""
    page = make.page_of(online)

    _, body, _ = page.episode(set="trajectories/explore-003", task="a", sample=1)
    assert (body["weight"], body["credit"], body["bin"]) == ([-0.5, -1.0, -1.5], "rloo", "trained")
    _, body, _ = page.episode(set="trajectories/explore-003", task="b", sample=0)
    assert (body["weight"], body["bin"]) == ([0.0, 0.0], "no_spread")


def test_an_iteration_that_is_not_credited_yet_is_not_shown(online, make):
    """Its episodes have no weight; those of the one before have."""
    uncredit(online)

    _, body, _ = make.page_of(online).episode(set="trajectories/explore-002", task="a")
    assert body["weight"] == [0.5, 1.0]


def test_weights_of_another_credit_are_not_the_runs(online, make):
    """`perturn credit` wrote them beside the run's own."""
    paths = RunPaths(online)
    write_credits(paths.credit("aaa", "-003"), read_credits(paths.credit("rloo", "-003")))

    _, body, _ = make.page_of(online).episode(set="trajectories/explore-003", task="a")
    assert body["credit"] == "rloo"


def test_the_group_with_the_widest_spread_is_side_by_side(online, make):
    """Task a scores 1 and 0, task b 1 and 1."""
    page = make.page_of(online)

    assert "The samples of task a, best first, with the weights that rloo gave their turns." in page.text
    assert (
        "#0 success 1.000 2 1 trained 0.500 to 1.000 #1 no success 0.000 3 0 trained -1.500 to -0.500"
        in page.text
    )
    heat = page.figure("group-0")["data"][0]
    assert heat["z"] == [[0.5, 1.0, None], [-0.5, -1.0, -1.5]]
    assert heat["y"] == ["#0, 1.00", "#1, 0.00"]
    assert heat["customdata"][0][1] == "go 1 (invalid)"


@pytest.mark.parametrize("within", ["group-pairs", "corrections"])
def test_pairs_of_explored_episodes_lack_no_expert(online, make, within):
    """Both sides are found where they were explored, and not held twice."""
    paths = RunPaths(online)
    (online / "recipe.yaml").write_text(json.dumps({"iterations": 3, "sft": None, "rows": {"name": within}}))
    for file in paths.credits("-003").values():
        file.unlink()
    best, worst, *_ = sorted(read_trajectories(paths.trajectories("explore-003")), key=lambda one: one.key)
    write_pairs(paths.pairs("-003"), [PreferencePair(best, worst)])
    sides = {"chosen": {"confidence": [0.5, 0.5], "weight": [1.0, 0.2]},
             "rejected": {"confidence": [0.9] * 3, "weight": [0.2] * 3}}  # fmt: skip
    make.put_rows(paths.confidence("-003"), [sides])
    manifest = json.loads(paths.manifest.read_text())
    del manifest["stages"]["credit-003"]
    paths.manifest.write_text(
        json.dumps(manifest | {"files": seal(online, [paths.pairs("-003")], "pair-003")})
    )

    page = make.page_of(online)

    sets = [each["name"] for each in page.piece("index")["sets"]]
    assert [name for name in sets if name.startswith("pairs/")] == []
    _, body, _ = page.episode(set="trajectories/explore-003", task="a", sample=0)
    assert body["weight"] == [1.0, 0.2]
    assert "no expert trajectories" not in page.text


def test_a_run_that_begins_with_a_trained_model_is_compared_with_it(online, make):
    """It has no SFT of its own: base 0, 0, 0, 0 against 0, 1, 1, 1."""
    comparison = summarize(online)["comparison"]

    assert (comparison["a"], comparison["b"], comparison["mean_difference"]) == ("ppo-clip-002", "base", 0.75)
    assert "ppo-clip-002 minus base, task by task" in make.page_of(online).text


def test_two_runs_share_the_learning_curve(online, make, tmp_path):
    other = make.online_run(tmp_path / "other", iterations=2)

    page = make.Page(write_report(online, other, output=tmp_path / "both.html").read_text())

    named = [trace["name"] for trace in page.figure("learning-0")["data"] if "name" in trace]
    assert named == ["online, explored", "online, evaluated", "other, explored", "other, evaluated"]
    assert {"ledger-0", "ledger-1", "group-0", "group-1"} <= page.figures


def test_small_numbers_keep_their_digits_and_a_missing_number_is_empty(online, make):
    """A KL of 0.0004 and a clip share in percent; the third iteration logged nothing."""
    for number in (1, 2):
        row = {"step": 1, "kl/turns": 0.0004, "clip_share": 0.0125, "grad_norm": 1234.5}
        make.put_rows(online / "metrics" / f"align-00{number}.jsonl", [row])
    (online / "metrics" / "align-003.jsonl").unlink()

    page = write_report(online).read_text(encoding="utf-8")

    assert '<td data-value="0.0004">0.0004</td><td data-value="0.0125">1.2\u00a0%</td>' in page
    assert '<td data-value="1234.5">1,234</td>' in page
    assert page.count('<td data-value="">–</td>' * 4) == 1


def test_an_unfinished_exploration_without_iterations_is_left_out_and_noted(run, make):
    """Its first episodes are short, also in a group. An unfinished training is shown, with a note."""
    make.put(run / "trajectories" / "explore.jsonl", [replace(make.trajectory("p0", 1.0), sample=1)])
    names = ("explore", "align", "evaluate-late")
    make.manifest(run, stages={name: {"seconds": 1.0, "counts": {}, "done": False} for name in names})

    found = read_run(run)

    assert [row["explored"] for row in summarize(run)["iterations"]] == []
    assert "explored trajectories" not in [row["name"] for row in set_rows(found)]
    notes = [note for note in found.notes if "is not finished" in note]
    assert [note.partition(" is not")[0] for note in notes] == [f"The stage {name}" for name in names]
    assert ["left out of all numbers" in note for note in notes] == [True, False, True]
    page = make.page_of(run)
    assert "exploration not finished" in [each["label"] for each in page.piece("index")["sets"]]
    assert ("group-0" in page.figures, "One group side by side" in page.text) == (False, False)
