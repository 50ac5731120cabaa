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
from perturn.data.run_paths import RunPaths
from perturn.data.store import read_records, write_records
from perturn.errors import ConfigError
from perturn.explore.protocol import ExploreInputs
from perturn.methods.arpo.entropy_branches import EntropyBranches, expected_forks, uncertain_turns
from perturn.methods.trace.mixed_branches import MixedBranches, mixed_turns
from perturn.methods.trace.success_chance import Chances, Prospects, chances_of_folds, folds_of, prospects
from perturn.quantities import Computed
from perturn.run.execute import check
from perturn.run.stages import quantity_source
from perturn.run.stages.branch_stage import _play_rounds, check_explorer
from perturn.types import Task
from support.branches import branched, explored, of
from support.loop import finish

from .online import GROUPS, begin, recipe_of

TREES = [*GROUPS, "explore.branches=1", "evaluate=null", "iterations=2", "deterministic=true"]
ARPO = [*TREES, "credit.name=arpo", "explore.name=entropy-branches", "explore.chance=0.7"]
TRACE = [*TREES, "credit.name=portool", "explore.name=mixed-branches", "iterations=1"]
SURE = EntropyBranches(chance=1.0, gain=0.0, forks=2)
CERTAIN = [0.5] * 6


def of_task(task, sample, turns=3, success=False):
    return replace(explored(turns, sample, success), task=Task(task))


def test_hand_worked_chance():
    """0.1 + 2 (0.5 - 0.1) = 0.9, 0.1 + 2 (0.05 - 0.1) = 0 and 0.1: of 4000 episodes, within 4 standard errors."""
    how = EntropyBranches(chance=0.1, gain=2.0, forks=3)
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
    how = EntropyBranches(forks=forks, gain=1.0)
    short = uncertain_turns(explored(len(entropies)), entropies, how, seed)
    whole = uncertain_turns(explored(len(entropies) + len(after)), [*entropies, *after], how, seed)

    assert short == [turn for turn in whole if turn < len(entropies)]


def chances(found, folds):
    """An entry for each episode."""
    return [
        Chances(own, folds[i], {fold: its[i] for fold, its in enumerate(found.rivals) if i in its})
        for i, own in enumerate(found.own)
    ]


def test_hand_worked_mixed_turns():
    """Others: variances 0.25, 0.09 and 0.21 after first turns, of 2 episodes; with one fork each the bar is 0.21."""
    episodes = [of_task("a", 0), of_task("b", 0), of_task("c", 0, 2)]
    rivals = {1: [0.5, 0.5, 0.9], 2: [0.5, 0.3]}
    found = chances_of_folds(Prospects([[0.5, 0.6, 0.75], [0.0] * 3, [0.0] * 2], [rivals, {}, {}]), [0, 1, 2])

    assert mixed_turns(episodes, found, MixedBranches(), seed=0) == [[1], [], []]
    found[0].own[2] = 0.7
    rivals[2][1] = 0.29
    assert mixed_turns(episodes, found, MixedBranches(), seed=0)[0] == [1, 2]


@pytest.mark.parametrize(
    ("forks", "turns", "expected"),
    [
        (1, 3, 0.75),
        (2, 3, 1.0),
        (1, 1, 0.0),
        (1, 0, 0.0),
        (9, 5, 2.0),
        (1, 2.5, 0.625),
        (600, 1040, 519.5),
    ],
)
def test_the_expected_forks_of_an_episode(forks, turns, expected):
    """Chance 0.5: of two later turns at least one is chosen in three of four episodes."""
    assert expected_forks(forks, 0.5, turns) == pytest.approx(expected)
    assert expected_forks(forks, 1.0, turns) == pytest.approx(min(forks, max(0, turns - 1)))
    assert expected_forks(forks, 0.0, turns) == 0


def test_of_turns_that_are_alike_about_as_many_are_drawn_as_the_budget_has():
    """400 episodes of 5 turns, all as likely to succeed: 2 forks each, within 4 standard deviations."""
    episodes = [of_task(f"{n}", 0, 5) for n in range(400)]
    folds = folds_of(episodes, "tasks")
    same = [[0.5] * 5] * 400
    rivals = [{i: [0.5] * 5 for i in range(400) if folds[i] != fold} for fold in range(5)]

    turns = mixed_turns(
        episodes, chances_of_folds(Prospects(same, rivals), folds), MixedBranches(forks=2), seed=0
    )

    assert abs(sum(map(len, turns)) - 800) < 4 * (1600 * 0.25 * 1.25) ** 0.5
    assert {turn for own in turns for turn in own} == {1, 2, 3, 4}


def drawn(lengths, seed=0):
    """Features of so many turns per episode, and an outcome for each."""
    draw, coin = torch.Generator().manual_seed(seed), random.Random(seed)
    features = [torch.randn(n, 4, generator=draw) for n in lengths]
    return features, [torch.full((n,), float(coin.random() < 0.5), dtype=torch.float64) for n in lengths]


