"""Tool calls and gold calls: similarity by hand, malformed calls, and groups of BFCL credited from the command line."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from perturn.cli import app
from perturn.config.recipe import read_recipe
from perturn.credit import CREDITS
from perturn.data.group_account import read_credits
from perturn.data.run_folder import Run, resolve_recipe
from perturn.data.store import TrajectoryStore, read_trajectories
from perturn.envs.named_protocols import PROTOCOLS
from perturn.episodes.episode import Job, episode
from perturn.episodes.replay import play_script
from perturn.episodes.tool_calls import (
    ToolAction,
    ToolCall,
    call_similarity,
    chat_call,
    read_action,
    write_action,
    write_text,
)
from perturn.errors import ConfigError, DataError, EngineFailure, EnvironmentFailure
from perturn.methods.matchtir.tool_matches import calls_of, check_gold_calls, gold_calls, match, matches_of
from perturn.run.execute import check
from perturn.run.session import world_maker
from perturn.run.stages.credit_stage import credit_run
from perturn.types import Action, Status, Task, Trajectory, Turn

from .online import GROUPS

HARD, SOFT = (CREDITS["matchtir"](assignment=each).needs[0] for each in ("hard", "soft"))
GREP = ToolCall("grep", {"file_name": "a.txt", "pattern": "x"})


@pytest.mark.parametrize(
    ("call", "gold", "similarity"),
    [
        (GREP, GREP, 1.0),  # (1 + 1 + 2) / 4
        (ToolCall("Grep", GREP.arguments), GREP, 0.0),
        (ToolCall("grep", {"file_name": "a.txt", "pattern": "y"}), GREP, 0.75),  # (1 + 1 + 1) / 4
        (ToolCall("grep", {"file_name": "a.txt"}), GREP, 0.625),  # (1 + 1/2 + 1) / 4
        (ToolCall("grep", {"file_name": "a.txt", "n": 2, "v": 3}), GREP, 0.5625),  # (1 + 1/4 + 1) / 4
        (ToolCall("grep"), GREP, 0.25),  # (1 + 0 + 0) / 4
        (ToolCall("ls"), ToolCall("ls"), 1.0),  # (1 + 1) / 2
        (ToolCall("ls", {"a": True}), ToolCall("ls"), 0.5),  # (1 + 0) / 2
        (ToolCall("f", {"n": 1.0, "of": [{"a": 1}]}), ToolCall("f", {"n": 1, "of": [{"a": 1}]}), 1.0),
        (ToolCall("f", {"n": "1"}), ToolCall("f", {"n": 1}), 2 / 3),  # (1 + 1 + 0) / 3
    ],
)
def test_hand_worked_similarity(call, gold, similarity):
    assert call_similarity(call, gold) == similarity


def turn_of(*calls, text="", **changes):
    return Turn((), Action(text, tool_calls=tuple(map(chat_call, calls))), **changes)


def test_calls_are_read_as_native_ones_or_as_written():
    """A message has none."""
    written = Turn((), Action(write_text(ToolAction("I look.", (GREP, ToolCall("ls"))))))

    assert calls_of(turn_of(GREP, ToolCall("ls"))) == calls_of(written) == [GREP, ToolCall("ls")]
    assert calls_of(turn_of(text="That is done.")) == []


@pytest.mark.parametrize(
    "action",
    [
        Action("<tool_call>\n{'name': 'grep'}\n</tool_call>"),
        Action("<tool_call>"),
        Action(""),
        Action("", tool_calls=({"name": "grep", "arguments": "a.txt"},)),
        Action("", tool_calls=({"name": None, "arguments": {}},)),
        Action("", tool_calls=({"function": None},)),
        Action("", tool_calls=({"name": "grep", "arguments": {"file_name": float("nan")}},)),
        Action("", tool_calls=({"name": "grep", "arguments": {1: {2}}},)),
    ],
    ids=str,
)
def test_a_malformed_action_is_one_call_that_matches_nothing(action):
    (found,) = calls_of(Turn((), action, valid=False))

    assert call_similarity(found, GREP) == 0.0
    assert calls_of(Turn((), action)) == [found]


def test_a_message_that_the_world_did_not_understand_is_one_too():
    assert len(calls_of(turn_of(text="[1] what?", valid=False))) == 1


def test_all_calls_of_an_episode_are_matched_with_all_gold_calls_whatever_their_order():
    """Two calls in a turn; the second ls finds its gold call taken; soft shares sum to at most 1."""
    played = Trajectory(
        Task("t"), (turn_of(ToolCall("ls"), GREP), turn_of(text="Done."), turn_of(ToolCall("ls")))
    )
    gold = [GREP, ToolCall("cd"), ToolCall("ls")]

    assert match(played, gold, HARD) == [[1.0, 1.0], [], [0.0]]
    soft = match(played, gold, SOFT)
    assert [len(turn) for turn in soft] == [2, 0, 1]
    assert 0.5 < sum(map(sum, soft)) <= 1.0
    assert soft[0][0] == pytest.approx(soft[2][0])
    assert match(replace(played, turns=()), gold, HARD) == []


class Silent:
    """A world whose expert says nothing, stops, or is not there."""

    name = "silent-1"

    def __init__(self, said):
        """Keep what the expert says."""
        self.said = said

    def expert(self, task):
        """Say it."""
        if isinstance(self.said, Exception):
            raise self.said
        return self.said


def test_gold_calls_are_those_of_the_expert():
    said = [write_action(ToolAction("", (GREP, ToolCall("ls")))), write_action(ToolAction("Done."))]

    assert gold_calls(Silent(said), Task("t")) == [GREP, ToolCall("ls")]


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        (
            [write_action(ToolAction("Done."))],
            DataError,
            r"task 't' has no gold calls, for the expert of silent-1 calls",
        ),
        (
            ["go north"],
            DataError,
            r"leave the task out, or take a credit that compares no calls, such as rloo",
        ),
        ([], DataError, "has no gold calls"),
        (KeyError("x"), EnvironmentFailure, r"the expert of silent-1 cannot solve task 't': KeyError"),
        (DataError("mine"), DataError, "^mine$"),
    ],
)
def test_a_task_without_gold_calls_is_refused(said, error, message):
    with pytest.raises(error, match=message):
        gold_calls(Silent(said), Task("t"))


def test_a_world_without_tools_is_refused(recipe):
    """The example's expert guesses numbers, and calls no tool."""
    settings = read_recipe(recipe, [])
    with pytest.raises(
        DataError, match=r"task 'guess/1' has no gold calls, for the expert of guess-number-1\.0"
    ):
        matches_of([Trajectory(Task("guess/1", data={"secret": 1}), ())], HARD, world_maker(settings)())


