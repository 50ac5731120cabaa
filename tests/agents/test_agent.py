"""Environment `agent`: programs of others play episodes; each ends in one bin, whatever its program does."""

import os
import random
import re
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace

import psutil
import pytest

import perturn
from envs.in_processes import assert_ends
from perturn.envs.agent.agent_episode import _reward
from perturn.envs.load_environment import make_environment
from perturn.envs.named_protocols import PROTOCOLS
from perturn.episodes.engine_abilities import EngineAbilities
from perturn.episodes.seeds import make_jobs
from perturn.errors import ConfigError, ContextFull, DataError, EngineFailure, EnvironmentFailure, RunError
from perturn.faults import closing_world
from perturn.serve import Endpoint
from perturn.types import OPENS, Action, Status

from .playing import FUNCTION, HERE, SHAKY, Scripted, agents, played

ERRORS = {
    "crash": "the agent ended with exit code 1; it wrote: .*RuntimeError: a bug in the agent",
    "killed": "the agent was killed by SIGKILL",
    "memory": "MemoryError",
    "silent": "ended without a request to the policy; let it send its requests to \\$OPENAI_BASE_URL",
    "no reward": "the agent gave no reward; print a JSON line",
    "tells its key": "RuntimeError: the key is KEY\\.",
    "huge": "expected a number of at most 1e100, got a larger one",
    "nan": "expected a number of at most 1e100, got nan",
}


LIMITS = (1.0, 4.0, 16.0)
"""Seconds that an episode may take, tried until an agent has begun within them; a busy machine needs longer."""


def test_each_program_ends_as_it_behaves(tmp_path):
    """Bad ones are FAILED and say why; the others play on, and their rewards are on the last turn."""
    rows = [
        {"id": bad or "well", "bad": bad} for bad in ("", "edit", "garbage", "posts", "posts zero", *ERRORS)
    ]

    found = {key[0]: one for key, one in played(agents(tmp_path, rows, memory_gigabytes=1.0)).items()}

    assert len(found) == len(rows)
    for bad, said in ERRORS.items():
        assert found[bad].status is Status.FAILED
        assert re.search(said, found[bad].error), found[bad].error
    assert {name: one.total_reward for name, one in found.items() if name not in ERRORS} == {
        "well": 1.0, "edit": 1.0, "garbage": 1.0, "posts": 0.5, "posts zero": 0.0,
    }  # fmt: skip
    well = found["well"]
    assert [turn.reward for turn in well.turns] == [0.0, 0.0, 1.0]
    assert (well.success, well.terminated, well.truncated) == (True, True, False)
    assert (well.policy, well.environment, well.protocol) == ("scripted", "agent-shaky_agent", "agent-plain")
    assert well.prompt == ({"role": "system", "content": "Play."},)
    assert [turn.follows for turn in found["edit"].turns] == [None, OPENS, None]


@pytest.mark.parametrize("given", ["false", "", 2, {}])
def test_a_success_that_is_neither_true_nor_false_is_no_success(given):
    assert _reward({"reward": 1.0, "success": True}) == {"reward": 1.0, "success": True}
    assert _reward({"reward": 1.0}) == {"reward": 1.0, "success": None}
    assert _reward({"success": given, "failed": 2}) == {}  # a log without a reward
    with pytest.raises(EnvironmentFailure, match="success of the agent: expected true or false"):
        _reward({"reward": 1.0, "success": given})


def test_a_program_that_hangs_is_killed_with_all_that_it_started(tmp_path):
    """Also a child in a session of its own."""
    pids = tmp_path / "pids"

    for seconds in LIMITS:
        row = {"id": "h", "bad": "hang", "pids": str(pids)}
        (one,) = played(agents(tmp_path, [row], seconds=seconds)).values()
        if one.turns and pids.exists():
            break

    assert f"it worked for environment.seconds={seconds:g} and had not ended" in one.error
    assert len(one.turns) == 1
    assert_ends(*map(int, pids.read_text().split()))


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="processes are found by /proc")
def test_what_a_program_leaves_behind_is_killed(tmp_path):
    """A child of a child in a session of its own, whose parent has ended before the program did."""
    pids = tmp_path / "pids"

    (one,) = played(agents(tmp_path, [{"id": "l", "bad": "leaves", "pids": str(pids)}])).values()

    assert (one.error, one.total_reward) == (None, 1.0)
    time.sleep(0.2)
    left = [psutil.Process(int(pid)) for pid in pids.read_text().split() if psutil.pid_exists(int(pid))]
    assert [each for each in left if each.status() != psutil.STATUS_ZOMBIE] == []


