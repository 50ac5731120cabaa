"""Failed episodes corrected by the expert: from the first wrong turn on, verified by playing, as pairs of a run."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest

from perturn.config.row_maker_settings import RowInputs
from perturn.data.run_paths import RunPaths
from perturn.data.store import TrajectoryStore, read_pairs, read_records
from perturn.envs.alfworld.generated_games import ALFWorldLike
from perturn.errors import ConfigError, DataError, RunError, WorldLost
from perturn.estimate.dry_run import make_plan
from perturn.methods.oec_rows import OecRows
from perturn.remaining import wrong_turns
from perturn.rows.correction_pairs import to_correct
from perturn.run.execute import open_run, run_stages
from perturn.run.stages.measure_distance import check_corrector, correct, corrected, measured
from perturn.types import Status, WeightedTrajectory
from support.corrections import PROTOCOL, RIGHT, STRAYED, TASK, commands, explore, make_recipe, record


def taken_over(recipe, failure, **settings):
    """Episodes in which the expert takes over, as the rows of oec hold them."""
    inputs = RowInputs([failure], seed=recipe.seed, correct=partial(corrected, recipe))
    return [row.trajectory for row in OecRows(**settings)(inputs).rows]


def test_the_turns_before_the_first_wrong_one_are_the_policys_own():
    """Three turns of its own, action for action; then the expert brings the pillow to the sofa."""
    (explored,) = measured(make_recipe(), [record(STRAYED)])
    (found,) = corrected(make_recipe(), [(explored, to_correct(explored))])

    assert wrong_turns(explored) == [False, False, False, True, True, True]
    assert commands(found) == RIGHT
    assert (found.policy, found.taken_over, found.key, found.seed) == ("expert", 3, explored.key, 7)
    assert found.success
    assert found.turns[:3] == record(STRAYED).turns[:3]
    assert [turn.action.token_ids for turn in found.turns] == [(0,), (1,), (2,), None, None]


def test_what_went_well_failed_or_has_no_wrong_turn_is_left_alone():
    """A whole success, an episode whose world raised, and one that a limit of turns ended on its way."""
    episodes = measured(make_recipe(), [record(RIGHT), record(RIGHT[:2]), record(STRAYED)])
    broken = replace(episodes[2], status=Status.FAILED)

    assert [to_correct(one) for one in (*episodes[:2], broken)] == [None] * 3


def test_the_expert_takes_over_at_drawn_turns_after_the_first():
    """At two of the last five turns of six; the same seed draws the same, and no more than there are."""
    recipe, failure = make_recipe(), record(STRAYED)
    found = taken_over(recipe, failure)
    every = taken_over(recipe, failure, takeovers=99)

    assert [one.taken_over for one in every] == [1, 2, 3, 4, 5]
    assert all(commands(one)[: one.taken_over] == STRAYED[: one.taken_over] for one in every)
    assert len(found) == 2
    assert found == taken_over(recipe, failure)
    assert {one.taken_over for one in found} < {1, 2, 3, 4, 5}
    drawn = {
        tuple(one.taken_over for one in taken_over(make_recipe(seed=seed), failure)) for seed in range(9)
    }
    assert len(drawn) > 1


def test_he_takes_over_where_the_policy_was_least_sure():
    """The first turn is the least sure of all, and never his; the mean of its tokens counts, not their sum."""
    logprobs = [(-9.0,), (-0.1,), (-2.0, -2.0, -2.0), (-3.0, -0.1), (-2.5,), (-0.2,)]
    failure = record(STRAYED)
    turns = [
        replace(turn, action=replace(turn.action, logprobs=each))
        for turn, each in zip(failure.turns, logprobs, strict=True)
    ]
    found = taken_over(make_recipe(), replace(failure, turns=tuple(turns)), takeover="confidence")

    assert [one.taken_over for one in found] == [2, 4]
    with pytest.raises(DataError, match=r"turn 1: rows\.takeover=confidence reads the log-probabilities"):
        taken_over(make_recipe(), failure, takeover="confidence")


def test_takeovers_that_do_not_succeed_are_left_out():
    """The expert needs two turns after the third, and more after the fifth, of a limit of five."""
    short = make_recipe(protocol={"name": "alfworld-lab", "max_turns": 5})
    found = taken_over(short, record(STRAYED[:5]), takeovers=99)

    assert [one.taken_over for one in found] == [1, 2, 3]
    assert taken_over(short, record(["look"]), takeovers=99) == []


def test_an_action_that_broke_the_format_is_kept_and_not_sent():
    """It is the first of two turns that are kept: the reminder follows it, and the expert begins after the second."""
    begun = record(["I wonder.", "go to armchair 2", "go to tvstand 1"])
    found = correct(ALFWorldLike(), begun, 2, PROTOCOL)

    assert commands(found) == ["I wonder.", *RIGHT[1:]]
    assert found.turns[:2] == begun.turns[:2]
    assert found.success


def test_an_expert_without_a_way_corrects_nothing():
    class Lost(ALFWorldLike):
        def correct(self, task, actions):
            return None

    assert correct(Lost(), record(STRAYED), 3, PROTOCOL) is None


def test_a_correction_that_takes_too_many_turns_does_not_succeed():
    """Three turns are kept and two are needed, but the limit is four."""
    found = correct(ALFWorldLike(), record(STRAYED), 3, replace(PROTOCOL, max_turns=4))

    assert (found.success, found.truncated, len(found.turns)) == (False, True, 4)


def test_an_episode_of_another_world_is_told():
    other = replace(record(STRAYED), task=ALFWorldLike().tasks("train")[0])

    with pytest.raises(
        DataError, match=r"turns\[0\]\.observation: recorded was .*, but the environment answers"
    ):
        correct(ALFWorldLike(), other, 3, PROTOCOL)


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_world_that_dies_in_the_replay_is_replayed_once_more(deaths, caplog):
    """Then the episode is left out, and the run goes on."""

    class Mortal(ALFWorldLike):
        left = deaths

        def step(self, action):
            if self.left and action == RIGHT[2]:
                self.left -= 1
                raise WorldLost("its process died.")
            return super().step(action)

    found = correct(Mortal(), record(STRAYED), 3, PROTOCOL)

    assert (None if found is None else commands(found)) == (RIGHT if deaths == 1 else None)
    if deaths == 2:
        assert "failed at turn 2 when the episode was played again: WorldLost: its process" in caplog.text
        assert "not corrected" in caplog.text


def test_a_world_whose_expert_cannot_take_over_is_refused(own_environment):
    recipe = make_recipe(environment={"name": "own_environment:GuessNumber"})

    with pytest.raises(
        ConfigError, match=r"rows\.name=corrections needs an expert who takes over .* has no method correct"
    ):
        check_corrector(recipe, own_environment.GuessNumber())
    check_corrector(make_recipe(rows={"name": "expert-pairs"}), own_environment.GuessNumber())
    for way, refused in (("oec", True), ("rft", False)):
        recipe = make_recipe(rows={"name": way}, align={"loss": {"name": "sft"}})
        with (
            pytest.raises(ConfigError, match=r"rows\.name=oec needs .* or take another row maker")
            if refused
            else nullcontext()
        ):
            check_corrector(recipe, own_environment.GuessNumber())


def test_a_run_pairs_corrections_with_failures(tmp_path):
    """Of four explored episodes one went well, one had no wrong turn, and two are corrected; no expert plays."""
    recipe = make_recipe(
        output=str(tmp_path),
        base=None,
        model={"name": "smollm2-135m"},
        explore={"tasks": {"n": 4}},
        evaluate=None,
    )
    explored = [
        record(RIGHT),
        record(RIGHT[:2], sample=1),
        record(STRAYED, sample=2),
        record(["look"] * 3, sample=3),
    ]
    with open_run(recipe) as run:
        with (
            run.stage("explore", run.paths.trajectories("explore")),
            TrajectoryStore(run.paths.trajectories("explore")) as store,
        ):
            for one in explored:
                store.append(one)
        run_stages(run)
    paths = RunPaths(run.folder)
    pairs = read_pairs(paths.pairs())
    counts = json.loads(paths.manifest.read_text())["stages"]["pair"]["counts"]

    assert [pair.chosen.taken_over for pair in pairs] == [3, 0]
    assert [commands(pair.chosen) for pair in pairs] == [RIGHT, RIGHT]
    assert [pair.rejected.key for pair in pairs] == [(TASK.id, 2), (TASK.id, 3)]
    assert not any(wrong for pair in pairs for wrong in wrong_turns(pair.chosen))
    assert {name: count for name, count in counts.items() if count} == {
        "succeeded": 1,
        "no_wrong_turn": 1,
        "kept": 2,
    }
    assert not paths.trajectories("expert").exists()


def test_a_run_learns_from_the_experts_turns_where_he_takes_over(tmp_path):
    """One of three explored episodes went well; at two turns of each of the others the expert takes over."""
    recipe = learning(tmp_path)
    explored = [record(RIGHT), record(STRAYED, sample=1), record(["look"] * 3, sample=2)]
    with open_run(recipe) as run:
        explore(run, "explore", explored)
        run_stages(run, names=("expert", "outcomes"))
    paths = RunPaths(run.folder)
    rows = list(read_records(paths.outcomes(), WeightedTrajectory))
    counts = json.loads(paths.manifest.read_text())["stages"]["outcomes"]["counts"]
    own = [row for row in rows if row.trajectory.taken_over]

    assert (counts["taught"], counts["failure"], counts["corrections"], counts["rows"]) == (4, 2, 4, 8)
    assert [row.trajectory.key for row in own] == [(TASK.id, 1)] * 2 + [(TASK.id, 2)] * 2
    assert [row.trajectory.taken_over for row in own[2:]] == [1, 2]
    assert all(row.weight.index(1.0) == row.trajectory.taken_over for row in own)
    assert all(row.trajectory.success for row in rows)


def learning(folder, **sections):
    """A recipe that learns from corrections."""
    return make_recipe(
        output=str(folder),
        base=None,
        model={"name": "smollm2-135m"},
        explore={"tasks": {"n": 4}},
        evaluate=None,
        rows={"name": "oec"},
        align={"loss": {"name": "sft"}},
        **sections,
    )


@pytest.mark.slow
def test_an_iteration_learns_from_all_corrections_before_it(tmp_path):
    """The second explores no failure at all; in the third there is one more."""
    recipe = learning(tmp_path, iterations=3)
    with open_run(recipe) as run:
        explore(run, "explore-001", [record(STRAYED, sample=1)])
        explore(run, "explore-002", [record(RIGHT)])
        explore(run, "explore-003", [record(["look"] * 3, sample=2)])
        run_stages(run, names=("expert", "outcomes-001", "outcomes-002", "outcomes-003"))
    found = [
        [
            row.trajectory.sample
            for row in read_records(run.paths.outcomes(end), WeightedTrajectory)
            if row.trajectory.taken_over
        ]
        for end in ("-001", "-002", "-003")
    ]

    assert found == [[1, 1], [1, 1], [1, 1, 2, 2]]


def test_a_plan_counts_the_corrections_that_may_come(tmp_path):
    """Of 4 explored episodes 3 are assumed to fail, corrected at 2 turns each; the second has both's."""
    recipe = learning(tmp_path, iterations=2)
    work = {step.name: step for step in make_plan(recipe, [], None).steps}

    assert work["outcomes-002"].work == "4 explored episodes, 6 corrections (assumed)"
    assert work["outcomes-002"].seconds > 1
    assert [work[f"align-00{at}"].work.split(",")[0] for at in (1, 2)] == ["10 episodes", "16 episodes"]


