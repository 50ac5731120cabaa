"""Explored episodes are played on from some of their turns: which, how, and what the turns were worth by it."""

import json
import shutil

import pytest

from perturn.analysis.run_contents import read_run
from perturn.audit import audit, inspect_json
from perturn.config.recipe import read_recipe
from perturn.credit import CREDITS
from perturn.credit.returns import Return
from perturn.data.group_account import read_credits
from perturn.data.run_folder import Run, resolve_recipe
from perturn.data.run_paths import RunPaths
from perturn.data.store import TrajectoryStore, read_pairs
from perturn.errors import ConfigError, RunError
from perturn.group import groups_of
from perturn.quantities.branch_returns import branch_values
from perturn.report.credit_figures import compare_credits
from perturn.report.episode_view import credited
from perturn.report.report_page import by_stem
from perturn.rows.pairing import IN_GROUP
from perturn.run.stages.credit_stage import credit_groups, credit_run
from perturn.run.stages.quantity_source import members_of
from support.branches import WANDERING, branched, of
from support.credited import EPISODES, explored_by
from support.loop import finish

from .online import PAIRS, PAV, SPO, begin

PAV_CREDIT = CREDITS["pav"](alpha=0.5)


@pytest.fixture(scope="module")
def online(run_once):
    """Two iterations of policy gradient on advantages of branches."""
    return run_once("branched", *SPO)


def test_the_loop_plays_on_and_weighs_by_it(online):
    """A branch has its origin's beginning, to the token; a turn is worth the change of what its branches earn."""
    said = set()
    for mark in ("-001", "-002"):
        episodes = {one.key: one for one in of(online, f"explore{mark}")}
        branches = of(online, f"branch{mark}")
        assert len(branches) == 3 * sum(len(one.turns) - 1 for one in episodes.values()) >= 36
        ends: dict = {}
        for one in branches:
            origin, turn = episodes[one.task.id, one.origin], one.taken_over
            assert one.turns[:turn] == origin.turns[:turn]
            assert one.turns[turn].observation == origin.turns[turn].observation
            assert (one.seed, one.policy) == (origin.seed, origin.policy)
            ends.setdefault((origin.key, turn), []).append(sum(each.reward for each in one.turns[turn:]))
            said.add(one.turns[turn].action.text)
        rows = {row.key: row.weight for row in read_credits(online / f"credits/spo{mark}.jsonl")}
        for group in groups_of(episodes.values()):
            for one in group:
                values = [sum(each.total_reward for each in group if each is not one) / (len(group) - 1)]
                values += [sum(ends[one.key, turn]) / 3 for turn in range(1, len(one.turns))] + [0.0]
                expected = [turn.reward + values[t + 1] - values[t] for t, turn in enumerate(one.turns)]
                assert rows[one.key] == pytest.approx(expected)
    assert len(said) > 1


def test_stored_branches_are_weighed_again_alike(online, monkeypatch):
    monkeypatch.chdir(online.parents[1])

    found = credit_run(online, ["credit.name=spo"], against="rloo")

    assert [one["iteration"] for one in found["iterations"]] == [1, 2]


@pytest.fixture(scope="module")
def proved(run_once):
    """Two iterations whose branches SFT's policy plays."""
    return run_once("proved", *PAV)


@pytest.fixture(scope="module")
def forked(run_once):
    """Two iterations that train on branches too."""
    return run_once("forked", *SPO, "credit.name=portool", "explore.branches=2")


def test_branches_are_weighed_and_trained_beside_the_explored_episodes(forked):
    stages = json.loads((forked / "manifest.json").read_text())["stages"]
    for mark in ("-001", "-002"):
        explored, branches = of(forked, f"explore{mark}"), of(forked, f"branch{mark}")
        counts = stages[f"credit{mark}"]["counts"]
        assert counts["asked"] == len(explored) + len(branches) > len(explored)
        rows = read_credits(forked / f"credits/portool{mark}.jsonl")
        found = {row.key: row for row in rows}
        for group in groups_of([*explored, *branches]):
            for one, weight in zip(group, CREDITS["portool"]()(group), strict=True):
                assert found[one.key].weight == pytest.approx(weight.tolist())
        trained = {row.key for row in rows if row.bin == "trained"}
        assert trained & {one.key for one in branches}
        assert counts["trained"] == len(trained)


