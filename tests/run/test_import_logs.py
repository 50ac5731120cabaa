"""Logs as rows of training: the same conversation from every format, and an account in which every entry has a bin."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from perturn import TurnConfig, TurnTrainer
from perturn.cli import app
from perturn.errors import ConfigError, DataError
from perturn.formats.logs.log_entries import Fields
from perturn.types import OPENS
from support.call_records import SAMPLES, SYSTEM, call, chat, said, user

ALIKE = [
    "langfuse_observations",
    "langfuse_trace",
    "langsmith_langchain",
    "langsmith_openai",
    "openinference",
]
ALIKE += ["otel_events", "otel_spans", "proxy_chat", "proxy", "stored"]


@pytest.mark.parametrize("name", ALIKE)
def test_each_format_gives_the_same_trajectory(name, bring):
    """A call of a tool, its result, and the answer; the older events of OpenTelemetry hold no schemas."""
    (file,) = SAMPLES.glob(f"{name}.*")
    account, (found,) = bring(file)

    first, last = found.turns
    assert found.prompt == (SYSTEM,)
    assert first.observation == (user("Weather in Paris?"),)
    asked = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    assert (first.action.text, first.action.tool_calls) == ("", (asked,))
    assert last.observation == ({"role": "tool", "name": "get_weather", "content": "rainy, 57F"},)
    assert (last.action.text, last.follows) == ("It rains in Paris.", None)
    if name != "otel_events":
        (schema,) = found.tools
        assert (schema["function"]["name"], found.policy) == ("get_weather", "gpt-4o")
        assert schema["function"]["parameters"]["required"] == ["city"]
    assert account.calls["turns"] == 2
    assert not account.calls.keys() - {"turns", "no_call"}


@pytest.mark.parametrize(("name", "text"), [("litellm", "It rains."), ("proxy_messages", "It rains.")])
@pytest.mark.parametrize("also", ["proxy_responses", "openinference_responses"])
def test_calls_of_other_apis_continue_each_other_too(name, also, text, bring):
    for each in (name, also):
        _, (found,) = bring(SAMPLES / f"{each}.jsonl")
        assert [turn.follows for turn in found.turns] == [None, None]
        assert found.turns[0].action.tool_calls[0]["function"]["name"] == "get_weather"
        assert found.turns[1].action.text == text


def test_keys_headers_and_ids_of_people_are_never_stored(bring, tmp_path):
    """The samples of proxies hold headers with a key, LiteLLM's a hash of one, Langfuse's an id of a user."""
    names = [file for file in SAMPLES.iterdir() if "secret" in file.read_text() or "ann" in file.read_text()]
    records = [
        *chat("ann@example.org", "a", user="ann@example.org", headers={"authorization": "Bearer sk-secret"})
    ]

    bring(*records)
    written = (tmp_path / "out.jsonl").read_text()
    for file in names:
        if file.name != "langfuse_scores.jsonl":
            bring(file)
            written += (tmp_path / "out.jsonl").read_text()

    assert len(names) > 3
    assert not any(word in written for word in ("secret", "authorization", "ann@", '"ann"', "api_key"))


def test_calls_without_a_session_are_grouped_by_the_prefix_rule(bring):
    """Two conversations that interleave, and one that begins anew."""
    one, two = chat(None, "a", "b", "c"), chat(None, "x", "y", task="other")
    again = call("a2", SYSTEM, user("find it"))
    mixed = [one[0], two[0], one[1], again, two[1], one[2]]

    _, found = bring(*mixed)

    texts = sorted([turn.action.text for turn in one.turns] for one in found)
    assert texts == [["a", "b", "c"], ["a2"], ["x", "y"]]
    assert sorted(one.key[1] for one in found) == [0, 0, 1]  # two samples of one task


def test_a_compacted_history_opens_another_sequence_of_the_episode(bring):
    records = chat("s", "a", "b")
    compacted = call("c", SYSTEM, user("so far: a, b"), session_id="s")
    goes_on = call("d", SYSTEM, user("so far: a, b"), said("c"), user("on"), session_id="s")

    account, (found,) = bring(*records, compacted, goes_on)

    assert [turn.follows for turn in found.turns] == [None, None, OPENS, None]
    assert found.turns[2].opening.prompt == (SYSTEM,)
    assert (account.sequences, account.broke.total()) == (2, 1)


def test_calls_are_sorted_by_their_time(bring):
    first, second = chat("s", "a", "b")
    account, (found,) = bring(
        second | {"time": "2026-01-01T10:00:01Z"}, first | {"time": "2026-01-01T10:00:00Z"}
    )

    assert [turn.action.text for turn in found.turns] == ["a", "b"]
    assert account.sequences == 1


@pytest.mark.parametrize("of", ["session_id", "trace_id"])
def test_a_score_of_a_call_is_the_reward_of_its_turn(of, bring):
    """One of a trace or session is the reward of its last call; the total is their sum."""
    first, second, third = (each | {"session_id": None, of: "s"} for each in chat("s", "a", "b", "c"))
    scores = [{of: "s", "feedback": "up"}, {"response_id": "r1", "feedback": 0.25}]
    first["response"]["id"] = "r1"

    account, (found,) = bring(first, second, third, *scores)

    assert [turn.reward for turn in found.turns] == [0.25, 0.0, 1.0]
    assert (found.total_reward, found.success) == (1.25, True)
    assert account.scores == {"used": 2, "unmatched": 0, "unreadable": 0, "other_names": 0}


def test_a_success_has_no_score_below_the_threshold(bring):
    records = [*chat("s", "a", rating=5), *chat("t", "a", rating=3)]

    _, found = bring(*records, success_at=4)

    assert {(one.total_reward, one.success) for one in found} == {(5.0, True), (3.0, False)}


def test_one_thumb_down_among_thumbs_up_is_a_failure(bring):
    records = chat("s", "a", "b", feedback="down")
    records[0]["feedback"] = "up"

    _, (found,) = bring(*records)

    assert (found.total_reward, found.success) == (1.0, False)


def test_several_scores_must_be_named(bring):
    records = [*chat("s", "a", scores={"tone": 1, "help": 0}), *chat("t", "a", scores={"tone": 0})]

    with pytest.raises(DataError, match=r"the log has the scores help, tone. Name one with --score"):
        bring(*records)
    with pytest.raises(DataError, match=r"no score of the log is named 'tome'. Did you mean 'tone'\?"):
        bring(*records, fields=Fields(score="tome"))
    account, found = bring(*records, fields=Fields(score="tone"))
    assert [one.total_reward for one in found] == [1.0, 0.0]
    assert account.scores == {"used": 2, "unmatched": 0, "unreadable": 0, "other_names": 1}


def test_episodes_without_a_score_are_left_out_or_kept(bring):
    records = [*chat("s", "a", feedback="up"), *chat("t", "a", "b")]

    account, found = bring(*records)
    assert (len(found), account.episodes, account.calls) == (
        1,
        {"success": 1, "unscored": 1},
        {"turns": 1, "unscored": 2},
    )
    account, found = bring(*records, keeps_unscored=True)
    assert (len(found), account.episodes) == (2, {"success": 1, "no_score": 1})
    with pytest.raises(
        ConfigError,
        match="--keep-unscored belongs to --rows trajectories; leave it out, since labelled need the label",
    ):
        bring(*records, keeps_unscored=True, form="labelled")


def test_labelled_rows_have_the_sign_of_the_outcome(bring):
    account, rows = bring(
        *chat("s", "a", "b", feedback="up"), *chat("t", "a", feedback="down"), form="labelled"
    )

    assert sorted(row.weight for row in rows) == [(-1.0,), (1.0, 1.0)]
    assert account.rows == 2


def test_pairs_are_of_one_task_and_the_rest_is_counted(bring):
    records = [*chat("s", "a", feedback="up"), *chat("t", "b", feedback="down")]
    records += chat("u", "c", task="other", feedback="up")

    account, (pair,) = bring(*records, form="pairs")

    assert (pair.chosen.turns[0].action.text, pair.rejected.turns[0].action.text) == ("a", "b")
    assert pair.chosen.task.id == pair.rejected.task.id
    assert +account.episodes == {"success": 1, "failure": 1, "unpaired": 1}
    assert +account.calls == {"turns": 2, "unpaired": 1}


def test_pairs_that_cannot_be_made_say_what_to_do(bring, tmp_path):
    records = [*chat("s", "a", feedback="up"), *chat("t", "b", feedback="up")]

    with pytest.raises(DataError, match=r"no two of the 2 episodes .* Name the field .* with --task"):
        bring(*records, form="pairs")
    with pytest.raises(DataError, match="the log has no score, and labelled rows need one"):
        bring(*chat("s", "a"), form="labelled")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_log_without_any_answer_says_what_its_entries_are(bring):
    failed = call("a", user("x")) | {"response": {"error": "overloaded"}}

    with pytest.raises(
        DataError, match=r"holds no call with an answer. Its entries: 2 no_answer. .*log.jsonl:1:"
    ):
        bring(failed, failed)


def test_a_request_continues_the_response_that_it_names(bring):
    """The second request holds a tool's result alone; the third names a response that the log does not hold."""
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "here"}]}
    result = {"type": "function_call_output", "call_id": "c1", "output": "a coin"}
    first = {
        "request": {"input": "Find it.", "instructions": "Be brief."},
        "response": {"id": "resp_1", "output": [call]},
    }
    second = {
        "request": {"input": [result], "previous_response_id": "resp_1", "instructions": "Be brief."},
        "response": {"id": "resp_2", "output": [text]},
    }
    lost = {
        "request": {"input": "And?", "previous_response_id": "resp_0"},
        "response": {"id": "resp_3", "output": [text]},
    }

    account, found = bring(first, second, lost)

    assert account.calls == {"turns": 2, "unsupported": 1}
    assert "resp_0" in next(iter(account.shown_faults()))
    (one,) = found
    assert [message["role"] for message in one.prompt] == ["system"]
    assert one.is_linear
    assert one.turns[1].observation == ({"role": "tool", "name": "look", "content": "a coin"},)
    assert one.turns[1].action.text == "here"