def test_a_first_iteration_without_corrections_is_told(tmp_path):
    """Nothing may be made of the policy before SFT in its place."""
    recipe = learning(tmp_path, iterations=2)
    with open_run(recipe) as run:
        explore(run, "explore-001", [record(RIGHT)])
        with pytest.raises(RunError, match="none is a failure"):
            run_stages(run, names=("expert", "outcomes-001"))


@pytest.mark.parametrize("answer", [KeyError("no such map"), ["go to sofa 1"], 5])
def test_an_expert_that_raises_or_returns_no_turns_corrects_nothing(answer, caplog):
    class Broken(ALFWorldLike):
        def correct(self, task, actions):
            if isinstance(answer, KeyError):
                raise answer
            return answer

    assert correct(Broken(), record(STRAYED), 3, PROTOCOL) is None
    assert "the expert cannot correct the episode, which is left out: " in caplog.text


@pytest.mark.parametrize("method", ["correct", "step"])
def test_a_lost_world_is_asked_again_for_a_correction(method):
    """Its process is killed once, by load for example; without a retry there is no correction."""

    class Killed(ALFWorldLike):
        left = 1

        def correct(self, task, actions):
            return self.once("correct") or super().correct(task, actions)

        def step(self, action):
            return (action == RIGHT[-1] and self.once("step")) or super().step(action)

        def once(self, here):
            if here == method and self.left:
                self.left -= 1
                raise WorldLost("killed")

    found = [correct(Killed(), record(STRAYED), 3, PROTOCOL, retries) for retries in (0, 1)]

    assert [one is not None and one.success for one in found] == [False, True]
