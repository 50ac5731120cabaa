"""Options of a request that the endpoint serves or rejects, and settings of the command."""

import threading
import time

import httpx2 as httpx
import pytest

from perturn.errors import ConfigError, PromptRejected
from perturn.serve import Endpoint, ServeSettings
from perturn.serve.protocols.messages import Messages
from perturn.serve.request_parser import read_conversation
from perturn.serve.settings import read_settings
from support.endpoint_calls import ASKED, ask, post, recorded, text
from support.scripted import Scripted, action

SCHEMA = {"type": "object", "properties": {}}
PATHS = {
    "/v1/chat/completions": {"messages": ASKED},
    "/v1/messages": {"messages": ASKED, "max_tokens": 5},
    "/v1/responses": {"input": "a"},
}


@pytest.mark.parametrize(
    ("path", "option", "neutral"),
    [
        ("/v1/chat/completions", {"guided_choice": ["a"]}, {"guided_choice": None}),
        ("/v1/chat/completions", {"structured_outputs": {"regex": "a"}}, {"min_tokens": 0}),
        ("/v1/chat/completions", {"ignore_eos": True}, {"ignore_eos": False}),
        ("/v1/chat/completions", {"stop_token_ids": [3]}, {"stop_token_ids": [], "length_penalty": 1.0}),
        ("/v1/chat/completions", {"continue_final_message": True}, {"continue_final_message": False}),
        ("/v1/chat/completions", {"add_generation_prompt": False}, {"add_generation_prompt": True}),
        ("/v1/chat/completions", {"allowed_token_ids": [3]}, {"allowed_token_ids": None}),
        ("/v1/chat/completions", {"use_beam_search": True}, {"use_beam_search": False, "typical_p": 1.0}),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, {}),
        ("/v1/messages", {"output_format": {"type": "poem"}}, {"output_config": {"effort": "low"}}),
        ("/v1/chat/completions", {"function_call": {"name": "f"}}, {"function_call": "auto"}),
        ("/v1/chat/completions", {"web_search_options": {}}, {"web_search_options": None}),
        ("/v1/messages", {"mcp_servers": [{"type": "url"}]}, {"mcp_servers": []}),
        ("/v1/messages", {"container": "c"}, {"context_management": {"edits": []}}),
        ("/v1/responses", {"truncation": "auto"}, {"truncation": "disabled"}),
        ("/v1/responses", {"background": True}, {"background": False}),
        ("/v1/responses", {"conversation": "conv_1"}, {"conversation": None}),
        ("/v1/responses", {"prompt": {"id": "pmpt_1"}}, {"text": {"format": {"type": "text"}}}),
        ("/v1/responses", {"max_tokens": 7}, {"max_output_tokens": 7}),
        ("/v1/responses", {"stop": ["X"]}, {"stop": []}),
        (
            "/v1/responses",
            {"response_format": {"type": "json_object"}},
            {"response_format": {"type": "text"}},
        ),
        ("/v1/messages", {"stop": ["X"]}, {"stop_sequences": ["X"]}),
        ("/v1/messages", {"n": 3, "seed": 1}, {"n": 1}),
        ("/v1/messages", {"chat_template_kwargs": {"tools": []}}, {"chat_template_kwargs": {}}),
        ("/v1/chat/completions", {"enable_thinking": False}, {"repeat_penalty": 1.0}),
        ("/v1/chat/completions", {"regex": "a+"}, {"regex": None}),
    ],
)
def test_an_option_that_would_change_the_answer_is_not_ignored(endpoint, path, option, neutral):
    body = {"model": "p", **PATHS[path]}

    assert post(endpoint, path, body | neutral).status_code == 200
    assert post(endpoint, path, body | option).status_code == 400


def test_the_refusal_of_enable_thinking_names_the_place_for_it(endpoint):
    assert "Pass it in chat_template_kwargs." in ask(endpoint, enable_thinking=False).text


@pytest.mark.parametrize("path", PATHS)
def test_template_variables_reach_the_policy(endpoint, engine, path):
    variables = {"enable_thinking": False}

    assert (
        post(endpoint, path, {"model": "p", "chat_template_kwargs": variables, **PATHS[path]}).status_code
        == 200
    )
    assert engine.asked[0].template_kwargs == variables


