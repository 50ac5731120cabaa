"""Trees of explored episodes: searched turn by turn, resumed to the same trees, and made into pairs of steps."""

import json
from dataclasses import replace

import pytest

from perturn.config.row_maker_settings import Limit, RowInputs
from perturn.data.store import read_pairs, read_trajectories
from perturn.data.tree import grow
from perturn.errors import ConfigError
from perturn.methods.mcts_dpo.mcts import Mcts, search_jobs
from perturn.methods.mcts_dpo.tree_pairs import IN_TREE, TreePairs
from perturn.run.execute import check
from perturn.types import Action, Status, Task, Trajectory, Turn
from support.branches import WANDERING, of
from support.loop import finish

from .online import begin, recipe_of

TREES = [
    "rows={name: tree-pairs, threshold: 0.0}",
    "explore.name=mcts",
    "explore.simulations=5",
    "explore.width=2",
    "explore.samples=2",
    "align.shared_prefix=mask",
    "iterations=2",
    "evaluate=null",
]
SEARCH = Mcts(simulations=3, width=2, exploration=1.0)


def explored(did, sample=0, **changes):
    steps = tuple(Turn((), Action(letter)) for letter in did)
    return Trajectory(Task("t"), steps, sample=sample, seed=5 + sample, **changes)


def test_hand_worked_jobs():
    """The first simulation draws a second action at the root; the next follows the better of the two."""
    roots = [explored("ax", total_reward=1.0), explored("b", 1)]
    first = search_jobs(roots, [], SEARCH, seed=0, samples=2)

    assert [(job.begun.sample, job.kept, job.sample) for job in first] == [(0, 0, 2), (1, 0, 3)]
    assert [job.begun.seed for job in first] == [5, 6]
    played = [explored("cz", 2, origin=0), explored("b", 3, origin=1)]
    second = search_jobs(roots, played, SEARCH, seed=0, samples=2, number=1)
    assert [(job.begun.sample, job.kept, job.sample) for job in second] == [(0, 1, 4)]  # of b nothing is left
    assert len({job.seed for job in (*first, *second)}) == 3


def test_a_node_of_a_branch_is_played_on_from_with_the_tree_for_origin():
    played = [explored("cz", 1, origin=0, total_reward=1.0), explored("az", 2, origin=0, taken_over=1)]

    (job,) = search_jobs([explored("ax")], played, SEARCH, seed=0, number=2)

    assert [turn.action.text for turn in job.begun.turns] == ["c", "z"]
    assert (job.begun.sample, job.kept) == (0, 1)


def test_later_episodes_of_an_interrupted_round_change_nothing():
    """Another tree is ahead by one: the job of this one is what it was."""
    played = [explored("cz", 1, origin=0)]
    ahead = [*played, explored("cy", 2, origin=0, taken_over=1, total_reward=1.0)]

    assert search_jobs([explored("ax")], ahead, SEARCH, 0, number=1) == search_jobs(
        [explored("ax")], played, SEARCH, 0, number=1
    )


def test_a_tree_whose_world_did_not_come_back_grows_no_more():
    lost = {"status": Status.FAILED, "origin": 0, "taken_over": 1}
    elsewhere = explored("a", 1, error="NotComeBack: the world did not come back to turn 1", **lost)

    assert search_jobs([explored("axx")], [replace(elsewhere, error="Crash: lost")], SEARCH, 0, number=1)
    assert not search_jobs([explored("axx")], [elsewhere], SEARCH, 0, number=1)


def test_a_world_that_was_lost_on_the_way_back_says_nothing_of_the_way():
    """It failed at the second of two turns to take over: a is worth 1 and not 1/2, so it is followed, and not c."""
    played = [explored("cz", 1, origin=0, total_reward=0.9)]
    lost = explored("a", 2, status=Status.FAILED, origin=0, taken_over=2, error="Crash: lost")

    found = search_jobs([explored("axx", total_reward=1.0)], [*played, lost], SEARCH, 0, number=2)

    assert found == search_jobs([explored("axx", total_reward=1.0)], played, SEARCH, 0, number=2)
    assert [turn.action.text for turn in found[0].begun.turns[: found[0].kept]] == ["a"]


def test_a_step_is_worth_no_less_for_a_world_that_was_lost_on_the_way_back():
    """That of a is worth 1, not 1/2, which would be a tie with c."""
    branches = [
        explored("cz", 1, origin=0, total_reward=0.5),
        explored("a", 2, status=Status.FAILED, origin=0, taken_over=2, error="Crash: lost"),
    ]
    found = TreePairs()(RowInputs(begun=[explored("axx", total_reward=1.0)], branches=branches))

    assert [(one.chosen.total_reward, one.rejected.total_reward) for one in found.rows] == [(1.0, 0.5)]
    assert found.counts == {"tie": 0, "gap": 0, "kept": 1, "too_long": 0, "nodes": 1}


def test_nodes_of_a_tree_that_does_not_fit_are_counted():
    """The only pair, whose sides are too long."""
    limit = Limit(too_long=lambda them: {one.key for one in them}, equal=lambda pairs: [True] * len(pairs))
    branches = [explored("c", 1, origin=0, total_reward=0.0)]
    found = TreePairs()(RowInputs(begun=[explored("a", total_reward=1.0)], branches=branches, limit=limit))

    assert found.counts == {"tie": 0, "gap": 0, "kept": 0, "too_long": 1, "nodes": 1}


