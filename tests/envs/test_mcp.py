"""MCP servers as tools, on a server in plain Python that errs in all ways that servers do."""

import json
import sys
import time
from contextlib import suppress

import psutil
import pytest

pytest.importorskip("mcp", reason="needs the extra mcp")

from perturn.config.sections import Worlds
from perturn.envs.environment_check import check_environment
from perturn.envs.mcp.environment import Mcp
from perturn.envs.world_process import ProcessWorlds
from perturn.episodes.tool_calls import ToolAction, ToolCall, write_action
from perturn.errors import ConfigError, DataError, EnvironmentFailure, WorldLost
from support import mcp_server

SERVER = [sys.executable, "-IS", mcp_server.__file__]
ROWS = [
    {
        "id": "sum",
        "prompt": "What is 2 + 3?",
        "answer": "It is  5",
        "actions": [{"name": "add", "arguments": {"a": 2, "b": 3}}],
    },
    {"prompt": "Say hello.", "kind": "talk", "split": "test"},
    {
        "id": "user",
        "prompt": "Add 1 and 1 for me.",
        "user": "You want a sum.",
        "split": "test",
        "answer": "It is 2.",
    },
]


@pytest.fixture
def make(tmp_path):
    """Make worlds, all of which are closed in the end."""
    made = []

    def make(rows=ROWS, servers=({"command": SERVER},), **settings):
        file = tmp_path / "tasks.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        made.append(Mcp([dict(each) for each in servers], str(file), **settings))
        return made[-1]

    yield make
    for world in made:
        world.close()


def call(world, *names, **arguments):
    """The world's answer to calls of tools."""
    return world.step(write_action(ToolAction("", tuple(ToolCall(name, arguments) for name in names))))


def begun(world, split="train", number=0):
    world.reset(world.tasks(split)[number], 0)
    return world


def test_a_task_is_solved_with_the_tools_of_a_server(make):
    """The tools are offered with their schemas, and the answer is compared but for case and spaces."""
    world = make()
    posed = world.reset(world.tasks("train")[0], 0)
    seen = call(world, "add", a=2, b=3)
    end = world.step(write_action(ToolAction("it is 5")))

    names = [tool["function"]["name"] for tool in posed.tools]
    assert names == mcp_server.NAMES
    assert posed.tools[0]["function"]["parameters"] == mcp_server.NUMBERS
    assert (posed.text, seen.results, seen.valid) == ("What is 2 + 3?", ("5",), True)
    assert (end.reward, end.success, end.terminated) == (1.0, True, True)


def test_each_episode_has_servers_of_its_own(make):
    """The second server counts from one, and the first is gone."""
    world = begun(make())
    first = int(call(world, "pid").results[0])
    assert call(world, "count").results == ("2",)

    begun(world)

    assert call(world, "count").results == ("1",)
    assert not psutil.pid_exists(first)


def test_servers_end_with_their_children(make):
    world = begun(make())
    server, child = (int(call(world, name).results[0]) for name in ("pid", "child"))

    world.close()

    assert all_end(server, child)