RECIPE = """
name: tools
output: {output}
model: {{name: "{model}", dtype: float32, chat_template: tools}}
environment: {{name: bfcl}}
protocol: {{name: bfcl-multi-turn}}
explore: {{tasks: {{split: train, n: 2}}, samples: 5}}
rows: {{name: groups}}
credit: {{name: matchtir}}
align: {{loss: {{name: ppo-clip}}}}
worlds: {{processes: 0}}
"""


@pytest.fixture
def bfcl(tmp_path, tiny_folder):
    """A recipe on BFCL."""
    pytest.importorskip("bfcl_eval", reason="bfcl-eval is not installed")
    file = tmp_path / "tools.yaml"
    file.write_text(RECIPE.format(output=tmp_path / "runs", model=tiny_folder))
    return file


def scripts(world, task):
    """The expert's actions; those with the first one again; messages alone; calls that are none; an answer at once."""
    gold = [read_action(action) for action in world.expert(task)]
    messages = [one for one in gold if not one.calls]
    expert, again, idle = (
        [Action(write_text(action)) for action in script] for script in (gold, [gold[0], *gold], messages)
    )
    return [expert, again, idle, [Action("<tool_call>{"), *idle], [Action("Well.")] * 2]


def record(world, task):
    """A group of five, the last of which fails after two turns."""
    protocol = PROTOCOLS["bfcl-multi-turn"]
    for sample, script in enumerate(scripts(world, task)):
        steps = episode(world, Job(task, 0, sample), protocol=protocol, policy="base")
        yield play_script(steps, script, EngineFailure("it fell silent."))


