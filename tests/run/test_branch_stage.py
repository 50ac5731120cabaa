"""Explored episodes are played on from some of their turns: which, how, and what the turns were worth by it."""

import json
import math
import random
import re
import shutil
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perturn.analysis.run_contents import read_run
from perturn.audit import audit, inspect_json
from perturn.config.recipe import read_recipe
from perturn.credit import CREDITS
from perturn.credit.returns import Return
from perturn.data.group_account import read_credits
from perturn.data.run_folder import Run, resolve_recipe
from perturn.data.run_paths import RunPaths
from perturn.data.store import TrajectoryStore, read_pairs
from perturn.episodes.episode import Job, _check_back, episode
from perturn.episodes.play_many import play
from perturn.episodes.replay import play_script
from perturn.errors import ConfigError, EngineFailure, NotComeBack, RunError
from perturn.explore.branches import Branches
from perturn.group import groups_of
from perturn.quantities.branch_returns import branch_values
from perturn.report.credit_figures import compare_credits
from perturn.report.episode_view import credited
from perturn.report.report_page import by_stem
from perturn.rows.pairing import IN_GROUP
from perturn.run.execute import check
from perturn.run.stages.credit_checks import check_prover
from perturn.run.stages.credit_stage import credit_groups, credit_run
from perturn.run.stages.quantity_source import members_of
from perturn.types import Action, EpisodeProtocol, Observation, Sampling, Status, Task
from support.branches import WANDERING, branched, explored, jobs_of, of
from support.credited import EPISODES, explored_by
from support.loop import finish

from .online import GROUPS, begin, recipe_of

SPO = [
    *GROUPS,
    "credit.name=spo",
    "explore.name=branches",
    "explore.every=1",
    "explore.branches=3",
    "iterations=2",
    "evaluate=null",
]
PAV = [*SPO, "credit.name=pav", "credit.alpha=0.5", "explore.policy=sft"]
PAV_CREDIT = CREDITS["pav"](alpha=0.5)
STEPS = ["rows.name=step-pairs"]
PAIRS = [
    "rows.name=branch-pairs",
    "explore.name=branches",
    "explore.every=1",
    "explore.branches=3",
    "iterations=2",
    "evaluate=null",
]

GREEDY = [
    "rows.name=branch-pairs",
    "explore.name=branches",
    "explore.every=1",
    "explore.sampling.temperature=0",
]


def test_every_so_many_turns_are_played_on_from():
    """Of 11 turns with every 5: before turns 5 and 10; of 5 none, for it ended there."""
    jobs = jobs_of(Branches(every=5, branches=2, samples=4), [explored(5, 1), explored(11)])

    assert [(job.kept, job.begun.sample, job.sample) for job in jobs] == [
        (5, 0, 4),
        (5, 0, 8),
        (10, 0, 12),
        (10, 0, 16),
    ]
    assert {job.begun.seed for job in jobs} == {5}
    assert len({job.seed for job in jobs}) == 4


