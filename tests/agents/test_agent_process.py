"""The process of an agent, watched from outside."""

import errno
import os
import threading
from types import SimpleNamespace

import pytest

from perturn.envs.agent import agent_process
from perturn.envs.agent.agent_bridge import Question
from perturn.envs.agent.agent_episode import Conversation, Limits, _reward, settle
from perturn.envs.agent.agent_launch import Command, function_of
from perturn.envs.agent.agent_process import AgentProcess
from perturn.envs.agent.agent_replay import Replay
from perturn.envs.load_environment import make_environment
from perturn.episodes.engine_abilities import EngineAbilities
from perturn.episodes.job import Job
from perturn.errors import EnvironmentFailure
from perturn.types import Action, Prompt, Task

from .playing import agents


def test_an_agent_that_leaves_a_writing_child_has_ended():
    """The child writes a line each 0.05 s, for longer than the test waits."""
    ended = threading.Event()
    program = "for i in $(seq 600); do echo line; sleep 0.05; done & echo '{\"reward\": 1.0}'"
    process = AgentProcess(Command(["sh", "-c", program]), {"id": "a"}, dict(os.environ), ended.set)
    noticed = ended.wait(15)
    process.kill()

    assert noticed
    assert (process.code, process.result()) == (0, {"reward": 1.0})


@pytest.mark.parametrize(("code", "expected"), [("True", 1), ("-1", 255), ("2**40 + 3", 3), ("'gone'", 1)])
def test_a_function_may_exit_with_any_code(tmp_path, code, expected):
    """As a program does: the code is a number of 8 bits, and a text is code 1."""
    (tmp_path / "exits.py").write_text(
        f"import sys\n\n\nasync def rollout(task, client):\n    sys.exit({code})\n"
    )
    ended = threading.Event()
    launch = function_of(f"{tmp_path}/exits.py:rollout")
    variables = {**os.environ, "PERTURN_SEED": "0", "OPENAI_API_KEY": "k"}
    process = AgentProcess(launch, {"id": "a"}, variables, ended.set)
    noticed = ended.wait(60)
    process.kill()

    assert noticed
    assert (process.code, process.ending().partition(";")[0]) == (
        expected,
        f"ended with exit code {expected}",
    )


def test_an_ending_names_each_signal_and_shows_no_passed_secret():
    """Python names no signal 35. The line is cut in the middle of the value."""
    ended = threading.Event()
    program = "printf '%190s%s' x $SHOP_KEY; kill -35 $$"
    variables = {**os.environ, "SHOP_KEY": "planted-9f8e7d6c5b4a"}
    process = AgentProcess(Command(["sh", "-c", program]), {"id": "a"}, variables, ended.set)
    noticed = ended.wait(60)
    process.kill()

    assert noticed
    assert process.ending().startswith("was killed by signal 35; it wrote: ")
    assert "planted" not in process.ending()


@pytest.mark.parametrize(
    ("prints", "turns", "expected"),
    [(True, None, {}), (True, 1, {"reward": 42.0}), (False, None, {"reward": 42.0})],
)
def test_a_printed_number_is_no_reward_if_the_episode_has_one(prints, turns, expected):
    """Its reward was posted, and so ended the session; posted rewards of turns are no reward of the episode."""
    process = SimpleNamespace(code=0, result=lambda: 42)
    held = SimpleNamespace(reached="", is_full=False, turns=1)
    line = SimpleNamespace(is_rewarded=lambda: True, turns=lambda: turns)

    found = settle(process, held, line, prints=prints)

    assert found == ({**expected, "success": None} if expected else {}) | {"truncated": False}


def test_an_agent_without_free_files_fails_with_a_remedy(monkeypatch):
    """The first file of a process is its task."""

    def refuse():
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(agent_process, "scratch_folder", refuse)

    with pytest.raises(EnvironmentFailure, match=r"open files; set explore\.concurrency to fewer"):
        AgentProcess(Command(["true"]), {"id": "a"}, {}, lambda: None)


@pytest.mark.parametrize("given", [True, {"reward": True}])
def test_a_boolean_is_no_reward(given):
    with pytest.raises(
        EnvironmentFailure, match=r"expected a number, got True \(bool\); write float\(True\)"
    ):
        _reward(given)


@pytest.mark.parametrize("name", ["NO_PROXY", "no_proxy"])
def test_hosts_without_a_proxy_stay_without_one(tmp_path, monkeypatch, name):
    """In the user's variable of either case; both get the endpoint's host too."""
    for each in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "intranet.example")
    world = make_environment(agents(tmp_path, [{"id": "a"}]))

    given = world._variables(SimpleNamespace(url="http://127.0.0.1:1/s", key="k"), 1)

    assert (given["NO_PROXY"], given["no_proxy"]) == ("intranet.example,127.0.0.1",) * 2


@pytest.mark.parametrize("is_rewarded", [True, False])
def test_a_returned_boolean_is_ignored_after_a_posted_reward(is_rewarded):
    """A function may return whether it ended well. Without another reward, the boolean was meant as one."""
    process = SimpleNamespace(code=0, result=lambda: True)
    held = SimpleNamespace(reached="", is_full=False, turns=1)
    line = SimpleNamespace(is_rewarded=lambda: is_rewarded, turns=lambda: 1)

    if is_rewarded:
        assert settle(process, held, line, prints=False) == {"truncated": False}
    else:
        with pytest.raises(EnvironmentFailure, match=r"write float\(True\)"):
            settle(process, held, line, prints=False)


@pytest.mark.parametrize("is_rewarded", [True, False])
def test_a_reward_that_is_no_number_is_named_unless_another_was_posted(is_rewarded):
    process = SimpleNamespace(code=0, result=lambda: {"reward": "good"}, ending=lambda: "ended")
    held = SimpleNamespace(reached="", is_full=False, turns=1)
    line = SimpleNamespace(is_rewarded=lambda: is_rewarded, turns=lambda: 1)

    if is_rewarded:
        assert settle(process, held, line, prints=True) == {"truncated": False}
    else:
        with pytest.raises(
            EnvironmentFailure, match=r"reward of the agent: expected a number, got 'good' \(str\); "
        ):
            settle(process, held, line, prints=True)


def test_a_conversation_that_is_sent_again_counts_as_a_turn():
    """Without a new message, all requests share the empty tuple; only a request for several answers is one."""
    held, job = Conversation(Limits(1, None, 60.0), EngineAbilities()), Job(Task("a"), 0)
    first, second = (Question(Prompt((), (), (), 0, "a#0")) for _ in range(2))
    for each in (first, second, None):
        held.asked.put(each)
    playing = held.hold(job, Replay(job), SimpleNamespace(turns=lambda: 1))
    next(playing)

    with pytest.raises(StopIteration):
        playing.send(Action("go"))
    assert (held.turns, first.answered.result()) == (1, Action("go"))
    assert "protocol.max_turns=1" in str(second.answered.exception())