def test_stored_trees_are_weighed_again(forked, online, monkeypatch):
    """By the other credit of trees, and beside one that sees the explored episodes alone; and those of another run."""
    monkeypatch.chdir(forked.parents[1])

    again = credit_run(forked, ["credit.name=arpo"], against="portool")
    other = credit_run(online, ["credit.name=portool"])

    assert all(one["against"]["turns"] > 0 for one in again["iterations"])
    assert len(read_credits(forked / "credits/arpo-001.jsonl")) == len(
        read_credits(forked / "credits/portool-001.jsonl")
    )
    assert len(read_credits(online / "credits/portool-001.jsonl")) > len(of(online, "explore-001"))
    assert len(other["iterations"]) == 2


STORED = ["iterations=2", "rows={name: groups}", "credit.name=portool", "align.loss={name: ppo-clip}"]


def stored(recipe, *words):
    """Folder of a run that explored three episodes of a task, and played the first on from its turn 1, with 1 and 0."""
    episodes = [
        branched(None, 0, rewards, sample) for sample, rewards in enumerate([[0.0, 1.0], [0.0], [0.5]])
    ]
    branches = [branched(0, 1, [0.0, end], 3 + sample) for sample, end in enumerate([1.0, 0.0])]
    with Run(read_recipe(recipe, words)) as run:
        for name, found in (("explore-001", episodes), ("branch-001", branches)):
            file = run.paths.trajectories(name)
            with run.stage(name, file), TrajectoryStore(file) as store:
                for one in found:
                    store.append(one)
        return run.folder


def test_a_credit_of_trees_is_compared_on_what_another_weighs(recipe):
    """With one of explored episodes on these: RLOO of 1, 0 and 0.5 alone, whichever comes first.

    With another of trees on the branches' own turns too: 2, 1 and 1 of the explored ones, and 1 of each branch.
    """
    folder = stored(recipe, *STORED, "explore.name=branches", "explore.every=1", "explore.branches=2")

    (one,) = credit_run(folder, ["credit.name=portool"], against="rloo")["iterations"]
    (other,) = credit_run(folder, ["credit.name=rloo"], against="portool")["iterations"]
    (trees,) = credit_run(folder, ["credit.name=arpo"], against="portool")["iterations"]

    assert [each["against"]["turns"] for each in (one, other, trees)] == [4, 4, 6]
    shown = {(each["sample"], each["turn"]): each["weights"][1] for each in one["against"]["disagreements"]}
    assert shown == {(0, 1): 0.75, (0, 2): 0.75, (1, 1): -0.75, (2, 1): 0.0}


@pytest.mark.parametrize("name", ["portool", "arpo", "spo", "pav"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["rows={name: tree-pairs}", "explore.name=mcts"],
            "needs branches, and explore.name=mcts provides tree; expl",
        ),
        (
            ["rows={name: branch-pairs}", "explore.name=branches", "explore.of=failures"],
            "does not take branches of some episodes alone.*; set explore.of=all",
        ),
        (
            ["rows={name: step-pairs}", "explore.name=expert-branches"],
            "needs branches, .* provides expert-branches; ",
        ),
    ],
)
def test_branches_that_tell_how_episodes_ended_are_not_weighed_by(recipe, name, words, said):
    """Searched for, of failures, or the expert's: stored episodes of such a run."""
    folder = stored(recipe, "iterations=2", "align.loss={name: dpo}", *words)

    with pytest.raises(ConfigError, match=said):
        credit_run(folder, [f"credit.name={name}"])


