"""Where trees branch: turns that a policy's entropy or a predictor of outcomes chooses, by what was known at them."""

import json
import random
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perturn.data.forks import Forks
from perturn.data.paths import RunPaths
from perturn.data.store import read_records, write_records
from perturn.errors import ConfigError
from perturn.run import forks
from perturn.run.branch import _play_on
from perturn.run.forks import check_forks, fork_counts, uncertain_turns
from perturn.run.loop import check
from perturn.run.prospects import Prospects, folds_of, mixed_turns, prospects
from perturn.settings.branch import Branch
from perturn.types import Task
from support.branches import branched, explored, of
from support.loop import finish

from .online import GROUPS, begin, recipe_of

TREES = [*GROUPS, "branch.samples=1", "evaluate=null", "iterations=2", "deterministic=true"]
ARPO = [*TREES, "credit.name=arpo", "branch.at=entropy", "branch.chance=0.7"]
TRACE = [*TREES, "credit.name=portool", "branch.at=mixed", "iterations=1"]
SURE = Branch(at="entropy", chance=1.0, gain=0.0, forks=2)
CERTAIN = [0.5] * 6


def of_task(task, sample, turns=3, success=False):
    return replace(explored(turns, sample, success), task=Task(task))


def test_hand_worked_chance():
    """0.1 + 2 (0.5 - 0.1) = 0.9, 0.1 + 2 (0.05 - 0.1) = 0 and 0.1: of 4000 episodes, within 4 standard errors."""
    how = Branch(at="entropy", chance=0.1, gain=2.0, forks=3)
    counts = [0, 0, 0, 0]
    for sample in range(4000):
        for turn in uncertain_turns(explored(4, sample), [0.1, 0.5, 0.05, 0.1], how, seed=0):
            counts[turn] += 1

    assert counts[0] == counts[2] == 0
    assert abs(counts[1] / 4000 - 0.9) < 4 * (0.9 * 0.1 / 4000) ** 0.5
    assert abs(counts[3] / 4000 - 0.1) < 4 * (0.9 * 0.1 / 4000) ** 0.5


def test_the_first_turns_that_are_uncertain_enough_take_the_budget():
    assert uncertain_turns(explored(6), CERTAIN, SURE, seed=0) == [1, 2]
    assert uncertain_turns(explored(6), CERTAIN, replace(SURE, chance=0.0), seed=0) == []
    assert uncertain_turns(explored(1), CERTAIN[:1], SURE, seed=0) == []