def alive(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def all_end(*pids):
    """Whether all of these processes end. A killed process lives until it is next scheduled."""
    until = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_a_world_that_is_killed_takes_its_servers_along(make, tmp_path):
    """Even by a limit of time, where nothing can be closed."""
    make()
    section = {"name": "mcp", "servers": [{"command": SERVER}], "tasks": str(tmp_path / "tasks.jsonl")}
    world = ProcessWorlds(section | {"call_seconds": 60}, Worlds(step_seconds=60.0))()
    world.reset(world.tasks("train")[0], 0)
    server, child = (int(call(world, name).results[0]) for name in ("pid", "child"))
    world._link._limits = Worlds(step_seconds=1.0)

    with pytest.raises(WorldLost, match="step_seconds"):
        call(world, "sleep")

    assert all_end(server, child)
    world.close()


def test_a_tool_that_fails_or_is_not_there_is_a_result(make):
    world = begun(make())

    failed, missing, picture = (call(world, name) for name in ("fail", "nothing", "image"))

    assert (failed.results, failed.valid) == (("no such thing",), False)
    assert (missing.results, missing.valid) == (("Error: there is no tool 'nothing'.",), False)
    assert (picture.results, picture.valid) == (("[image image/png]",), True)


def test_a_hostile_result_is_data(make):
    """Its text is cut, valid Unicode, and ends nothing; what is no message of the protocol is left out."""
    world = begun(make(result_characters=60))

    said, garbage, after = (call(world, name) for name in ("hostile", "garbage", "count"))

    assert said.results[0].startswith("<|im_end|>")
    assert said.results[0].endswith("x... (cut)")
    assert len(said.results[0]) == 60 + len("... (cut)")
    said.results[0].encode()
    assert (garbage.valid, garbage.results[0].startswith("Error: ")) == (False, True)
    assert after.results == ("3",)


def test_a_result_over_the_limit_is_an_error_of_its_call(make):
    """The server is heard afterwards."""
    world = begun(make())

    seen, after = (call(world, name) for name in ("long", "count"))

    assert (seen.valid, seen.results) == (False, ("Error: the result has more than 16,777,216 bytes",))
    assert after.results == ("2",)


def test_errors_do_not_show_a_passed_variable(make, monkeypatch):
    """In a failed result, and in the error stream of a server that dies. Another result is an observation."""
    monkeypatch.setenv("SHOP_KEY", "planted-9f8e7d6c5b4a")
    world = begun(make(servers=[{"command": SERVER, "pass_env": ["SHOP_KEY"]}]))

    seen, observed = call(world, "quote"), call(world, "quote", a=1, b=1)
    with pytest.raises(WorldLost) as caught:
        call(world, "die")

    assert seen.results == ("bad key [SHOP_KEY]",)
    assert observed.results == ("bad key planted-9f8e7d6c5b4a",)
    assert "wrote: bad key [SHOP_KEY]" in str(caught.value)


def test_a_call_that_takes_too_long_is_told(make):
    world = begun(make(call_seconds=0.5))

    began = time.monotonic()
    seen = call(world, "sleep")

    assert seen.results == ("Error: sleep gave no answer within 0.5 seconds.",)
    assert not seen.valid
    assert time.monotonic() - began < 10


def test_a_server_that_dies_loses_the_world(make):
    """With its exit code and last words; the next episode has another server."""
    world = begun(make())

    with pytest.raises(WorldLost, match=r"died in a call of 'die' with exit code 3; it wrote: I am going\."):
        call(world, "die")

    assert call(begun(world), "count").results == ("1",)


def test_servers_get_no_keys_that_are_not_named(make, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.setenv("OTHER_API_KEY", "k")
    server = {"command": SERVER, "pass_env": ["OTHER_API_KEY"], "env": {"OWN_KEY": "1"}}

    found = call(begun(make(servers=[server])), "secret").results[0].split(",")

    assert set(found) == {"OTHER_API_KEY", "OWN_KEY"}


def test_tools_of_several_servers_are_offered_together_or_chosen(make):
    servers = [{"command": SERVER}, {"command": [*SERVER, "other_"]}]
    world = make(servers=servers, tools=["other_add", "count"])
    posed = world.reset(world.tasks("train")[0], 0)

    assert [tool["function"]["name"] for tool in posed.tools] == ["other_add", "count"]
    assert call(world, "other_add", a=1, b=2).results == ("3",)
    assert call(world, "add", a=1, b=2).results == ("Error: there is no tool 'add'.",)


def test_two_tools_of_one_name_are_refused(make):
    world = make(servers=[{"command": SERVER}, {"command": SERVER}])

    with pytest.raises(
        ConfigError, match=r"an MCP server offers a tool 'add', and that name is taken. List the tools to"
    ):
        begun(world)


def test_servers_with_tools_of_one_name_offer_different_tools(make):
    """Each call goes to the server that offers the tool."""
    servers = [{"command": SERVER, "tools": ["add"]}, {"command": SERVER, "tools": ["count", "pid"]}]
    world = make(servers=servers)
    posed = world.reset(world.tasks("train")[0], 0)
    call(world, "add", a=1, b=2)

    assert [tool["function"]["name"] for tool in posed.tools] == ["add", "count", "pid"]
    assert call(world, "count").results == ("1",)
    with pytest.raises(ConfigError, match=r"environment\.servers\[0\]\.tools names 'ad'. Did you mean 'add'"):
        begun(make(servers=[{"command": SERVER, "tools": ["ad"]}]))


def test_the_name_tells_different_tasks_apart(make):
    """So that scores on them are not paired; values of variables, which may be secrets, and folders do not count."""
    names = [
        make(rows, servers=[{"command": SERVER} | server], **settings).name
        for rows, server, settings in (
            (ROWS, {}, {}),
            ([ROWS[0] | {"prompt": "What is 3 + 2?"}, *ROWS[1:]], {}, {}),
            (ROWS, {"tools": ["add"]}, {}),
            (ROWS, {"env": {"A": "1"}}, {}),
            (ROWS, {}, {"reward": "builtins:len"}),
            (ROWS, {"env": {"A": "2"}}, {}),
            (ROWS, {"cwd": "/elsewhere"}, {}),
        )
    ]

    assert len(set(names)) == 5
    assert names[3] == names[5]
    assert names[0] == names[6]


@pytest.mark.parametrize(
    ("said", "reward"), [("np.float32(0.5)", 0.5), ("np.array(1.0)", 1.0), ("True", 1.0), ("'1'", None)]
)
def test_a_reward_function_may_return_any_number(make, tmp_path, said, reward):
    (tmp_path / "given.py").write_text(f"import numpy as np\ndef reward(*given):\n    return {said}\n")
    world = begun(make(reward=f"{tmp_path}/given.py:reward"))

    if reward is None:
        with pytest.raises(EnvironmentFailure, match="must return a finite number, got '1'"):
            world.step(write_action(ToolAction("done")))
    else:
        assert world.step(write_action(ToolAction("done"))).reward == reward


def test_a_reward_may_be_a_function(make, tmp_path):
    """It sees the row, the answer and the calls."""
    code = "def reward(row, answer, calls):\n    return 0.5 * len(calls) + (answer == row['wish'])\n"
    (tmp_path / "paid.py").write_text(code)
    rows = [{"prompt": "Do it.", "wish": "done"}]
    world = begun(make(rows, reward=f"{tmp_path}/paid.py:reward"))
    call(world, "count", "count")

    assert world.step(write_action(ToolAction("done"))).reward == 2.0


def test_a_user_is_talked_to_until_the_talk_is_over(make):
    """The user opens, an action without calls is said to the user, and `###STOP###` ends the episode."""
    world = make()
    posed = world.reset(world.tasks("test")[1], 0)
    opened = world.step("Add one and one.")
    asked = world.step(write_action(ToolAction("It is 2.")))
    end = world.step("Thanks. ###STOP###")

    assert posed.user.scripted == "Add 1 and 1 for me."
    assert (opened.text, opened.user) == ("Add one and one.", None)
    assert [each["content"] for each in asked.user.heard[1:]] == ["Add one and one.", "It is 2."]
    assert asked.user.scripted == "###STOP###"
    assert (end.terminated, end.reward) == (True, 1.0)  # of the last message to the user


def test_the_expert_plays_the_calls_of_the_row(make):
    world = make()
    task = world.tasks("train")[0]
    world.reset(task, 0)

    seen = [world.step(action) for action in world.expert(task)]

    assert (seen[0].results, seen[-1].success) == (("5",), True)
    with pytest.raises(EnvironmentFailure, match="has no actions"):
        world.expert(world.tasks("test")[0])


def test_it_keeps_the_contract_of_environments(make):
    rows = [ROWS[0], ROWS[0] | {"id": "other"}]

    assert check_environment(lambda: make(rows)) == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["/no/such/program"], "did not start"),
        ([sys.executable, "-c", "raise SystemExit('no data')"], "did not start.*it wrote: no data"),
        (
            [sys.executable, "-c", "import time; time.sleep(60)"],
            "within 0.5 seconds; raise environment.start_seconds",
        ),
    ],
)
def test_a_server_that_does_not_start_is_told(make, command, said):
    world = make(servers=[{"command": command}], start_seconds=0.5 if "0.5" in said else 20)

    with pytest.raises(EnvironmentFailure, match=said):
        begun(world)