def test_a_response_that_names_itself_is_read_once(bring):
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "here"}]}
    record = {
        "request": {"input": "x", "previous_response_id": "r"},
        "response": {"id": "r", "output": [text]},
    }

    with pytest.raises(DataError, match="1 unsupported"):
        bring(record)


def test_a_call_that_is_there_twice_counts_once(bring):
    """Of two calls with one id and different contents, both count."""
    first = call("a", user("x"), id="r1")

    account, found = bring(first, first, call("b", user("y"), id="r1"))

    assert account.calls == {"turns": 2, "duplicate": 1}
    assert account.shared_ids == 1
    assert len(found) == 2


def test_what_needs_the_sampled_tokens_rejects_the_rows(bring, tiny_folder, tmp_path):
    bring(*chat("s", "a", feedback="up"), *chat("t", "b", feedback="down"), form="labelled")
    args = TurnConfig(output_dir=str(tmp_path / "run"), loss={"name": "ppo-clip"}, episodes=2, report_to=[])

    with pytest.raises(
        DataError, match=r"must hold the log-probability that each .* was sampled with, and holds none"
    ):
        TurnTrainer(str(tiny_folder), args, train_dataset=str(tmp_path / "out.jsonl")).train()


@pytest.fixture
def perturn(monkeypatch, tmp_path):
    """Call the command line in a folder with a log: (exit code, printed)."""
    monkeypatch.chdir(tmp_path)
    records = [*chat("s", "a", "b", feedback="up"), *chat("t", "c", feedback="down"), *chat("u", "d")]
    (tmp_path / "calls.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records) + "{ broken\n")

    def call(*words):
        result = CliRunner().invoke(app, ["import-logs", *words])
        return result.exit_code, result.output, result.exception

    return call


def test_the_command_prints_bins_that_sum_up(perturn, tmp_path):
    code, printed, _ = perturn("calls.jsonl", "--rows", "labelled")

    assert code == 0
    assert "requests: 5 entries = 3 turns + 1 of episodes without a score + 1 broken" in printed
    assert "3 episodes = 1 of episodes without a score + 1 successes + 1 failures" in printed
    assert "calls-labelled.jsonl: 2 labelled" in printed
    assert len((tmp_path / "calls-labelled.jsonl").read_text().splitlines()) == 2


def test_the_command_prints_its_account_for_machines(perturn):
    code, printed, _ = perturn("calls.jsonl", "--json", "-o", "out/rows.jsonl")

    found = json.loads(printed.splitlines()[-1])
    assert (code, found["output"], found["rows"]) == (0, "out/rows.jsonl", 2)
    assert sum(found["calls"].values()) == found["entries"] == 5
    assert found["faults"][0].startswith("broken: ")


def test_the_command_does_not_write_over_its_log(perturn):
    _, _, error = perturn("calls.jsonl", "--output", "calls.jsonl")

    assert isinstance(error, ConfigError)
    assert "--output must be another file than the logs, got 'calls.jsonl'" in str(error)


def test_the_policy_names_every_model_of_the_episode(bring):
    first, second = chat("s", "a", "b")
    first["request"]["model"], second["request"]["model"] = "small", "large"

    _, (found,) = bring(first, second)

    assert found.policy == "small + large"
    assert replace(found, policy="") == replace(bring(first, second)[1][0], policy="")


def test_a_field_that_no_record_has_is_an_error(bring):
    records = [*chat("s", "a", feedback="up", kind="x"), *chat("t", "a", feedback="down")]

    for option, fields in (("--task", Fields(task="kinds")), ("--session", Fields(session="kinds"))):
        with pytest.raises(DataError, match=rf"{option}: no call or rollout .* at 'kinds'"):
            bring(*records, fields=fields)
    account, _ = bring(*records, fields=Fields(task="kind"))
    assert account.lacking == {"--task": len(records) // 2}


def test_a_score_that_is_no_number_is_counted(bring):
    records = [*chat("s", "a", feedback="up"), *chat("t", "a", feedback="4 of 5")]

    account, _ = bring(*records, fields=Fields(score="feedback"))

    assert account.scores == {"used": 1, "unmatched": 0, "unreadable": 1, "other_names": 0}
    assert account.episodes == {"success": 1, "unscored": 1}
    said = "feedback: expected a number, true, false, or thumbs such as up, got '4 of 5'"
    assert said in str(account.faults)
    with pytest.raises(DataError, match=f"1 values are no scores. .*{said}"):
        bring(*records[1:], fields=Fields(score="feedback"))


def test_a_conversation_without_a_reward_is_told_how_it_is_read(bring):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]

    with pytest.raises(DataError, match=r"no response; for a whole conversation, set --format conversations"):
        bring({"messages": messages})


def test_scores_of_calls_without_an_answer_and_of_records_that_come_again_count(bring):
    """A failure by a timeout is a failure of its session; feedback may be logged with the call a second time."""
    answered, again = chat("s", "a", id="r1"), chat("t", "a", id="r2")
    lost = {**answered[0], "response": {"error": "timeout"}, "reward": 0}
    feedback = {"id": "fb-1", "response_id": "r2", "reward": 1}

    account, found = bring(*answered, lost, *again, feedback)
    assert sorted(one.total_reward for one in found) == [0.0, 1.0]
    assert account.scores["used"] == 2
    account, found = bring(*answered, {**answered[0], "reward": 1})
    assert [one.total_reward for one in found] == [1.0]
    assert account.calls["duplicate"] == 1