def test_sampling_of_the_endpoint_overrides_requests(tmp_path):
    """Without it, a request at temperature 0 makes its session useless for some losses, and is counted."""
    counts = []
    for number, own in enumerate(({}, {"temperature": 1.0, "top_p": 1.0})):
        with Endpoint(Scripted(), ServeSettings(**own), record=tmp_path / str(number)) as endpoint:
            for path in ("/s/a/v1/chat/completions", "/s/b/v1/chat/completions"):
                ask(endpoint, path, temperature=float("/b/" in path))
                post(endpoint, f"{path[:4]}/reward", {"reward": 1.0})
            counts.append(endpoint.counts().get("sharpened", 0))
        assert sum(each.sharpened for each in recorded(tmp_path / str(number))) == counts[-1]

    assert counts == [1, 0]


def test_without_tool_choice_calls_of_a_server_become_text(endpoint, engine):
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "bed"}}}
    engine.answer = lambda prompt: action("I look.", tool_calls=(call,))
    tools = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]

    (choice,) = ask(endpoint, tools=tools, tool_choice="none").json()["choices"]
    assert (choice["finish_reason"], choice["message"].get("tool_calls")) == ("stop", None)
    assert choice["message"]["content"].startswith('I look.\n[{"type": "function"')


def test_anthropics_schema_is_the_schema_of_chat_completions():
    body = (
        b'{"model": "p", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}], "output_config": '
    )
    found = Messages().read(body + b'{"format": {"type": "json_schema", "schema": {"type": "object"}}}}')

    schema = {"name": "answer", "schema": {"type": "object"}}
    assert found.response_format == {"type": "json_schema", "json_schema": schema}


@pytest.mark.parametrize(
    ("path", "method", "body", "says"),
    [
        ("/s/a/reward", "POST", {"rewrad": 1}, "Did you mean 'reward'?"),
        ("/s/a/reward", "POST", {}, "no reward, success or done"),
        ("/s/a/reward", "POST", {"response": "r"}, "no reward, success or done"),
        ("/s/a/reward", "POST", {"response": "r", "done": True}, "response names a turn"),
        ("/s/a/state", "PUT", {"state": "x", "stat": "y"}, "unknown key 'stat'"),
        ("/s/b", "PUT", {"sed": 3}, "Did you mean 'seed'?"),
    ],
)
def test_an_unknown_key_of_our_own_requests_is_an_error(endpoint, path, method, body, says):
    ask(endpoint, "/s/a/v1/chat/completions")
    found = post(endpoint, path, body, method)

    assert found.status_code == 400
    assert says in found.json()["error"]["message"]


def test_a_conversation_that_the_template_rejects_is_the_clients_fault(endpoint, engine):
    engine.answer = lambda prompt: PromptRejected("one system message, please")
    found = ask(endpoint)

    assert (found.status_code, found.json()["error"]["code"]) == (400, "prompt_rejected")


def test_a_stream_names_its_session(endpoint, engine):
    """At once, and after a heartbeat."""
    for slow in (False, True):
        until = time.monotonic() + 0.5 * slow
        engine.answer = lambda prompt, until=until: "ok" if time.monotonic() >= until else None
        body, key = {"model": "p", "messages": ASKED, "stream": True}, {"x-api-key": endpoint.key}
        with httpx.stream(
            "POST", f"{endpoint.url('streamed')}/chat/completions", json=body, headers=key
        ) as stream:
            assert stream.headers["x-perturn-session"] == "streamed"
            assert list(stream.iter_lines())


def test_at_the_turn_limit_answers_in_flight_are_kept(endpoint, tmp_path):
    held, engine = threading.Event(), Scripted()
    engine.answer = lambda prompt: "ok" if held.is_set() else None
    path, answers = "/s/both/v1/chat/completions", []
    with Endpoint(engine, ServeSettings(max_turns=1), record=tmp_path) as limited:
        asking = threading.Thread(target=lambda: answers.append(ask(limited, path)))
        asking.start()
        while not engine.asked:
            time.sleep(0.005)
        refused = ask(limited, path)
        held.set()
        asking.join()
        over = ask(limited, path)

    assert (refused.status_code, answers[0].status_code, over.status_code) == (429, 200, 409)
    (episode,) = recorded(tmp_path)
    assert (len(episode.turns), episode.truncated) == (1, True)


def test_turn_rewards_that_sum_to_1_solve_the_task(tmp_path):
    """0.25 and 0.75; with 0.5 more the total is above 1, and without the second it is below."""
    with Endpoint(Scripted(), record=tmp_path) as endpoint:
        for name, rewards in (("solved", (0.25, 0.75)), ("not", (0.25, 0.5))):
            for reward in rewards:
                response = ask(endpoint, f"/s/{name}/v1/chat/completions").json()["id"]
                post(endpoint, f"/s/{name}/reward", {"response": response, "reward": reward})
            post(endpoint, f"/s/{name}/reward", {"done": True})

    assert {each.task.id: each.success for each in recorded(tmp_path)} == {"solved": True, "not": False}