@given(
    entropies=st.lists(st.floats(0, 1), min_size=2, max_size=8),
    after=st.lists(st.floats(0, 1), max_size=5),
    forks=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_what_comes_after_a_turn_does_not_choose_it(entropies, after, forks, seed):
    """The turns of an episode that ended early are those of the one that went on, as far as it went."""
    how = Branch(at="entropy", forks=forks, gain=1.0)
    short = uncertain_turns(explored(len(entropies)), entropies, how, seed)
    whole = uncertain_turns(explored(len(entropies) + len(after)), [*entropies, *after], how, seed)

    assert short == [turn for turn in whole if turn < len(entropies)]


def test_hand_worked_mixed_turns():
    """Others: variances 0.25, 0.09 and 0.21 after first turns, of 2 episodes; with one fork each the bar is 0.21."""
    episodes = [of_task("a", 0), of_task("b", 0), of_task("c", 0, 2)]
    rivals = {1: [0.5, 0.5, 0.9], 2: [0.5, 0.3]}
    found = Prospects([[0.5, 0.6, 0.75], [0.0] * 3, [0.0] * 2], [rivals, {}, {}])

    assert mixed_turns(episodes, found, [0, 1, 2], Branch(at="mixed"), seed=0) == [[1], [], []]
    found.own[0][2] = 0.7
    rivals[2][1] = 0.29
    assert mixed_turns(episodes, found, [0, 1, 2], Branch(at="mixed"), seed=0)[0] == [1, 2]


def test_of_turns_that_are_alike_about_as_many_are_drawn_as_the_budget_has():
    """400 episodes of 5 turns, all as likely to succeed: 2 forks each, within 4 standard deviations."""
    episodes = [of_task(f"{n}", 0, 5) for n in range(400)]
    folds = folds_of(episodes, "tasks")
    same = [[0.5] * 5] * 400
    rivals = [{i: [0.5] * 5 for i in range(400) if folds[i] != fold} for fold in range(5)]

    turns = mixed_turns(episodes, Prospects(same, rivals), folds, Branch(at="mixed", forks=2), seed=0)

    assert abs(sum(map(len, turns)) - 800) < 4 * (1600 * 0.25 * 1.25) ** 0.5
    assert {turn for own in turns for turn in own} == {1, 2, 3, 4}


def drawn(lengths, seed=0):
    """Features of so many turns an episode, and an outcome for each."""
    draw, coin = torch.Generator().manual_seed(seed), random.Random(seed)
    features = [torch.randn(n, 4, generator=draw) for n in lengths]
    return features, [torch.full((n,), float(coin.random() < 0.5), dtype=torch.float64) for n in lengths]


@pytest.mark.parametrize("others", ["tasks", "episodes"])
def test_nothing_that_an_episode_does_later_chooses_its_turns(others):
    """Its outcome, and turns that follow: those chosen before are the same; with tasks, also for its task's others."""
    episodes = [of_task(f"{n // 2}", n % 2, 4, n % 3 == 0) for n in range(16)]
    folds, how = folds_of(episodes, others), Branch(at="mixed", others=others)
    features, outcomes = drawn([4] * 16)
    before = mixed_turns(episodes, prospects(features, outcomes, folds), folds, how, 0)

    changed = [*features]
    changed[0] = torch.cat([features[0][:3], torch.full((4, 4), 9.0)])
    others_of_it = [*outcomes]
    others_of_it[0] = torch.full((7,), 1 - float(outcomes[0][0]), dtype=torch.float64)
    after = mixed_turns(episodes, prospects(changed, others_of_it, folds), folds, how, 0)

    assert [turn for turn in after[0] if turn < 3] == [turn for turn in before[0] if turn < 3]
    same = [i for i in range(16) if folds[i] == folds[0]]
    assert all(after[i] == before[i] for i in same if i)
    assert (1 in same) == (others == "tasks")
    assert any(after[i] != before[i] for i in range(16))


def test_folds_are_of_whole_tasks_or_of_episodes():
    episodes = [of_task(f"{n // 2}", n % 2) for n in range(6)]

    assert folds_of(episodes, "tasks") == [0, 0, 1, 1, 2, 2]
    assert folds_of(episodes, "episodes") == [0, 1, 2, 3, 4, 0]


def test_hand_worked_counts():
    """Successes 1 and 0 less their chances: 0.9, 0.6, 0.5, 0.7, -0.2, -0.1, of variance 1/6; 1 - (1/6) / (2/9)."""
    found = [Forks("t", 0, (1, 2), (0.1, 0.4, 0.5, 0.3)), Forks("t", 1, (), (0.2, 0.1))]
    begun = [explored(4, 0, success=True), explored(2, 1)]
    branches = [branched(0, 1, [0.0, 1.0], 2, success=True), branched(0, 2, [0.0, 0.0, 0.0], 3)]

    assert fork_counts(found, Branch(at="entropy"), begun, branches) == {
        "forks": 2,
        "forked": 1,
        "mean_turn": 1.5,
        "entropy": 0.45,
        "entropy_elsewhere": 0.2,
    }
    mixed = fork_counts(found, Branch(at="mixed"), begun, branches)
    assert (mixed["predicted"], mixed["came_true"]) == (0.45, 0.5)
    assert mixed["explained_variance"] == 0.25


@pytest.mark.parametrize("at", ["mixed", "entropy"])
def test_what_is_not_played_on_still_teaches_the_predictor(tmp_path, monkeypatch, at):
    """Failures alone are played on; of failures alone a predictor would learn that nothing ever succeeds."""
    begun = [of_task(f"{n}", 0, 3, n % 2 == 0) for n in range(6)]
    seen, jobs = [], []

    def choose(played, reader, settings, seed, iteration):
        seen.extend(played)
        turns = [() if settings.of == "failures" and one.success else (1,) for one in played]
        return [Forks(*one.key, own, (0.1, 0.2, 0.3)) for one, own in zip(played, turns, strict=True)]

    monkeypatch.setattr(forks, "open_policy", lambda *_: None)
    monkeypatch.setattr(forks, "by_prospects" if at == "mixed" else "by_entropy", choose)
    paths = RunPaths(tmp_path)
    paths.trajectories("branch").parent.mkdir()
    paths.trajectories("branch").touch()
    explore = SimpleNamespace(samples=1, sampling=None, concurrency=1)
    recipe = SimpleNamespace(
        branch=Branch(at=at, of="failures", samples=1),
        explore=explore,
        seed=0,
        iterations=1,
        align=None,
        sft=None,
    )
    session = SimpleNamespace(
        recipe=recipe,
        run=SimpleNamespace(paths=paths),
        play=lambda file, own, *_: jobs.extend(own) or {"episodes": len(own)},
    )

    counts = _play_on(session, SimpleNamespace(name="branch", mark="", iteration=1, policy="base"), begun)

    assert seen == begun
    assert [job.begun for job in jobs] == begun[1::2]
    assert counts["forks"] == counts["forked"] == 3
    if at == "entropy":
        assert counts["entropy_elsewhere"] == 0.3


def counts_of(folder, stage):
    return json.loads((folder / "manifest.json").read_text())["stages"][stage]["counts"]


@pytest.fixture(scope="module")
def trees(place, run_once):
    """Two iterations with one way to choose, and one with the other."""
    for name, words in (("arpo", ARPO), ("trace", TRACE)):
        run_once(name, *words)
    return place / "runs"


@pytest.mark.parametrize("name", ["arpo", "trace"])
def test_the_loop_plays_on_from_what_was_chosen(trees, name):
    for mark in ("-001", "-002") if name == "arpo" else ("",):
        forks = list(read_records(trees / name / f"metrics/forks{mark}.jsonl", Forks))
        begun = {one.key: one for one in of(trees / name, f"explore{mark}")}
        branches = of(trees / name, f"branch{mark}")
        counts = counts_of(trees / name, f"branch{mark}")

        assert {each.key for each in forks} == begun.keys()
        assert all(len(each.seen) == len(begun[each.key].turns) for each in forks)
        assert all(0 <= seen <= 1 for each in forks for seen in each.seen)
        chosen = {(*each.key, turn) for each in forks for turn in each.turns}
        assert chosen == {(one.task.id, one.origin, one.taken_over) for one in branches}
        assert counts["forks"] == counts["episodes"] == len(branches)
        turns = [turn for *_, turn in chosen]
        assert counts["mean_turn"] == pytest.approx(sum(turns) / len(turns), abs=1e-4)
        assert 0 not in turns
        if name == "arpo":
            assert 0 < counts["entropy"] < 1
            assert len(branches) <= len(begun)


@pytest.mark.slow
def test_a_killed_choice_ends_in_the_same_branches(trees, place):
    """Stopped within the branches: what was chosen stands, and the rest is played."""
    cut, whole = place / "runs/trace-cut", trees / "trace"
    shutil.copytree(whole, cut)
    recipe = (cut / "recipe.yaml").read_text()
    (cut / "recipe.yaml").write_text(recipe.replace("name: trace\n", "name: trace-cut\n", 1))
    file = cut / "trajectories/branch.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:1]) + lines[1][:40])
    forks = list(read_records(cut / "metrics/forks.jsonl", Forks))
    told = [replace(each, seen=tuple(0.5 for _ in each.seen)) for each in forks]
    write_records(cut / "metrics/forks.jsonl", told)
    manifest = json.loads((cut / "manifest.json").read_text())
    for stage in ("branch", "credit", "align"):
        del manifest["stages"][stage]
    notes = manifest["files"].items()
    kept = {key: note for key, note in notes if note.get("stage") in manifest["stages"]}
    (cut / "manifest.json").write_text(json.dumps(manifest | {"files": kept}))

    finish(begin(place, "trace-cut", *TRACE))

    def played(folder):
        stored = of(folder, "branch")
        return sorted((one.key, one.origin, one.taken_over, one.turns) for one in stored)

    assert list(read_records(cut / "metrics/forks.jsonl", Forks)) == told
    assert played(cut) == played(whole)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*ARPO, "branch.every=2"], "branch.every is not read with branch.at=entropy"),
        ([*TREES, "credit.name=spo", "branch.forks=2"], "branch.forks is not read with branch.at=every"),
        ([*TRACE, "branch.chance=0.1"], "branch.chance is not read with branch.at=mixed"),
        ([*ARPO, "branch.others=episodes"], "branch.others is not read with branch.at=entropy"),
        (
            [*TRACE, "branch.others=episodes"],
            "branch.others is episodes, and credit portool trains on branches",
        ),
        (
            [*TRACE, "credit.name=spo", "branch.policy=sft"],
            "branch.policy must be left out with branch.at=mixed",
        ),
        (
            ["pair.within=step", "branch={at: mixed, of: expert}"],
            "branch.of must not be expert with branch.at=mixed",
        ),
        (["pair.within=tree", "branch={at: entropy, search: {}}"], "branch.search chooses the turns"),
        (
            [*TRACE, "explore.per_iteration=2"],
            "from other tasks of an iteration, of which there must be 3 or more",
        ),
        (
            [*ARPO, "protocol.max_turns=1"],
            r"at begins at turn 1, .* more than 1 turns.* let them take two or more",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_before_work(place, monkeypatch, words, said):
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    with pytest.raises(ConfigError, match=said):
        check(recipe_of(place, *words))


def test_a_policy_behind_a_server_cannot_be_read(place):
    recipe = recipe_of(place, *ARPO, "engine={name: api, base_url: 'http://127.0.0.1:1/v1'}")

    with pytest.raises(
        ConfigError, match=r"branch\.at=entropy reads the policy that explored, and engine 'api'"
    ):
        check_forks(recipe, 3)