def test_failed_episodes_are_left_alone_and_successes_if_asked():
    episodes = [explored(3), explored(3, 1, success=True), explored(3, 2, status=Status.FAILED)]

    def origins(of):
        return [
            job.begun.sample for job in jobs_of(Branches(every=2, branches=1, of=of, samples=3), episodes)
        ]

    assert origins("all") == [0, 1]
    assert origins("failures") == [0]


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    every=st.integers(1, 4),
    samples=st.integers(1, 3),
)
def test_no_two_branches_have_one_number_or_one_seed(lengths, every, samples):
    """Nor that of an explored episode; whatever the order in which these were stored."""
    episodes = [explored(turns, sample) for sample, turns in enumerate(lengths)]

    explorer = Branches(every=every, branches=samples, samples=len(lengths))
    jobs = jobs_of(explorer, episodes, 1)

    assert len({job.sample for job in jobs}) == len({job.seed for job in jobs}) == len(jobs)
    assert not {job.sample for job in jobs} & set(range(len(lengths)))
    assert len(jobs) == sum(samples * ((turns - 1) // every) for turns in lengths if turns)
    assert jobs == jobs_of(explorer, episodes[::-1], 1)
    assert not {job.seed for job in jobs} & {job.seed for job in jobs_of(explorer, episodes, 1, 2)}


def test_hand_worked_values():
    """From turn 1 on: 0 + 1 and 0 - 0.5, so 0.25; what was earned before is not counted. From turn 2: 0.5."""
    branches = [
        branched(0, 2, [0.25, 0.0, 0.5], 4),
        branched(0, 1, [0.25, 0.0, 1.0], 2),
        branched(0, 1, [0.25, -0.5], 3),
    ]

    values = branch_values([explored(3), explored(2, 1)], branches, Return())

    assert values[0][1:] == [0.25, 0.5]
    assert all(map(math.isnan, [values[0][0], *values[1]]))


def test_a_failed_branch_counts_as_nothing_earned_but_one_that_never_began_does_not_count():
    """(1 + 0 + 0) / 3 with two that failed on turns of their own, and not / 5 with two that did not come back."""
    failed = {"status": Status.FAILED, "error": "Crash: lost"}
    branches = [
        branched(0, 1, [0.0, 1.0], 1),
        branched(0, 1, [0.0, 0.75], 2, **failed),
        branched(0, 1, [0.0], 3, **failed),
        branched(
            0, 1, [0.0], 4, status=Status.FAILED, error="NotComeBack: the world did not come back to turn 1"
        ),
        branched(0, 1, [], 5, **failed),
    ]

    assert branch_values([explored(2)], branches, Return())[0][1] == pytest.approx(1 / 3)
    assert math.isnan(branch_values([explored(2)], branches[3:], Return())[0][1])


class Coin:
    """Three actions; the task is solved if two of them or more are heads."""

    name = "coin-1.0"

    def tasks(self, split):
        """One."""
        return [Task("coin")]

    def reset(self, task, seed):
        """Nothing was tossed."""
        self.seen = []
        return Observation("Toss.")

    def step(self, action):
        """Take note."""
        self.seen.append(action)
        won = self.seen.count("heads") >= 2
        done = len(self.seen) == 3
        return Observation(f"seen {self.seen}", reward=float(done and won), terminated=done, success=won)

    def close(self):
        """Nothing to close."""


class Tosses:
    """Heads with a chance of 0.3, by the seed of the prompt."""

    name = "tosses"

    def generate(self, prompts, sampling):
        """Toss for each."""
        heads = [random.Random(prompt.seed).random() < 0.3 for prompt in prompts]
        return [Action("Action: heads" if one else "Action: tails") for one in heads]

    def forget(self, conversation):
        """Nothing was kept."""


PLAIN = EpisodeProtocol(name="plain", format="action", system="Play.", max_turns=3)


def test_values_come_to_the_exact_ones():
    """After heads 1 - 0.7^2, after tails 0.3^2, after one of each 0.3; within 4 standard errors of 1000 episodes."""
    script = [Action("Action: heads"), Action("Action: tails"), Action("Action: tails")]
    first = play_script(
        episode(Coin(), Job(Task("coin"), 3), protocol=PLAIN), script, EngineFailure("no more")
    )
    other = play_script(
        episode(Coin(), Job(Task("coin"), 4, 1), protocol=PLAIN),
        script[1:] + script[:1],
        EngineFailure("no more"),
    )
    jobs = jobs_of(Branches(every=1, branches=1000, samples=2), [first, other])

    found = list(play(jobs, Tosses(), Coin, protocol=PLAIN, sampling=Sampling(), concurrency=8))

    assert len(found) == 4000
    values = branch_values([first, other], found, Return())
    for value, exact in zip([*values[0][1:], *values[1][1:]], [0.51, 0.3, 0.09, 0.0], strict=True):
        assert abs(value - exact) <= 4 * math.sqrt(exact * (1 - exact) / 1000)


def heads():
    """An episode of three heads."""
    script = [Action("Action: heads")] * 3
    return play_script(
        episode(Coin(), Job(Task("coin"), 3), protocol=PLAIN), script, EngineFailure("no more")
    )


def played_on(begun, kept):
    """A branch of an episode from behind so many of its turns; None: all."""
    jobs = [Job(Task("coin"), 9, 1, begun, kept)]
    (found,) = play(jobs, Tosses(), Coin, protocol=PLAIN, sampling=Sampling(), concurrency=1)
    return found


def test_a_world_that_does_not_come_back_fails_its_branch():
    """It is told which turn, and both texts; the turns before it are kept."""
    whole = heads()
    other = replace(whole.turns[1], observation=({"role": "user", "content": "seen nothing"},))
    begun = replace(whole, turns=(whole.turns[0], other))

    found = played_on(begun, None)

    assert found.status is Status.FAILED
    assert "did not come back to turn 1: expected" in found.error
    assert (len(found.turns), found.origin, found.taken_over, found.seed) == (1, 0, 2, 3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"observation": ({"role": "user", "content": "other"},)}, "did not come back to turn 1: expected"),
        ({"reward": 0.5}, r"did not come back to turn 2: expected rewards \[0.0, 0.5\], got \[0.0, 0.0\]"),
    ],
)
def test_the_first_turn_of_its_own_and_the_rewards_before_it_are_compared(changes, said):
    """The answer to the last action that is given again says whether the world is back."""
    whole, kept = heads(), 1 if "observation" in changes else 2
    begun = replace(whole, turns=(whole.turns[0], replace(whole.turns[1], **changes), whole.turns[2]))

    found = played_on(begun, kept)

    assert found.status is Status.FAILED
    assert re.match(f"NotComeBack: the world {said}", found.error)
    assert len(found.turns) == kept


def test_where_the_world_is_elsewhere_is_shown_from_where_the_texts_part():
    """The first 300 characters are alike."""
    whole = heads()
    far = ({"role": "user", "content": "x" * 300 + "other"},)
    near = ({"role": "user", "content": "x" * 300 + whole.turns[1].observation[0]["content"]},)
    begun = replace(whole, turns=(whole.turns[0], replace(whole.turns[1], observation=far), whole.turns[2]))

    with pytest.raises(NotComeBack, match=r"expected \.\.\.x+other\".*, got \.\.\.x+[^o]"):
        _check_back(begun.turns, begun.turns[:1], near)