def test_the_policy_s_time_is_not_the_agent_s(tmp_path):
    """The three answers take longer than the episode may."""

    def slowly(prompt):
        time.sleep(0.6 * seconds)
        return Action("go")

    for seconds in LIMITS:
        (one,) = played(agents(tmp_path, [{"id": "a"}], seconds=seconds), Scripted(slowly)).values()
        if not one.error:
            break

    assert (one.error, len(one.turns)) == (None, 3)


@pytest.mark.parametrize(
    ("settings", "turns"), [({}, 2), ({"tokens": 3}, 2), ({"tokens": 2}, 1)], ids=["turns", "tokens", "one"]
)
def test_a_limit_truncates_an_episode(tmp_path, settings, turns):
    """Two answers are allowed, or three tokens, of which each answer has two; the agent stops when it is refused."""
    section = agents(tmp_path, [{"id": "a"}], **settings)

    (one,) = played(section, protocol=replace(PROTOCOLS["agent"], max_turns=2)).values()

    assert (one.status, one.truncated, one.terminated) == (Status.COMPLETED, True, False)
    assert (len(one.turns), one.total_reward, one.error) == (turns, 1.0, None)


def test_an_agent_hears_that_the_context_is_full(tmp_path):
    """It stops at its second request, and its episode is truncated."""

    def full(prompt):
        return ContextFull("no room") if prompt.turns else Action("go")

    (one,) = played(agents(tmp_path, [{"id": "a"}]), Scripted(full)).values()

    assert (one.status, one.truncated, one.error, len(one.turns)) == (
        Status.COMPLETED,
        True,
        "ContextFull: no room",
        1,
    )


def test_an_engine_that_fails_fails_the_episode(tmp_path):
    """As in episodes of any environment."""

    def fail(prompt):
        return EngineFailure("no answer") if prompt.turns else Action("go")

    (one,) = played(agents(tmp_path, [{"id": "a"}]), Scripted(fail)).values()

    assert (one.status, one.error, len(one.turns)) == (Status.FAILED, "EngineFailure: no answer", 1)


def test_prompts_are_those_of_a_built_in_episode(tmp_path):
    """Seeds by turn, one conversation of the engine, and the turns with the ids that were sampled."""
    policy = Scripted()

    (one,) = played(agents(tmp_path, [{"id": "a"}]), policy).values()

    assert [prompt.seed for prompt in policy.prompts] == [one.seed * 1_000_003 + turn for turn in range(3)]
    assert {prompt.conversation for prompt in policy.prompts} == {"a#0"}
    assert [turn.action.token_ids for turn in policy.prompts[2].turns] == [(1, 2), (1, 2)]
    assert [message["content"] for message in policy.prompts[2].observation] == ["turn 1"]


def test_functions_are_agents_too(tmp_path):
    """Each in its own process; requests at the same time are two turns, and sys.exit() without a code is success."""
    rows = [{"id": bad or "well", "bad": bad} for bad in ("", "crash", "exit", "leaves early")]
    rows += [{"id": "both", "at_once": 2}]

    found = {key[0]: one for key, one in played(agents(tmp_path, rows, function=FUNCTION)).items()}

    assert {name for name, one in found.items() if one.error} == {"crash", "exit"}
    assert re.search("exit code 1; it wrote: .*RuntimeError: a bug in the agent", found["crash"].error)
    assert re.search("exit code 1; it wrote: gave up", found["exit"].error)
    assert [found[name].total_reward for name in ("well", "leaves early")] == [0.25, 0.5]
    assert [turn.follows for turn in found["both"].turns] == [None, OPENS]


def test_an_agent_hears_how_many_tokens_it_sent(tmp_path):
    """The engine counts 7 tokens of each prompt; the agent gives the number back as its reward."""

    class Counting(Scripted):
        abilities = EngineAbilities(prompt_tokens={"t#0": 7})

    (one,) = played(agents(tmp_path, [{"id": "t", "bad": "counts"}], function=FUNCTION), Counting()).values()

    assert (one.error, one.total_reward) == (None, 7.0)


def test_a_function_that_hangs_is_killed(tmp_path):
    """As a program is."""
    for seconds in LIMITS:
        section = agents(tmp_path, [{"id": "h", "bad": "hang"}], function=FUNCTION, seconds=seconds)
        (one,) = played(section).values()
        if one.turns:
            break

    assert f"it worked for environment.seconds={seconds:g} and had not ended" in one.error
    assert len(one.turns) == 1


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="processes are found by /proc")
@pytest.mark.parametrize("bad", ["leaves", "leaves and hangs"])
def test_what_a_function_leaves_behind_is_killed(bad, tmp_path):
    """A fork of a fork in a session of its own; neither its environment nor its parent tells whose it is."""
    pids = tmp_path / "pids"

    for seconds in LIMITS:
        row = {"id": "l", "bad": bad, "pids": str(pids)}
        (one,) = played(agents(tmp_path, [row], function=FUNCTION, seconds=seconds)).values()
        if pids.exists() and (one.error is None) == (bad == "leaves"):  # else the limit was too short
            break

    assert (one.error is None) == (bad == "leaves")
    assert_ends(*map(int, pids.read_text().split()))


