"""The remaining path of recorded episodes: of each turn, in pairs and in groups, and where it cannot be said."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from perturn.analysis.episode_numbers import numbers_of
from perturn.analysis.turn_errors import error_row
from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.data.store import TrajectoryStore, read_pairs, read_trajectories, write_pairs
from perturn.envs.alfworld.generated_games import ALFWorldLike
from perturn.episodes.episode import episode
from perturn.episodes.play_many import Job
from perturn.episodes.replay import play_script
from perturn.errors import ConfigError, DataError, EngineFailure
from perturn.remaining import wrong_turns
from perturn.run.execute import open_run, run_stages
from perturn.run.protocol_rules import make_protocol
from perturn.run.stages.evaluate_stage import _measure
from perturn.run.stages.measure_distance import check_pathfinder, measured, measured_pairs, sense_of
from perturn.types import Action, PreferencePair, Remaining, Status

RECIPE = {
    "name": "x",
    "model": {"name": "smollm2-135m"},
    "environment": {"name": "alfworld-like"},
    "protocol": {"name": "alfworld-lab"},
    "rows": {"name": "corrections", "distance": "searching"},
}


def make_recipe(**sections):
    return parse(Recipe, RECIPE | sections)


def test_a_recipe_that_reads_no_path_asks_no_environment(monkeypatch):
    """To name those that could say it would load them all."""
    monkeypatch.setattr(
        "perturn.run.stages.measure_distance.check_abilities", lambda *_: pytest.fail("asked")
    )

    check_pathfinder(make_recipe(rows={"name": "expert-pairs"}), SimpleNamespace(name="silent"))


def record(commands, task=None):
    """An episode of a game that the expert wins in a few turns."""
    task = task or ALFWorldLike().tasks("train")[0]
    texts = [command if command.startswith("I ") else f"Action: {command}" for command in commands]
    steps = episode(ALFWorldLike(), Job(task, 0), protocol=make_protocol(make_recipe().protocol))
    return play_script(steps, [Action(text) for text in texts], EngineFailure("no more"))


@pytest.fixture(scope="module")
def expert():
    return record(ALFWorldLike().expert(ALFWorldLike().tasks("train")[0]))


def test_each_turn_has_the_way_before_and_after_it(expert):
    """The expert's own is one shorter each turn; a look and an action that breaks the format leave it as it was."""
    turns = len(expert.turns)
    first = expert.turns[0].action.text.removeprefix("Action: ")
    strayed = replace(record(["look", "I wonder.", first]), status=Status.COMPLETED)
    found, other = measured(make_recipe(), [expert, strayed])

    assert [turn.remaining for turn in found.turns] == [
        Remaining(turns - index, turns - index - 1) for index in range(turns)
    ]
    assert [turn.remaining for turn in other.turns] == [
        Remaining(turns, turns),
        Remaining(turns, turns),
        Remaining(turns, turns - 1),
    ]
    assert wrong_turns(found) == [False] * turns
    assert wrong_turns(other) == [True, True, False]


def test_where_nobody_reads_it_nothing_is_measured(expert):
    found = measured(make_recipe(rows={"name": "expert-pairs"}), [expert])

    assert found == [expert]
    with pytest.raises(DataError, match=r"turns\[0\]\.remaining was not measured; a run measures it"):
        wrong_turns(found[0])


def test_pairs_and_groups_have_it_and_keep_it_on_disk(expert, tmp_path):
    """An expert's episode that is in two pairs is measured in both, and after a round trip it is the same."""
    pairs = [PreferencePair(expert, record(["look"])), PreferencePair(expert, record(["help"]))]
    found = measured_pairs(make_recipe(), pairs)
    write_pairs(tmp_path / "pairs.jsonl", found)
    groups = make_recipe(
        rows={"name": "groups"},
        credit={"name": "first-error"},
        explore={"samples": 2},
        align={"loss": {"name": "ppo-clip"}},
    )

    assert read_pairs(tmp_path / "pairs.jsonl") == found
    assert [pair.chosen.turns[0].remaining for pair in found] == [
        Remaining(len(expert.turns), len(expert.turns) - 1)
    ] * 2
    assert measured(groups, [expert])[0].turns[-1].remaining == Remaining(1, 0)


def test_episodes_of_another_world_are_told(expert):
    other = replace(expert, task=ALFWorldLike().tasks("train")[1])

    with pytest.raises(
        DataError, match=r"turns\[0\]\.observation: recorded was .*, but the environment answers"
    ):
        measured(make_recipe(), [other])