@pytest.fixture
def explored(bfcl):
    """A run that has explored two tasks of BFCL with scripted policies."""
    from perturn.envs.bfcl.environment import Bfcl

    settings = read_recipe(bfcl, [])
    world = Bfcl()
    with Run(settings) as run:
        file = run.paths.trajectories("explore")
        with run.stage("explore", file), TrajectoryStore(file) as store:
            for task in world.tasks("train")[:2]:
                for one in record(world, task):
                    store.append(one)
        return run.folder


@pytest.mark.parametrize("assignment", ["hard", "greedy", "soft"])
def test_recorded_groups_of_bfcl_are_credited_from_the_command_line(explored, assignment):
    """The expert is above the one who repeats his first calls, and that one above those who do nothing."""
    words = ["credit", str(explored), "credit.name=matchtir", f"credit.assignment={assignment}", "--json"]

    done = CliRunner().invoke(app, words)

    assert done.exit_code == 0, done.output
    (one,) = json.loads(done.stdout)["iterations"]
    rows = read_credits(explored / one["file"])
    episodes = list(read_trajectories(explored / "trajectories" / "explore.jsonl"))
    assert [one.status is Status.FAILED for one in episodes] == [False, False, False, False, True] * 2
    assert [one.success for one in episodes[::5]] == [True, True]
    assert not any(one.success for each in (2, 3, 4) for one in episodes[each::5])
    for task in {one.task.id for one in episodes}:
        weights = {row.sample: row.weight for row in rows if row.task == task}
        assert [len(weights[one.sample]) for one in episodes if one.task.id == task] == [
            len(one.turns) for one in episodes if one.task.id == task
        ]
        assert weights[0][0] > weights[1][0] > weights[2][0]
        assert weights[2][0] == pytest.approx(weights[3][0], abs=1e-9)


def test_the_matches_of_recorded_groups(explored):
    """The expert's calls match fully, each; repeated ones not at all; the malformed action is a call, messages none."""
    episodes = list(read_trajectories(explored / "trajectories" / "explore.jsonl"))[:5]
    expert, again, idle, malformed, failed = matches_of(
        episodes, HARD, world_maker(resolve_recipe(explored))()
    )

    assert all(call == 1.0 for turn in expert for call in turn)
    assert again[0] == expert[0]
    assert not any(again[1])
    assert sum(map(len, again)) == sum(map(len, expert)) + len(again[1])
    assert idle == [[]] * len(idle)
    assert malformed == [[0.0], *idle]
    assert failed == [[]] * 2


def test_the_stage_of_a_recipe_writes_the_same_weights(explored, bfcl):
    """`perturn credit RECIPE`, in the loop, and `perturn credit RUN`; no episode fits the tiny model."""
    done = CliRunner().invoke(app, ["credit", str(bfcl)])
    assert done.exit_code == 0, done.output

    credit_run(explored, ["credit.name=matchtir"], name="again")

    own, again = (read_credits(explored / "credits" / f"{name}.jsonl") for name in ("matchtir", "again"))
    assert [one.weight for one in own] == [one.weight for one in again]
    assert any(weight for one in own for weight in one.weight)


def test_a_recipe_is_checked_before_work(bfcl, recipe):
    """BFCL has an expert; a world without one is refused with the credit, and taken with another."""
    without = type("Mute", (), {"name": "mute-1"})()
    settings = read_recipe(bfcl, [])

    check(settings, "credit")
    with pytest.raises(
        ConfigError,
        match=r"matchtir compares tool calls with the calls of the environment's expert: environment mute-1 has no",
    ):
        check_gold_calls(without, [Task("t")], "matchtir")
    with pytest.raises(DataError, match="has no gold calls"):
        check(read_recipe(recipe, [*GROUPS, "credit={name: matchtir}"]))
    check(read_recipe(recipe, [*GROUPS, "credit={name: rloo}"]))


def test_a_failed_episode_asks_no_expert_and_matches_nothing(bfcl):
    """The world of its task may be what broke."""
    settings = read_recipe(bfcl, [])
    broken = Trajectory(Task("no such task"), (turn_of(GREP), turn_of()), status=Status.FAILED, error="broke")

    assert matches_of([broken], HARD, world_maker(settings)()) == [[[], []]]