def test_trees_are_of_failures_if_asked_and_never_of_what_failed_to_play():
    episodes = [explored("a", 2, success=True), explored("a", 1), explored("a", 0, status=Status.FAILED)]

    assert [one.sample for one in Mcts().begun(episodes, ())] == [2, 1]
    assert [one.sample for one in Mcts(of="failures").begun(episodes, ())] == [1]


def test_the_loop_with_trees(place, run_once):
    """Two turns, of which each is rewarded or not: steps are preferred by what came of them, and the policy learns."""
    run_once("searched", *TREES)

    folder = place / "runs" / "searched"
    stages = json.loads((folder / "manifest.json").read_text())["stages"]
    kept = 0
    for mark in ("001", "002"):
        counts = stages[f"pair-{mark}"]["counts"]
        trees = of(folder, f"explore-{mark}")
        played = of(folder, f"branch-{mark}")
        assert len(trees) * 5 >= len(played) > len(trees)
        assert counts["nodes"] == sum(counts[name] for name in (*IN_TREE, "too_long"))
        for tree in trees:
            root = grow(tree, (one for one in played if (one.task.id, one.origin) == tree.key))
            assert all(node.drawn <= 2 for node in root.walk())
            assert len({one.seed for one in root.passed}) == 1
        pairs = list(read_pairs(folder / f"pairs-{mark}.jsonl"))
        assert len(pairs) == counts["kept"]
        for pair in pairs:
            *before, step = pair.chosen.turns
            *shared, other = pair.rejected.turns
            assert [turn.action.text for turn in before] == [turn.action.text for turn in shared]
            assert step.action.text != other.action.text
            assert pair.chosen.total_reward > pair.rejected.total_reward
        kept += len(pairs)
    assert kept > 0


@pytest.mark.slow
def test_a_killed_search_ends_in_the_same_trees(place, run_once):
    """Interrupted in the middle of a round: the rest is played as it would have been."""
    for name in ("whole", "cut"):
        run_once(name, *TREES, "iterations=1", "deterministic=true")
    file = place / "runs/cut/trajectories/branch.jsonl"
    whole = file.read_text()
    lines = whole.splitlines(keepends=True)
    assert len(lines) >= 4
    half = len(lines) // 2
    file.write_text("".join(lines[:half]) + lines[half][:40])
    manifest = json.loads((place / "runs/cut/manifest.json").read_text())
    for name in list(manifest["stages"]):
        if name.startswith(("branch", "pair", "align")):
            del manifest["stages"][name]
    manifest["files"] = {
        name: note for name, note in manifest["files"].items() if note.get("stage") in manifest["stages"]
    }
    (place / "runs/cut/manifest.json").write_text(json.dumps(manifest))
    (place / "runs/cut/pairs.jsonl").unlink()

    finish(begin(place, "cut", *TREES, "iterations=1", "deterministic=true"))

    def trees(run):
        stored = read_trajectories(place / f"runs/{run}/trajectories/branch.jsonl")
        return sorted(
            (one.key, one.origin, one.taken_over, [t.action.text for t in one.turns]) for one in stored
        )

    assert trees("cut") == trees("whole")


@pytest.mark.slow
def test_worlds_that_do_not_come_back_end_their_trees(place):
    (place / "wandering.py").write_text(WANDERING)
    own = [
        "name=wandering",
        "iterations=1",
        "worlds.max_failed=1",
        "environment={name: 'wandering:Wandering'}",
    ]
    finish(begin(place, "wandering", *TREES, *own))

    counts = json.loads((place / "runs/wandering/manifest.json").read_text())["stages"]["branch"]["counts"]
    trees = len(of(place / "runs/wandering", "explore"))
    assert 0 < counts["not_come_back"] <= trees
    assert counts["exhausted"] >= counts["not_come_back"] - 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["explore.name=mcts", "rows={name: branch-pairs}"],
            "rows.name=branch-pairs needs branches or expert-branches or",
        ),
        (
            ["explore.name=branches", "rows={name: tree-pairs}"],
            "rows.name=tree-pairs needs a tree, and explore.name=branches provides branches, regular-branches; "
            "explorers that do: mcts.",
        ),
        (
            ["rows={name: tree-pairs}"],
            "needs a tree, and explore.name=rollouts provides none; explorers that do: mcts.",
        ),
        (
            ["explore={name: mcts, every: 3}", "rows={name: tree-pairs}"],
            "every is a setting of explore.name=branches or expert-branches. Known: ",
        ),
        (["explore.name=mcts", "explore.width=1", "rows={name: tree-pairs}"], "explore.width must be >= 2"),
    ],
)
def test_what_goes_not_together_is_refused(place, words, said):
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        recipe_of(place, *words)


@pytest.mark.parametrize("words", [[], ["explore.policy=base"]])
def test_a_greedy_search_is_refused(place, monkeypatch, words):
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    with pytest.raises(
        ConfigError, match=r"explore\.sampling\.temperature must be > 0 for explore\.name=mcts: .* got 0"
    ):
        check(recipe_of(place, *TREES, "explore.sampling.temperature=0", *words))