def test_a_world_that_cannot_say_it_is_refused_before_work(own_environment):
    """Named with those that can; and none where nothing is played."""
    recipe = make_recipe(environment={"name": "own_environment:GuessNumber"})

    with pytest.raises(
        ConfigError, match=r"how far .*: environment \S+ has no method remaining\(\) .*take alfworld"
    ):
        check_pathfinder(recipe, own_environment.GuessNumber())
    read = {"align": {"loss": {"name": "tlm-dre"}}, "credit": {"name": "first-error"}}
    recipe = make_recipe(environment=None, protocol=None, rows={"name": "file", "path": "p.jsonl"}, **read)
    with pytest.raises(
        ConfigError, match="environment is missing, and the recipe reads how far an episode is from its end"
    ):
        check_pathfinder(recipe, None)


def test_two_senses_at_once_are_refused():
    """A turn holds one measure."""
    read = {"align": {"loss": {"name": "tlm-dre"}}, "credit": {"name": "first-error", "distance": "shortest"}}

    with pytest.raises(ConfigError, match=r"must be equal, .* got \['searching', 'shortest'\]"):
        sense_of(make_recipe(**read))


@pytest.mark.parametrize(
    ("before", "after", "is_wrong"),
    [
        (5, 4, False),
        (5, 2, False),
        (5, 5, True),
        (5, 6, True),
        (5, None, True),
        (None, None, True),
    ],
)
def test_a_wrong_turn_leaves_a_longer_way_than_a_right_one(before, after, is_wrong):
    """A right turn leaves 4 of 5, or fewer by luck; who has lost the game goes nowhere with any turn."""
    assert Remaining(before, after).is_wrong == is_wrong


def test_a_run_measures_its_pairs_and_the_oracle_weighs_them(expert, tmp_path, tiny_folder):
    """The expert's first command, and then a look, which is wrong: 0.2 and 1. The expert has no error: 1 everywhere."""
    first = expert.turns[0].action.text.removeprefix("Action: ")
    file = tmp_path / "rows.jsonl"
    rejected = replace(record([first, "look"]), status=Status.COMPLETED, truncated=True, error=None)
    write_pairs(file, [PreferencePair(expert, rejected)])
    recipe = RECIPE | {
        "model": {"name": str(tiny_folder), "dtype": "float32"},
        "rows": {"name": "file", "path": str(file)},
        "align": {"loss": {"name": "tlm-dre"}},
        "credit": {"name": "first-error", "distance": "searching"},
        "evaluate": None,
        "output": str(tmp_path / "runs"),
    }

    with open_run(parse(Recipe, recipe)) as run:
        run_stages(run)
        (pair,) = read_pairs(run.paths.pairs())
        (noted,) = map(json.loads, run.paths.metrics("confidence").read_text().splitlines())

    assert wrong_turns(pair.rejected) == [False, True]
    assert noted["rejected"]["weight"] == [0.2, 1.0]
    assert noted["chosen"]["weight"] == [1.0] * len(expert.turns)


def test_scored_episodes_are_measured_where_the_recipe_asks_for_it(tmp_path, expert):
    """Then errors are wrong turns: none of the expert's. A failed episode stays as it was."""
    recipe = make_recipe(rows=None, evaluate={"distance": "searching"})
    with TrajectoryStore(tmp_path / "sft.jsonl") as store:
        for one in (expert, replace(expert, sample=1, status=Status.FAILED)):
            store.append(one)

    _measure(SimpleNamespace(recipe=recipe), "searching", tmp_path / "sft.jsonl")

    found = list(read_trajectories(tmp_path / "sft.jsonl"))
    assert [all(turn.remaining for turn in one.turns) for one in found] == [True, False]
    assert wrong_turns(found[0]) == [False] * len(expert.turns)
    errors = error_row([numbers_of(one) for one in found])
    assert (errors["kind"], errors["before"]["mean"]) == ("wrong", 0.0)


def test_a_world_without_a_way_cannot_measure_scored_episodes():
    recipe = make_recipe(rows=None, evaluate={"distance": "searching"})

    with pytest.raises(ConfigError, match=r"leave evaluate\.distance out"):
        check_pathfinder(recipe, None)


def test_a_failed_episode_is_not_measured_again(expert):
    """Its environment may fail on the task each time."""
    broken = replace(
        expert, task=replace(expert.task, id="none", data={}), status=Status.FAILED, error="KeyError: x"
    )

    assert measured(make_recipe(), [broken]) == [broken]