def test_credits_are_compared_on_episodes_that_both_weigh(forked, monkeypatch):
    """Branches are no samples of their task to a credit that does not train them."""
    monkeypatch.chdir(forked.parents[1])
    explored = of(forked, "explore-001")
    rows = credit_groups(explored, CREDITS["rloo"]())
    weighed = members_of(CREDITS["arpo"](), explored, RunPaths(forked), resolve_recipe(forked), "-001")
    theirs = credit_groups(weighed, CREDITS["arpo"]())
    expected = compare_credits(explored, rows, theirs).to_dict()

    for against in ("arpo", "portool"):
        found = credit_run(forked, ["credit.name=rloo"], against=against, name="again")["iterations"][0]
        assert found["against"]["turns"] > 0
        assert against == "portool" or found["against"]["across"] == expected["across"]
    back = credit_run(forked, ["credit.name=arpo"], against="rloo", name="back")["iterations"][0]
    assert back["against"]["across"] == expected["across"]
    assert credit_run(forked, ["credit.name=portool"], against="again", name="third")


def test_the_report_has_the_credit_of_those_that_train_on_branches(forked):
    run = read_run(forked)

    assert next(iter(run.credits)) == "portool"
    assert not [note for note in run.notes if "left out" in note]
    assert credited(run).keys() == {one.key for one in run.explored}


def test_branches_are_inspected_with_loss_on_their_own_turns(forked):
    model = str(forked / "checkpoints" / "sft")
    rows = [json.loads(line)["chosen"] for line in inspect_json(forked, model)]
    branches = of(forked, "branch-002")
    found = audit(forked, model)["parts"]

    own = [set(range(one.taken_over, len(one.turns))) for one in branches]
    assert [{token["turn"] for token in row if token["loss"]} for row in rows[-len(branches) :]] == own
    assert len(rows) == len(of(forked, "explore-002")) + len(branches)
    assert found["branches"]["turns"] == sum(map(len, own))


@pytest.mark.slow
def test_a_prover_plays_on_in_all_iterations(proved):
    """SFT's policy, where the aligned one explored; and its branches are what the turns are weighed by."""
    manifest = json.loads((proved / "manifest.json").read_text())["stages"]
    explorers = set()
    for mark in ("-001", "-002"):
        episodes, branches = of(proved, f"explore{mark}"), of(proved, f"branch{mark}")
        explorers |= {one.policy.partition("@")[0] for one in episodes}
        assert {one.policy for one in branches} == {of(proved, "explore-001")[0].policy}
        assert manifest[f"branch{mark}"]["counts"]["played_by"] == "sft"
        assert manifest[f"branch{mark}"]["counts"]["not_come_back"] == 0
        values = branch_values(episodes, branches, Return())
        rows = {row.key: row.weight for row in read_credits(proved / f"credits/pav{mark}.jsonl")}
        ways = {one.key: own for one, own in zip(episodes, values, strict=True)}
        for group in groups_of(episodes):
            weights = PAV_CREDIT(group, branch_returns=[ways[one.key] for one in group])
            for one, weight in zip(group, weights, strict=True):
                assert rows[one.key] == pytest.approx(weight.tolist())
    assert explorers == {"sft", "ppo-clip-001"}
    assert by_stem(manifest)["branch, 2 times"]["counts"]["played_by"] == "sft"


@pytest.mark.slow
def test_stored_branches_of_a_prover_are_weighed_again_by_who_reads_a_prover(proved, monkeypatch):
    """By another alpha; not as if they were of the policy that explored, neither by itself nor to compare with."""
    monkeypatch.chdir(proved.parents[1])

    found = credit_run(proved, ["credit.name=pav", "credit.alpha=2"], against="rloo", name="pav-2")

    assert [one["iteration"] for one in found["iterations"]] == [1, 2]
    assert all(one["against"]["turns"] for one in found["iterations"])
    for name, against in (("spo", None), ("rloo", "spo")):
        with pytest.raises(
            ConfigError,
            match=r"credit spo does not take branches of another policy .* set explore\.policy=null",
        ):
            credit_run(proved, [f"credit.name={name}"], against=against, name="again")
    assert not list(proved.glob("credits/again*"))


@pytest.mark.slow
def test_a_run_goes_on_with_its_prover_alone(proved, place):
    """Done before is done; another prover is another run."""
    _, notices = finish(begin(place, "proved", *PAV))
    process = begin(place, "proved", *PAV, "explore.policy=base")
    _, said = process.communicate(timeout=120)

    assert "branch-002: done before" in notices
    assert process.returncode == 2
    assert "was made by another recipe: explore.policy is 'sft' there and 'base' here" in " ".join(
        said.split()
    )