def test_a_world_that_ends_before_it_is_back_fails_its_branch():
    """It is no success."""
    whole = heads()
    begun = replace(whole, turns=(*whole.turns, whole.turns[2]))

    found = played_on(begun, 4)

    assert found.status is Status.FAILED
    assert "the world ended at turn 3, before it had come back to turn 4" in found.error


@pytest.fixture(scope="module")
def policy_folder(whole_vocabulary):
    """One that is not sure of what to do after SFT."""
    return whole_vocabulary


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [*GROUPS, "explore.name=branches"],
            "credit anchor-rloo does not read branches, .* take explore.name=rollouts",
        ),
        (
            [*GROUPS, "credit.name=spo"],
            "credit spo needs branches, and explore.name=rollouts provides none; explorers",
        ),
        (
            [*SPO, "explore.of=failures"],
            "credit spo does not take branches of some episodes .* set explore.of=all",
        ),
        (
            [*SPO, "explore.policy=sft"],
            "credit spo does not take branches of another policy than the exploring one",
        ),
        ([*PAV, "sft=null"], "explore.policy is sft, and the recipe has no section sft"),
        (
            ["explore.name=branches"],
            "explore.name=branches provides branches, regular-branches, which rows.name=group-pairs reads not",
        ),
        ([*STEPS, "rows.path=own.jsonl"], "unknown key 'rows.path'. path is a setting of rows.name=file"),
        (
            [*STEPS, "explore.name=branches"],
            "rows.name=step-pairs needs expert-branches, and explore.name=branches provides .*do: expert-branches",
        ),
        (
            ["rows.name=group-pairs", "explore.name=expert-branches"],
            "explore.name=expert-branches provides expert-branches, which rows.name=group-pairs reads not",
        ),
        ([*SPO, "explore.name=expert-branches"], "credit spo needs branches, .* provides expert-branches"),
        (
            ["rows.name=step-pairs", "rows.per_group=2"],
            "per_group is a setting of rows.name=group-pairs or branch",
        ),
        (
            [*STEPS, "explore.name=expert-branches", "explore.sampling.temperature=0"],
            "at temperature 0 all branches from a turn are alike",
        ),
        (["rows.name=branch-pairs", "rows.path=own.jsonl"], "path is a setting of rows.name=file"),
        (["rows.name=branch-pairs", "explore.name=branches", "explore.every=0"], "every"),
        (
            ["rows.name=branch-pairs", "explore.name=branches", "explore.every=3"],
            r"explore\.every is 3, and no episode has more than 3 turns",
        ),
        (
            [*SPO, "protocol.max_turns=1"],
            r"more than 1 turns.* let them take two or more",
        ),
        (
            [*SPO, "explore.every=4"],
            r"explore\.every is 4, and no episode has more than 3 turns.* less than 3",
        ),
        (
            GREEDY,
            "the same episode again",
        ),
        ([*GREEDY, "explore.policy=sft", "explore.branches=1", "iterations=1"], "the same episode again"),
        (
            [*GREEDY, "explore.policy=base"],
            r"explore\.branches is 2, and at temperature 0 all branches .* alike",
        ),
        ([*GREEDY, "explore.policy=sft", "iterations=2"], "set explore.branches=1, or explore.sampling.temp"),
        (
            ["rows.name=branch-pairs", "rows.max_extra_turns=2"],
            "max_extra_turns is a setting of rows.name=expert-pairs",
        ),
        (
            [*SPO, "credit.name=portool", "explore.policy=sft"],
            "credit portool does not take branches of another policy than the exploring one",
        ),
        (
            [*GROUPS, "credit.name=arpo"],
            "credit arpo needs branches, and explore.name=rollouts provides none",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_before_work(place, monkeypatch, words, said):
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    with pytest.raises(ConfigError, match=said):
        check(recipe_of(place, *words))


@pytest.mark.parametrize("name", ["spo", "pav", "portool", "arpo"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rows.name=tree-pairs", "explore.name=mcts"], "needs branches"),
        (["rows.name=step-pairs", "explore.name=expert-branches"], "needs branches"),
        (
            ["rows.name=branch-pairs", "explore.name=branches", "explore.of=failures"],
            "does not take branches of some",
        ),
    ],
)
def test_branches_that_were_chosen_are_not_weighed_by(place, words, said, name):
    """A search plays on from branches too, so a branch is none of the episode that its tree began with."""
    recipe = recipe_of(place, "rows={name: expert-pairs, threshold: 0.0}", *words)

    with pytest.raises(ConfigError, match=f"credit {name} {said}"):
        check_prover(recipe, name, CREDITS[name]())


@pytest.mark.parametrize("words", [["explore.policy=base"], ["explore.policy=sft", "iterations=2"]])
def test_another_policy_may_play_on_greedily_once(place, monkeypatch, words):
    """SFT's policy explores, in the first iteration alone, so that what another one does then is another episode."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)

    assert check(recipe_of(place, *GREEDY, "explore.branches=1", *words)) is not None