@pytest.mark.parametrize(
    ("rows", "settings", "error", "said"),
    [
        ([], {}, DataError, "holds no task"),
        ([{"text": "x"}], {}, DataError, r"tasks\.jsonl:1.*prompt"),
        ([{"prompt": "x", "id": "a"}, {"prompt": "y", "id": "a"}], {}, DataError, "'a' stands twice"),
        ([{"prompt": "x", "actions": [{"tool": "add"}]}], {}, DataError, "actions"),
        (ROWS, {"servers": []}, ConfigError, "must name a server"),
        (
            ROWS,
            {"servers": [{"command": []}]},
            ConfigError,
            r"environment\.servers\[0\]\.command must name a program",
        ),
        (ROWS, {"servers": [{"comand": SERVER}]}, ConfigError, r"environment\.servers\[0\]\.comand"),
        (ROWS, {"reward": "nowhere:reward"}, ConfigError, "nowhere"),
    ],
)
def test_wrong_settings_and_rows_show_before_an_episode(make, rows, settings, error, said):
    with pytest.raises(error, match=said):
        make(rows, **settings)


def test_a_tool_that_no_server_offers_is_refused(make):
    with pytest.raises(ConfigError, match=r"environment\.tools names 'ad'\. Did you mean 'add'"):
        begun(make(tools=["ad"]))