@pytest.mark.parametrize("harm", ["unfinished", "unbegun", "damaged"])
def test_branches_that_are_not_whole_are_not_weighed_by(online, tmp_path, harm):
    """Of a run that was stopped within the stage or before it, or of a file that lost its last line."""
    folder = shutil.copytree(online, tmp_path / "copy")
    manifest = json.loads((folder / "manifest.json").read_text())
    file = folder / "trajectories" / "branch-002.jsonl"
    if harm == "damaged":
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    else:
        manifest["stages"]["branch-002"]["done"] = False
        (folder / "manifest.json").write_text(json.dumps(manifest))
    if harm == "unbegun":
        file.unlink()

    with pytest.raises(
        RunError, match="Restore" if harm == "damaged" else "is not finished; run: perturn run"
    ):
        credit_run(folder, ["credit.name=spo"], name="again")


@pytest.mark.slow
def test_worlds_that_do_not_come_back_are_counted(place, monkeypatch):
    """One that never says the same twice: hardly a branch begins, and the run goes on without."""
    (place / "wandering.py").write_text(WANDERING)
    words = [
        *SPO,
        "iterations=1",
        "name=wandering",
        "worlds.max_failed=1",
        "environment={name: 'wandering:Wandering'}",
    ]
    _, notices = finish(begin(place, "wandering", *words))
    stages = json.loads((place / "runs/wandering/manifest.json").read_text())["stages"]
    counts = stages["branch"]["counts"]

    assert 0 < counts["not_come_back"] == counts["failed"]
    assert f"{counts['failed']} of {counts['episodes']} episodes were to go on" in " ".join(notices.split())


def test_a_run_without_branches_has_nothing_to_weigh_by(recipe):
    folder = explored_by(recipe, EPISODES)

    with pytest.raises(
        ConfigError, match=r"credit spo needs branches, and explore\.name=rollouts provides none"
    ):
        credit_run(folder, ["credit.name=spo"])


@pytest.mark.slow
def test_pairs_share_the_turns_before_they_part(place, run_once):
    run_once("paired", *PAIRS)

    folder = place / "runs" / "paired"
    counts = json.loads((folder / "manifest.json").read_text())["stages"]["pair-001"]["counts"]
    pairs = list(read_pairs(folder / "pairs-001.jsonl"))

    explored, branches = of(folder, "explore-001"), of(folder, "branch-001")
    played = sum(len(one.turns) - 1 for one in explored)  # every=1: a group for each turn after the first
    assert counts["memberships"] == played + len(branches) == 4 * played
    assert sum(counts[name] for name in (*IN_GROUP, "too_long")) == counts["memberships"]
    assert len(pairs) == counts["kept"] // 2 > 0
    for pair in pairs:
        assert pair.chosen.turns[0] == pair.rejected.turns[0]
        assert pair.chosen.total_reward > pair.rejected.total_reward
        assert {pair.chosen.origin, pair.rejected.origin} != {None}


@pytest.mark.slow
def test_pairs_may_be_of_an_episode_and_of_those_that_another_policy_played_on(place, run_once):
    """SFT's policy plays on; the aligned one explored the second iteration. Either may be chosen."""
    run_once("paired-proved", *PAIRS, "explore.policy=sft")

    folder = place / "runs" / "paired-proved"
    explored, branches = of(folder, "explore-002"), of(folder, "branch-002")
    pairs = list(read_pairs(folder / "pairs-002.jsonl"))
    keys = {one.key: one for one in (*explored, *branches)}
    sides = {(pair.chosen.policy, pair.rejected.policy) for pair in pairs}

    own, prover = ({one.policy for one in each} for each in (explored, branches))
    assert [{name.partition("@")[0] for name in each} for each in (own, prover)] == [{"dpo-001"}, {"sft"}]
    assert {name for each in sides for name in each} == own | prover
    assert all(keys[side.key] == side for pair in pairs for side in (pair.chosen, pair.rejected))
    assert all(pair.chosen.turns[0] == pair.rejected.turns[0] for pair in pairs)