@pytest.mark.parametrize("others", ["tasks", "episodes"])
def test_nothing_that_an_episode_does_later_chooses_its_turns(others):
    """Its outcome, and turns that follow: those chosen before are the same; with tasks, also for its task's others."""
    episodes = [of_task(f"{n // 2}", n % 2, 4, n % 3 == 0) for n in range(16)]
    folds, how = folds_of(episodes, others), MixedBranches(others=others)
    features, outcomes = drawn([4] * 16)
    before = mixed_turns(episodes, chances_of_folds(prospects(features, outcomes, folds), folds), how, 0)

    changed = [*features]
    changed[0] = torch.cat([features[0][:3], torch.full((4, 4), 9.0)])
    others_of_it = [*outcomes]
    others_of_it[0] = torch.full((7,), 1 - float(outcomes[0][0]), dtype=torch.float64)
    after = mixed_turns(episodes, chances_of_folds(prospects(changed, others_of_it, folds), folds), how, 0)

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

    inputs = ExploreInputs(0, explored=begun, begun=begun, chosen=found)
    assert EntropyBranches().counts(inputs, (), branches) == {
        "forks": 2,
        "forked": 1,
        "mean_turn": 1.5,
        "entropy": 0.45,
        "entropy_elsewhere": 0.2,
    }
    mixed = MixedBranches().counts(inputs, (), branches)
    assert (mixed["predicted"], mixed["came_true"]) == (0.45, 0.5)
    assert mixed["explained_variance"] == 0.25


@pytest.mark.parametrize("kind", [MixedBranches, EntropyBranches])
def test_what_is_not_played_on_still_teaches_the_predictor(tmp_path, monkeypatch, kind):
    """Failures alone are played on; of failures alone a predictor would learn that nothing ever succeeds."""
    begun = [of_task(f"{n}", 0, 3, n % 2 == 0) for n in range(6)]
    seen, jobs = [], []

    def chances_of_folds(episodes, *_):
        seen.extend(episodes)
        own = [0.5, 0.6, 0.1]
        if kind is EntropyBranches:
            return [own for _ in episodes]
        return [Chances(own, i, {f: own for f in range(6) if f != i}) for i in range(len(episodes))]

    name = "success-chance" if kind is MixedBranches else "entropy"
    monkeypatch.setattr(quantity_source, "RunSource", lambda *_: None)
    monkeypatch.setattr(
        quantity_source, "compute", lambda needs, episodes, *_: {name: Computed(chances_of_folds(episodes))}
    )
    paths = RunPaths(tmp_path)
    paths.trajectories("branch").parent.mkdir()
    paths.trajectories("branch").touch()
    own = {} if kind is MixedBranches else {"chance": 1.0}
    recipe = SimpleNamespace(
        explore=kind(of="failures", branches=1, **own), seed=0, iterations=1, align=None, sft=None
    )
    given, tasks = [], [one.task for one in begun]
    whole = kind.jobs
    monkeypatch.setattr(kind, "jobs", lambda *a: given.append(a[1].tasks) or whole(*a))
    session = SimpleNamespace(
        recipe=recipe,
        run=SimpleNamespace(paths=paths),
        task_lists=SimpleNamespace(tasks={"explore": tasks}),
        release=lambda: None,
        play=lambda file, own, *_: jobs.extend(own) or {"episodes": len(own)},
    )

    counts = _play_rounds(session, SimpleNamespace(name="branch", mark="", iteration=1, policy="base"), begun)

    assert seen == begun
    assert given == [tasks]
    assert {job.begun.key for job in jobs} <= {one.key for one in begun[1::2]}
    assert counts["forks"] == len(jobs) > 0
    if kind is EntropyBranches:
        assert [job.begun for job in jobs] == begun[1::2]
        assert counts["entropy_elsewhere"] == pytest.approx(0.1)


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
        ([*ARPO, "explore.every=2"], "every is a setting of explore.name=branches or expert-branches. Known"),
        (
            [*TREES, "explore.name=branches", "explore.forks=2"],
            "forks is a setting of explore.name=entropy-branches or mixed",
        ),
        ([*TRACE, "explore.chance=0.1"], "chance is a setting of explore.name=entropy-branches. Known"),
        ([*ARPO, "explore.others=episodes"], "others is a setting of explore.name=mixed-branches. Known"),
        (
            [*TRACE, "explore.others=episodes"],
            "credit portool does not take branches at turns that depend .*; set explore.others=tasks",
        ),
        (
            [*TRACE, "credit.name=spo", "explore.policy=sft"],
            "policy is a setting of explore.name=branches or ",
        ),
        (
            ["rows.name=step-pairs", "explore.name=mixed-branches"],
            "rows.name=step-pairs needs expert-branches, and",
        ),
        (
            [*TRACE, "explore.per_iteration=2"],
            "other tasks of an iteration must be 3 or more, to teach the predictor, got 2",
        ),
        (
            [*ARPO, "protocol.max_turns=1"],
            r"the first turn that is resumed must be < 1, .*\. Let episodes take two turns or more",
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
        ConfigError,
        match=r"explore\.name=entropy-branches reads the weights of .* which engine 'api' does not give",
    ):
        check_explorer(recipe, ())