def test_a_function_must_be_async(tmp_path):
    """The episode says so."""
    section = agents(tmp_path, [{"id": "a"}], function=FUNCTION.replace("rollout", "not_async"))

    (one,) = played(section).values()

    assert "must be `async def rollout(task, client)`" in one.error


def test_what_an_agent_gets(tmp_path):
    """Address and key of its session, the task in a file too, and no secret of ours but those that are passed."""
    code = (
        "import json, os, urllib.request as u\n"
        "task = json.load(open(os.environ['PERTURN_TASK']))\n"
        "env = os.environ; url = env['PERTURN_SESSION']\n"
        "assert url + '/v1' == env['OPENAI_BASE_URL'] == env['OPENAI_API_BASE']\n"
        "assert {url} == {env['ANTHROPIC_' + name] for name in ('BASE_URL', 'API_URL', 'API_BASE')}\n"
        "said = *map(env.get, ('MY_API_KEY', 'OTHER_API_KEY', 'CLAUDE_CODE_ATTRIBUTION_HEADER')), sorted(task)\n"
        "body = {'model': 'policy', 'messages': [{'role': 'user', 'content': repr(said)}]}\n"
        "auth = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'Content-Type': 'application/json'}\n"
        "u.urlopen(u.Request(url + '/v1/chat/completions', json.dumps(body).encode(), auth)).read()\n"
        "print('thanks'); print(0.5); print('bye')\n"
    )
    (tmp_path / "curious.py").write_text(code)
    section = agents(
        tmp_path,
        [{"id": "a", "kind": "k"}],
        command=["python", str(tmp_path / "curious.py")],
        pass_env=["MY_API_KEY"],
    )

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MY_API_KEY", "mine")
        patched.setenv("OTHER_API_KEY", "not yours")
        (one,) = played(section).values()

    assert one.error is None
    assert one.turns[0].observation_text == "('mine', None, '0', ['id', 'kind', 'seed', 'split'])"
    assert (one.total_reward, one.task.kind) == (0.5, "k")


def test_tasks_come_from_files_splits_and_functions(tmp_path):
    """Rows of one file are of the split that they say."""
    rows = [{"q": 1}, {"id": "t", "split": "test", "answer": "x"}, {"q": 2}]
    one = make_environment(agents(tmp_path, rows))
    (tmp_path / "made_rows.py").write_text("def rows(split):\n    return [{'id': split}]\n")
    several = make_environment(
        {"name": "agent", "command": SHAKY, "tasks": {"train": f"{tmp_path}/made_rows.py:rows"}}
    )

    assert [task.id for task in one.tasks("train")] == ["train/00000", "train/00002"]
    assert [(task.id, task.split, task.data["answer"]) for task in one.tasks("test")] == [("t", "test", "x")]
    assert [task.id for task in several.tasks("train")] == ["train"]
    with pytest.raises(ConfigError, match="must have a task of split 'dev'"):
        one.tasks("dev")
    with pytest.raises(ConfigError, match="no split 'test'"):
        several.tasks("test")
    with pytest.raises(DataError, match="cannot be read"):
        make_environment({"name": "agent", "command": SHAKY, "tasks": str(tmp_path / "none.jsonl")}).tasks(
            "train"
        )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"command": SHAKY, "function": FUNCTION},
            r"must have one of command, function and adapter, got \['command', 'function'\]",
        ),
        ({}, r"environment must have one of command, function and adapter, got \[\]"),
        (
            {"command": ["no-such-program"]},
            "program 'no-such-program' is missing, and environment.command names it",
        ),
        ({"command": "python agent.py"}, "environment.command must be a"),
        ({"function": f"{HERE / 'shaky_functions.py'}:gone"}, "cannot be loaded"),
        ({"command": SHAKY, "seconds": 0}, "must be > 0"),
        (
            {"command": SHAKY, "expert": {"base_url": "http://x"}},
            "environment.expert.model must be the name of a model at its server, got None",
        ),
    ],
)
def test_wrong_settings_are_refused(settings, said):
    """Before any work."""
    with pytest.raises(ConfigError, match=said):
        make_environment({"name": "agent", "tasks": "t.jsonl", **settings})


def test_an_agent_is_not_told_what_a_protocol_says(tmp_path):
    """Its program writes its own prompts."""
    with pytest.raises(RunError, match="an agent writes its own prompts"):
        played(agents(tmp_path, [{"id": "a"}]), protocol=replace(PROTOCOLS["agent"], system="Play well."))


