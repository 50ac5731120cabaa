"""Two credits on the same episodes: correlation by rank, signs, and where they disagree."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import spearmanr

from perturn.analysis.run_contents import read_run
from perturn.data.file_seals import seal
from perturn.data.group_account import CreditRow, write_credits
from perturn.data.run_paths import RunPaths
from perturn.data.store import TrajectoryStore
from perturn.errors import DataError
from perturn.report import write_report
from perturn.report.credit_figures import compare_credits, credit_summary, sentences
from perturn.types import Action, Task, Trajectory, Turn


def episode(task, sample, turns):
    """An episode whose actions say which they are."""
    return Trajectory(
        Task(task), tuple(Turn((), Action(f"{task}{sample}{t}")) for t in range(turns)), sample=sample
    )


def rows(weights, bins=()):
    """Rows of weights by (task, sample); trained, but for those in `bins`."""
    return [CreditRow(*key, dict(bins).get(key, "trained"), tuple(each)) for key, each in weights.items()]


EPISODES = [episode("a", 0, 2), episode("a", 1, 3), episode("b", 0, 2), episode("b", 1, 1)]
ONE = {("a", 0): [1.0, 2.0], ("a", 1): [-1.0, -2.0, 0.0], ("b", 0): [0.5, 0.5], ("b", 1): [-3.0]}
OTHER = {("a", 0): [2.0, 1.0], ("a", 1): [-1.0, -2.0, 0.5], ("b", 0): [-4.0, 0.0], ("b", 1): [0.0]}


def test_two_credits_are_compared_by_hand():
    """Within: -1 and 1; the third has equal weights. Signs: of five that neither leaves at 0, one differs."""
    found = compare_credits(EPISODES, rows(ONE), rows(OTHER))

    assert (found.episodes, found.turns) == (4, 8)
    assert found.across.mean == pytest.approx(
        spearmanr([1, 2, -1, -2, 0, 0.5, 0.5, -3], [2, 1, -1, -2, 0.5, -4, 0, 0]).statistic, abs=1e-12
    )
    assert (found.within.mean, found.within.n, found.without) == (0.0, 1, 1)
    assert (found.agreement.mean, found.agreement.n) == (pytest.approx(4 / 5), 2)
    assert found.zero == (1, 2)
    first = found.disagreements[0]
    assert (first.task, first.sample, first.turn, first.action) == ("b", 0, 1, "b00")
    assert first.weights == (0.5, -4.0)
    assert first.ranks == (pytest.approx((5.5 - 0.5) / 8), pytest.approx(0.5 / 8))


def test_a_disagreement_shows_the_calls_of_an_action():
    called = replace(EPISODES[2].turns[0], action=Action("", tool_calls=({"name": "look"},)))
    episodes = [*EPISODES[:2], replace(EPISODES[2], turns=(called, EPISODES[2].turns[1])), EPISODES[3]]

    found = compare_credits(episodes, rows(ONE), rows(OTHER))

    assert found.disagreements[0].action == '{"name": "look"}'


def test_the_order_of_episodes_and_rows_changes_nothing():
    assert compare_credits(EPISODES[::-1], rows(ONE)[::-1], rows(OTHER)) == compare_credits(
        EPISODES, rows(ONE), rows(OTHER)
    )


def test_episodes_that_neither_trains_are_left_out():
    """One that failed, say; one that is trained by the other alone stays."""
    failed = rows(ONE, {("a", 0): "failed", ("a", 1): "no_spread"}.items())
    other = rows(OTHER, {("a", 0): "failed"}.items())

    found = compare_credits(EPISODES, failed, other)

    assert (found.episodes, found.turns) == (3, 6)


def test_a_credit_agrees_with_itself_and_rounding_is_no_disagreement():
    """A weight of 1e-17 is 0, and 1e-12 more is no other rank."""
    nearly = {key: [value + 1e-12 for value in each] for key, each in ONE.items()}

    found = compare_credits(EPISODES, rows(ONE), rows(nearly))

    assert (found.across.mean, found.within.mean, found.agreement.mean) == (1.0, 1.0, 1.0)
    assert found.zero == (0, 0)


def test_a_credit_of_one_number_an_episode_has_no_rank_within_it():
    """And says so, in figures and in words."""
    flat = {key: [float(i)] * len(each) for i, (key, each) in enumerate(ONE.items())}

    found = compare_credits(EPISODES, rows(flat), rows(OTHER))

    assert (found.within, found.without) == (None, 3)
    said = "\n".join(sentences(found.to_dict(), "flat", "other"))
    assert "flat compared with other: 8 turns of 4 episodes" in said
    assert (
        "averaged: none, because in every episode, at least one credit gives all turns the same weight."
        in said
    )


def test_nothing_trained_is_nothing_compared():
    none = rows(ONE, dict.fromkeys(ONE, "no_spread").items())

    found = compare_credits(EPISODES, none, none).to_dict()

    assert (found["turns"], found["across"], found["within"], found["agreement"]) == (0, None, None, None)
    assert found["disagreements"] == []


@pytest.mark.parametrize("change", [lambda each: each[1:], lambda each: [*each[:-1], each[-1]]])
def test_credits_of_other_episodes_are_refused(change):
    """A row is missing, or has a weight too few."""
    other = change(rows(OTHER))
    other = other if len(other) < 4 else [*other[:-1], CreditRow("b", 1, "trained", ())]

    with pytest.raises(DataError, match=r"expected a weight for each of its \d turns in both files"):
        compare_credits(EPISODES, rows(ONE), other)


def test_weights_are_summed_up_by_turn():
    """Of trained turns: the first are 1, -1 and 0.5, the third is 0 alone."""
    found = credit_summary(EPISODES, rows(ONE, {("b", 1): "failed"}.items()))

    assert [place["n"] for place in found["by_turn"]] == [3, 3, 1]
    assert found["by_turn"][0]["mean"] == pytest.approx(0.5 / 3)
    assert found["by_turn"][0]["spread"] == pytest.approx(np.std([1.0, -1.0, 0.5]))
    assert (found["n"], found["mean"]) == (7, pytest.approx(1 / 7))
    assert found["counts"]["failed"] == 1


def test_the_page_compares_two_credits_of_one_run(run):
    """The run's own comes first; with one alone there is nothing to compare, and others' episodes are left out."""
    paths = RunPaths(run)
    episodes = read_run(run).explored
    weights = [
        {one.key: [float(i + shift)] * len(one.turns) for i, one in enumerate(episodes)} for shift in (0, 7)
    ]
    write_credits(paths.credit("rloo"), rows(weights[0]))
    assert 'id="credits"' not in write_report(run).read_text()

    write_credits(paths.credit("<b>mine"), rows(weights[1]))
    write_credits(paths.credit("old"), rows(ONE))
    page = write_report(run).read_text()

    assert 'id="credits"' in page
    assert "&lt;b&gt;mine compared with rloo" in page
    assert "<b>mine" not in page
    assert "credits/old.jsonl is not of the explored episodes and is left out." in page


def test_of_a_branch_the_turns_are_compared_that_are_its_own():
    """Branch 2 of a 1 shares two turns, which have no weight of their own; by turn, the third are 0 and 4."""
    branch = replace(episode("a", 2, 4), origin=1, taken_over=2)
    sides = [
        rows({**each, ("a", 2): [0.0, 0.0, *own]}) for each, own in ((ONE, [4.0, 5.0]), (OTHER, [1.0, 0.0]))
    ]

    found = compare_credits([*EPISODES, branch], *sides)
    by_turn = credit_summary([*EPISODES, branch], sides[0])["by_turn"]

    assert (found.episodes, found.turns) == (5, 10)
    assert ("a", 2, 4) in {(one.task, one.sample, one.turn) for one in found.disagreements}
    assert [(one["n"], one["mean"]) for one in by_turn] == [
        (4, pytest.approx(-2.5 / 4)),
        (3, pytest.approx(0.5 / 3)),
        (2, 2.0),
        (1, 5.0),
    ]


def test_a_credit_of_branches_too_is_shown_of_the_explored_episodes(run):
    """And not one that is of a branch of another run."""
    paths, episodes = RunPaths(run), read_run(run).explored
    branch = replace(episodes[0], sample=99, origin=episodes[0].sample, taken_over=1)
    with TrajectoryStore(paths.trajectories("branch")) as store:
        store.append(branch)
    weights = {one.key: [1.0] * len(one.turns) for one in episodes}
    write_credits(paths.credit("portool"), rows(weights | {branch.key: [1.0] * len(branch.turns)}))
    write_credits(paths.credit("arpo"), rows(weights | {(branch.key[0], 98): [1.0] * len(branch.turns)}))

    found = read_run(run)

    assert list(found.credits) == ["portool"]
    assert {row.key for row in found.credits["portool"]} == weights.keys()
    assert any("credits/arpo.jsonl is not of the explored episodes" in note for note in found.notes)


def test_the_runs_own_credit_is_the_first(run):
    """A stage made it; the name alone would put it last."""
    manifest = json.loads((run / "manifest.json").read_text())
    paths, episodes = RunPaths(run), read_run(run).explored
    for name in ("anchor-rloo", "rloo"):
        write_credits(paths.credit(name), rows({one.key: [1.0] * len(one.turns) for one in episodes}))
    seals = seal(run, [paths.credit("rloo")], "credit")
    (run / "manifest.json").write_text(json.dumps(manifest | {"files": manifest.get("files", {}) | seals}))

    assert list(read_run(run).credits) == ["rloo", "anchor-rloo"]