def test_all_choices_of_a_request_have_the_posted_state(endpoint):
    post(endpoint, "/s/choices/state", {"state": "hall"}, "PUT")
    ask(endpoint, "/s/choices/v1/chat/completions", n=2)

    assert [turn["state"] for turn in endpoint.summary("choices")["recorded"]] == ["hall", "hall"]


def test_a_session_shows_the_tool_calls_of_its_turns(endpoint, engine):
    engine.answer = lambda prompt: action("", tool_calls=({"name": "look", "arguments": {"at": "x"}},))
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    ask(endpoint, "/s/calls/v1/chat/completions", tools=[tool])

    (turn,) = endpoint.summary("calls")["recorded"]
    assert (turn["text"], turn["calls"]) == ("", [{"name": "look", "arguments": '{"at": "x"}'}])


def test_a_reward_and_a_state_are_activity(endpoint):
    response = ask(endpoint, "/s/active/v1/chat/completions").json()["id"]
    session = endpoint._sessions.known("active")
    for path, method, body in (
        ("reward", "POST", {"response": response, "reward": 0.5}),
        ("state", "PUT", {"state": "hall"}),
    ):
        before = session.touched = session.touched - 100
        assert post(endpoint, f"/s/active/{path}", body, method).status_code == 200
        assert session.touched > before


def test_a_call_with_broken_arguments_becomes_text(endpoint):
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": '}}
    said = [*ASKED, {"role": "assistant", "content": "I look.", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "c", "content": "not JSON"}

    found = read_conversation([*said, result])
    assert "tool_calls" not in found[1]
    assert found[1]["content"].startswith("I look.\n[")
    assert text(ask(endpoint, messages=[*said, result])) == "ok"


def test_overrides_of_the_section_serve_are_settings_of_the_endpoint():
    words = ["serve.max_new_tokens=2048", "engine.name=api", "serve.idle_seconds=3600"]
    settings, others = read_settings(words, "127.0.0.1", 8000)

    assert settings == ServeSettings(port=8000, max_new_tokens=2048, idle_seconds=3600.0)
    assert others == ["engine.name=api"]
    with pytest.raises(ConfigError, match="Did you mean"):
        read_settings(["serve.max_new_token=3"], "127.0.0.1", 8000)
    with pytest.raises(ConfigError, match="serve must be a section"):
        read_settings(["serve=3"], "127.0.0.1", 8000)


@pytest.mark.parametrize(
    ("path", "option", "key"),
    [
        ("/v1/chat/completions", {"response_format": {"type": "poem"}}, "response_format"),
        ("/v1/messages", {"output_format": {"type": "poem"}}, "output_format"),
        ("/v1/messages", {"output_config": {"format": {"type": "poem"}}}, "output_config.format"),
        ("/v1/responses", {"text": {"format": {"type": "poem"}}}, "text.format"),
    ],
)
def test_the_error_of_a_wrong_format_names_its_key(endpoint, path, option, key):
    found = post(endpoint, path, {"model": "p", **PATHS[path], **option})

    assert found.json()["error"]["message"].startswith(f"{key}.type: expected")


def test_calls_that_become_text_lose_their_ids():
    """A client may choose other ids in each request."""
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": '}}
    first, second = (
        read_conversation([*ASKED, {"role": "assistant", "content": "", "tool_calls": [{"id": id, **call}]}])
        for id in ("call_1", "call_2")
    )

    assert first == second
    assert "look" in first[1]["content"]


@pytest.mark.parametrize(
    ("turn", "whole", "solved"), [(0.75, 0.5, False), (-0.5, 1.0, True), (1.0, 0.0, False)]
)
def test_the_reward_of_the_episode_decides_on_success(tmp_path, turn, whole, solved):
    """The totals are 1.25, 0.5 and 1."""
    with Endpoint(Scripted(), record=tmp_path) as endpoint:
        response = ask(endpoint, "/s/a/v1/chat/completions").json()["id"]
        post(endpoint, "/s/a/reward", {"response": response, "reward": turn})
        post(endpoint, "/s/a/reward", {"reward": whole})

    (episode,) = recorded(tmp_path)
    assert (episode.total_reward, episode.success) == (turn + whole, solved)