def test_the_expert_is_a_stronger_model_that_answers_the_same_program(tmp_path, monkeypatch):
    """It is behind an API; its actions are texts, and an episode that crashes has FAILED."""
    rows = [{"id": "a"}, {"id": "b", "bad": "crash"}]
    with Endpoint(Scripted(lambda prompt: Action(f"well {len(prompt.turns)}"))) as endpoint:
        monkeypatch.setenv("EXPERT_API_KEY", endpoint.key)
        expert = {"model": "strong", "base_url": endpoint.url(), "api_key_env": "EXPERT_API_KEY"}

        a, b = perturn.collect("expert", agents(tmp_path, rows, expert=expert))

    assert [turn.action.text for turn in a.turns] == ["well 0", "well 1", "well 2"]
    assert (a.policy, a.total_reward, a.error) == ("expert", 1.0, None)
    assert {turn.action.token_ids for turn in a.turns} == {None}
    assert b.status is Status.FAILED


def test_what_an_expert_was_paid_for_is_kept(tmp_path, monkeypatch):
    """Two worlds at once share a ledger; a world of a later process asks for none of the three answers again."""
    policy = Scripted(lambda prompt: Action("well"))
    with Endpoint(policy) as endpoint:
        monkeypatch.setenv("EXPERT_API_KEY", endpoint.key)
        expert = {"model": "strong", "base_url": endpoint.url(), "api_key_env": "EXPERT_API_KEY"}
        section, found = agents(tmp_path, [{"id": "a"}], expert=expert), []
        for worlds in (2, 1):
            with ExitStack() as stack:
                made = [stack.enter_context(closing_world(make_environment(section))) for _ in range(worlds)]
                (job,) = make_jobs(made[0].tasks("train"), 0, 1)
                found += [each.show(job, PROTOCOLS["agent"], tmp_path / "expert") for each in made]

    assert [len(one.turns) for one in found] == [3, 3, 3]
    assert len(policy.prompts) == 3
    assert len((tmp_path / "expert" / "api.jsonl").read_text().splitlines()) == 3


def test_the_limit_of_tokens_holds_for_an_expert_and_for_answers_that_were_kept(tmp_path, monkeypatch):
    """Each answer has two tokens. The second world asks for no answer again, and ends at the same turn."""
    policy, found = Scripted(), []
    with Endpoint(policy) as endpoint:
        monkeypatch.setenv("EXPERT_API_KEY", endpoint.key)
        expert = {"model": "strong", "base_url": endpoint.url(), "api_key_env": "EXPERT_API_KEY"}
        section = agents(tmp_path, [{"id": "a"}], expert=expert, tokens=3)
        for _ in range(2):
            with closing_world(make_environment(section)) as world:
                (job,) = make_jobs(world.tasks("train"), 0, 1)
                found.append(world.show(job, PROTOCOLS["agent"], tmp_path / "expert"))

    assert [(len(one.turns), one.truncated) for one in found] == [(2, True), (2, True)]
    assert len(policy.prompts) == 2


def test_an_agent_without_an_expert_has_none(tmp_path):
    """As any environment without one."""
    with pytest.raises(ConfigError, match="agent-shaky_agent has no expert; give a model"):
        perturn.collect("expert", agents(tmp_path, [{"id": "a"}]))


def shaky(count):
    """Rows of which 10 % crash, 5 % hang, 5 % edit their history and 2 % send garbage."""
    kinds = ["crash"] * 10 + ["hang"] * 5 + ["edit"] * 5 + ["garbage"] * 2 + [""] * 78
    random.Random(0).shuffle(kinds)
    return [{"id": f"t{n}", "bad": kinds[n % 100]} for n in range(count)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_sessions_are_each_in_one_bin_and_memory_is_flat(tmp_path):
    """Each is played once. The last nine hundred take no more memory than the first, and nothing is left behind."""
    rows, here = shaky(1000), psutil.Process()
    played(agents(tmp_path, rows[:100], seconds=5.0), concurrency=16)
    memory, descriptors, family = here.memory_info().rss, here.num_fds(), here.children(recursive=True)

    found = played(agents(tmp_path, rows, seconds=5.0), concurrency=16)

    assert len(found) == len(rows)
    outcome = Counter((one.task.data["bad"], one.status.value) for one in found.values())
    bad = Counter(row["bad"] for row in rows)
    assert outcome == {
        (kind, "failed" if kind in ("crash", "hang") else "completed"): count for kind, count in bad.items()
    }
    assert set(here.children(recursive=True)) <= set(family)
    assert here.num_fds() - descriptors < 50
    assert here.memory_info().rss - memory < 64 * 2**20
