"""What a dry run assumes of an online run: replicas, times of environment steps, and the way of the weights."""

from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest

from perturn.config.parsing import parse
from perturn.config.recipe import Recipe
from perturn.config.stages import stages
from perturn.data.store import write_records
from perturn.estimate import dry_run, overlap, stage_costs
from perturn.estimate.episode_lengths import Episodes, look_at_episodes
from perturn.estimate.machine_speed import Machine
from perturn.estimate.memory import ModelShape
from perturn.run.execute import check
from perturn.types import Action, Task, Trajectory, Turn
from support.benchmarks import benchmark

from .online import GROUPS, recipe_of

SHAPE = ModelShape(1_000_000, 100, 100, 10, 300, 100, 50, 10, True)
FOUND = Episodes(explore=4, turns=1.0, limit=1.0)
SIXTEEN = replace(FOUND, explore=16)


def recipe(tmp_path, **sections):
    """A recipe of three iterations, 16 episodes at the same time."""
    data = benchmark("staleness")._recipe("assumed", tmp_path, 1) | {"iterations": 3}
    return parse(Recipe, data | {"explore": data["explore"] | {"concurrency": 16}} | sections)


VLLM = {"name": "vllm"}
SERVERS = VLLM | {"servers": ["http://gpu1:8000", "http://gpu2:8000", "http://gpu3:8000"]}
CLUSTER = {"cluster": {"address": "local", "engines": 4}, "staleness": 0}


@pytest.mark.parametrize(
    ("sections", "copies"),
    [
        ({}, 1),
        ({"engine": VLLM | {"replicas": 2}}, 2),
        ({"engine": SERVERS}, 3),
        (CLUSTER, 4),
    ],
)
def test_replicas_of_the_recipe_share_the_episodes(sections, copies, tmp_path, monkeypatch):
    """In the simulated loop, and in the time of an exploration: each has a part of the episodes and of the slots."""
    asked = []
    monkeypatch.setattr(stage_costs, "generation_seconds", lambda *given: asked.append(given[2:4]) or 1.0)
    given = recipe(tmp_path, **sections)
    stage = next(each for each in stages(given) if each.name.startswith("explore"))

    dry_run._cost(given, stage, SIXTEEN, Machine(SHAPE, "cpu", 4, 1e9, 1e9, 1.0))

    assert overlap.loop_of(given, SIXTEEN, 1.0, 1).replicas == copies
    assert asked == [(-(-16 // copies), 16 // copies)]


def drawn(monkeypatch, given, found):
    """The sentence of a prediction, and 50 turns that its simulation draws, as (answer, step)."""
    plays = []
    monkeypatch.setattr(overlap, "expected_seconds", lambda loop, play: plays.append(play) or 1.0)
    said, random = overlap.predict(given, found, 20.0, [15.0] * 3), Random(0)
    return said, [plays[0](random)[1] for _ in range(50)]


def test_times_of_steps_are_drawn_from_measured_steps(tmp_path, monkeypatch):
    """A turn of 20 s with steps of 0 or 10 s: 15 s are left for an answer."""
    said, turns = drawn(monkeypatch, recipe(tmp_path), replace(FOUND, seconds=5.0, step_seconds=(0.0, 10.0)))

    assert set(turns) == {(15.0, 0.0), (15.0, 10.0)}
    assert "times of 2 environment steps as measured now" in said


def test_without_measured_steps_the_time_of_a_step_is_constant(tmp_path, monkeypatch):
    """And the prediction says so."""
    said, turns = drawn(monkeypatch, recipe(tmp_path), replace(FOUND, seconds=5.0))

    assert set(turns) == {(15.0, 5.0)}
    assert "a constant 5 s for each environment step" in said


def test_steps_that_were_not_timed_are_said_to_count_as_nothing(tmp_path, monkeypatch):
    said, _ = drawn(monkeypatch, recipe(tmp_path), replace(FOUND, seconds=0.0, step_seconds=()))

    assert "environment steps were not timed, and count as 0 s" in said


def test_environments_do_not_get_faster_by_copies_of_the_model(tmp_path, monkeypatch):
    """A slow environment decides the time of an exploration, for one copy and for four."""
    monkeypatch.setattr(stage_costs, "generation_seconds", lambda *given: 1.0)
    slow, times = replace(SIXTEEN, seconds=100.0), []
    for engine in ({}, {"engine": VLLM | {"replicas": 4}}):
        given = recipe(tmp_path, **engine)
        stage = next(each for each in stages(given) if each.name.startswith("explore"))
        _, seconds, _ = dry_run._cost(given, stage, slow, Machine(SHAPE, "cpu", 4, 1e9, 1e9, 1.0))
        times.append(seconds)

    assert times[0] == times[1] > 1600


def test_the_handover_of_another_engine_is_named_without_a_setting(tmp_path, monkeypatch):
    """An engine that takes models may have no setting `handover`."""
    given = recipe(tmp_path)
    monkeypatch.setattr(
        overlap, "engine_settings", lambda recipe: SimpleNamespace(traits=SimpleNamespace(takes_models=True))
    )

    assert overlap.handover_of(given).startswith("from GPU to GPU, and writes the file too.")


def test_steps_are_timed_if_the_loop_is_simulated(place, monkeypatch):
    """Three of four played episodes, of two turns each; with recorded episodes only if staleness is set."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    words = [*GROUPS, "credit.name=rloo"]
    given = recipe_of(place, *words, "name=timed", "staleness=1")
    played = look_at_episodes(given, check(given), None)
    file = place / "runs/timed/trajectories/expert.jsonl"
    file.parent.mkdir(parents=True)
    write_records(file, [Trajectory(Task("t"), (Turn((), Action("a")),))])

    recorded = look_at_episodes(given, check(given), None)
    plain = recipe_of(place, *words, "name=timed")
    apart = look_at_episodes(plain, check(plain), None)

    assert [len(each.step_seconds) for each in (played, recorded, apart)] == [6, 6, 0]
    assert min(*played.step_seconds, *recorded.step_seconds) > 0
    assert (apart.seconds, recorded.seconds > 0) == (0.0, True)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({}, "to the engine through a file. This takes about 0 s"),
        (CLUSTER, "to the engine through a file, which Ray sends to the nodes. Writing and reading the file"),
        (
            {"engine": VLLM | {"handover": "ipc"}},
            "to the engine from GPU to GPU (engine.handover=ipc), and writes the file too. The transfer was never",
        ),
        ({"engine": SERVERS | {"handover": "nccl"}}, "from GPU to GPU (engine.handover=nccl)"),
        ({"engine": VLLM | {"handover": "disk"}}, "to the engine through a file. This takes"),
    ],
)
def test_the_way_of_the_weights_is_the_engines(sections, says, tmp_path):
    """Files, or from GPU to GPU. The transfer between GPUs was never measured, so it gets no time."""
    told = overlap.side_by_side(recipe(tmp_path, **sections), SHAPE)[-1]

    assert says in told
    assert told.startswith("Prediction: each iteration passes 0.004 GB of weights ")
