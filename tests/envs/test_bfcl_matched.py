"""BFCL's reward f1 and its restriction to classes."""

import random

import pytest

from perturn.config.sections import Tasks
from perturn.envs.bfcl.data import Matched
from perturn.envs.named_protocols import PROTOCOLS
from perturn.episodes.episode import Job
from perturn.episodes.tool_calls import ToolAction, ToolCall, read_action, write_action, write_text
from perturn.errors import ConfigError, DataError
from perturn.methods.matchtir.matchtir_credit import ToolMatches
from perturn.methods.matchtir.tool_matches import gold_calls, match
from perturn.run.stages.collect_stage import demonstrate
from perturn.run.task_lists import choose_tasks
from perturn.types import Action, Trajectory, Turn

pytest.importorskip(
    "bfcl_eval", reason="bfcl-eval is not installed: pip install --no-deps bfcl-eval==2026.3.23"
)
bfcl = pytest.importorskip("perturn.envs.bfcl.environment")

GOLD = [ToolCall("cd", {"folder": "a"}), ToolCall("ls")]


@pytest.fixture(scope="module")
def world():
    return bfcl.Bfcl(reward="f1")


def test_hand_worked_f1():
    """Gold cd(a), ls. An ls: 2 / 3. A cd elsewhere, 2 of 3 alike: 2 (5/3) / 4 = 5/6. A second ls: 2 (5/3) / 5 = 2/3.

    An exact cd takes the place of the other: 2 * 2 / 6 = 2/3.
    """
    matched = Matched(GOLD)

    rises = [
        matched.add(calls)
        for calls in (
            [ToolCall("ls")],
            [],
            [ToolCall("cd", {"folder": "b"})],
            [ToolCall("ls")],
            [ToolCall("cd", {"folder": "a"})],
        )
    ]

    assert rises == pytest.approx([2 / 3, 0, 1 / 6, -1 / 6, 0], abs=1e-12)
    assert matched.f1 == pytest.approx(2 / 3, abs=1e-12)
    assert Matched(GOLD).add([ToolCall("ls"), GOLD[0]]) == 1.0


def test_f1_pays_the_expert_one_and_its_rises_sum_to_it(world):
    """Each gold call raises F1; a message does nothing to it; success is BFCL's."""
    for task in world.tasks("all")[::10]:
        played = demonstrate(world, Job(task, 0), PROTOCOLS["bfcl-multi-turn"])

        assert (played.success, played.total_reward) == (True, pytest.approx(1.0, abs=1e-12))
        assert [turn.reward > 0 for turn in played.turns] == [
            bool(read_action(one).calls) for one in world.expert(task)
        ]


def test_f1_is_that_of_the_matches_which_the_credit_reads(world):
    """Gold calls shuffled, left out and doubled, wherever that stops: 2 S / (P + G)."""
    draw = random.Random(0)
    for task in world.tasks("all")[::10]:
        gold = gold_calls(world, task)
        said = draw.choices(world.expert(task), k=8)
        world.reset(task)
        total, turns = 0.0, []
        for action in said:
            seen = world.step(action)
            total += seen.reward
            turns.append(Turn((), Action(write_text(read_action(action))), valid=seen.valid))
            if seen.terminated:
                break
        matches = match(Trajectory(task, tuple(turns)), gold, ToolMatches())
        sums, calls = sum(map(sum, matches)), sum(map(len, matches))

        assert total == pytest.approx(2 * sums / (calls + len(gold)), abs=1e-9)


def test_a_malformed_action_is_no_call(world):
    """One of G gold calls, then an action that is none: 2 / (1 + G), as without it."""
    task = world.tasks("all")[0]
    gold = gold_calls(world, task)
    world.reset(task)

    first = world.step(write_action(ToolAction("", (gold[0],)))).reward
    second = world.step("no action")

    assert first == pytest.approx(2 / (1 + len(gold)), abs=1e-12)
    assert (second.reward, second.valid) == (0.0, False)


def test_a_new_episode_begins_at_zero(world):
    task = world.tasks("all")[0]
    gold = write_action(ToolAction("", (gold_calls(world, task)[0],)))
    rises = []
    for _ in range(2):
        world.reset(task)
        rises.append(world.step(gold).reward)

    assert rises[0] == rises[1] > 0


def test_scores_of_the_two_rewards_have_names_of_their_own(world):
    plain = bfcl.Bfcl()
    task = plain.tasks("all")[0]
    plain.reset(task)

    assert (world.name.startswith("bfcl-multi-turn-2-base-f1-"), "f1" in plain.name) == (True, False)
    assert plain.step(plain.expert(task)[0]).reward == 0.0


def test_f1_refuses_tasks_without_gold_calls(monkeypatch):
    """The default reward takes them."""
    entry = next(iter(bfcl.Bfcl()._entries.values()))
    without = {"t": type("Entry", (), {**vars(entry), "id": "t", "gold": ((), ())})()}
    monkeypatch.setattr(bfcl, "read_entries", lambda folder, category: without)

    bfcl.Bfcl()
    with pytest.raises(
        DataError, match=r"task 't' has no gold calls; leave it out, or set environment\.reward="
    ):
        bfcl.Bfcl(reward="f1")


def test_classes_leave_out_tasks_that_involve_another():
    """20 tasks of TradingBot alone, 6 of them in test; with MathAPI also the five that involve both."""
    one, both = bfcl.Bfcl(classes=("TradingBot",)), bfcl.Bfcl(classes=("MathAPI", "TradingBot"))
    every = bfcl.Bfcl()

    assert [len(one.tasks(split)) for split in ("all", "train", "test")] == [20, 14, 6]
    assert len(both.tasks("all")) == 25
    assert {task.id for task in both.tasks("all")} == {
        task.id
        for task in every.tasks("all")
        if {"MathAPI", "TradingBot"}.issuperset(every._entries[task.id].classes)
    }
    assert {task.id for task in one.tasks("test")} <= {task.id for task in every.tasks("test")}
    assert {task.kind for task in one.tasks("all")} == {"TradingBot"}
    assert every.name == one.name


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"classes": ["Tradingbot"]},
            r"Unknown class 'Tradingbot' of bfcl\. Did you mean 'TradingBot'\? Known: Gor",
        ),
        ({"classes": [1]}, r"classes must be a list of names, got \[1\]\."),
        ({"classes": None}, r"classes must be a list of names, got None\."),
        ({"classes": {"MathAPI": True}}, r"classes must be a list of names, got \{'MathAPI'"),
        (
            {"classes": "MathAPI"},
            r"classes must be a list of names, got 'MathAPI'. Write \[MathAPI\]\.",
        ),
        ({"reward": "f2"}, r"Unknown reward 'f2' of bfcl\. Did you mean 'f1'\? Known: f1, success"),
    ],
)
def test_bad_settings_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        bfcl.Bfcl(**settings)


def test_a_split_without_tasks_says_what_to_do():
    """MathAPI is never alone."""
    with pytest.raises(
        ConfigError,
        match=r"split 'test' of bfcl-.* must have a task, got \[\]\. Take another split, or other",
    ):
        choose_tasks(bfcl.Bfcl(classes=["MathAPI"]), Tasks("test"))
