"""Requests and answers of the API engine: the conversation, the decoding, tool calls, many at once."""

import asyncio
import os
import signal
import threading
import time

import openai
import pytest

from engines.api.chat import KEY, SAMPLING, completion, heard, prompt, prompts, user
from perturn.engines.api.engine import ApiEngine
from perturn.engines.api.settings import ApiSettings
from perturn.episodes.tool_calls import ToolAction, ToolCall, understand
from perturn.errors import RunError
from perturn.serve import Endpoint
from perturn.types import Action, Prompt, Sampling, Turn


def test_a_request_holds_the_conversation_and_the_decoding(open_engine, server):
    """System text, turns and observation as chat messages; seeds above 31 bits are folded."""
    turns = [Turn((user("hi"),), Action("Thought: t\nAction: look"))]

    open_engine(stop=["\nObservation:"]).generate([prompt(turns=turns, seed=2**31 + 7)], SAMPLING)

    assert server.bodies == [
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Play."},
                user("hi"),
                {"role": "assistant", "content": "Thought: t\nAction: look"},
                user("go"),
            ],
            "temperature": 0.5,
            "top_p": 1.0,
            "max_tokens": 20,
            "seed": 7,
            "stop": ["\nObservation:"],
        }
    ]
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_parameters_are_added_replaced_and_left_out(open_engine, server):
    """What models with other rules need; top_p is sent even if it is 1, since a server may have another default."""
    changes = {"max_tokens": None, "seed": None, "temperature": 1, "max_completion_tokens": 99}

    open_engine(request=changes, stop=["x"]).generate([prompt()], Sampling(top_p=0.9))
    open_engine(stop=["x"], ledger=None, **{}).generate([prompt()], Sampling())

    sent = {name: value for name, value in server.bodies[0].items() if name not in ("model", "messages")}
    assert sent == {"temperature": 1, "max_completion_tokens": 99, "top_p": 0.9, "stop": ["x"]}
    assert server.bodies[1]["top_p"] == 1.0


def test_a_model_without_a_temperature_gets_no_top_p_of_one(open_engine, server):
    """Models that think reject both. A top_p below 1 is sent, since the user asked for it."""
    for top_p in (1.0, 0.5):
        open_engine(request={"temperature": None}, ledger=None).generate([prompt()], Sampling(top_p=top_p))

    assert [body.get("top_p") for body in server.bodies] == [None, 0.5]


def test_the_stop_texts_of_the_settings_come_before_those_of_the_format(server):
    """An empty list sends none, for models that refuse them."""
    for own in (["END"], []):
        engine = ApiEngine("m", ApiSettings(base_url=server.url, stop=own), stop=["\nObservation:"])
        engine.generate([prompt()], SAMPLING)
        engine.close()

    assert [body.get("stop") for body in server.bodies] == [["END"], None]


@pytest.mark.parametrize(("finish", "ended"), [("stop", True), ("length", False), (None, True)])
def test_an_answer_becomes_an_action_as_text(open_engine, server, finish, ended):
    """No ids and no logprobs: the server gives none that we could train on."""
    server.reply = lambda body, number: completion("Thought: t\nAction: go", finish)

    found = open_engine().generate([prompt()], SAMPLING)

    assert found == [Action("Thought: t\nAction: go", token_ids=None, logprobs=None, ended=ended)]


def test_an_answer_without_content_is_what_was_said_instead(open_engine, server):
    """A refusal is text of the model; a thought that used up the limit leaves none."""
    server.reply = lambda body, number: [
        completion(None, refusal="I cannot."),
        completion(None, "length"),
    ][number]
    engine = open_engine()

    found = [engine.generate([one], SAMPLING)[0] for one in prompts(2)]

    assert found == [Action("I cannot."), Action("", ended=False)]


def test_answers_come_in_the_order_of_the_prompts(open_engine, server):
    """The first prompt is answered last."""

    def reply(body, number):
        place = int(heard(body).split()[1])
        time.sleep(0.03 * (6 - place))
        return completion(f"answer {place}")

    server.reply = reply

    found = open_engine().generate(prompts(6), SAMPLING)

    assert [action.text for action in found] == [f"answer {place}" for place in range(6)]


def test_requests_go_out_together_up_to_the_bound(open_engine, server):
    """Of ten prompts three are under way at a time, no more and no fewer."""
    together = threading.Barrier(3, timeout=60)

    def reply(body, number):
        if number < 3:
            together.wait()
        time.sleep(0.1)
        return completion()

    server.reply = reply

    open_engine(concurrency=3).generate(prompts(10), SAMPLING)

    assert server.peak == 3
    assert len(server.bodies) == 10


def test_no_prompts_are_no_requests(open_engine, server):
    """An empty batch asks nothing."""
    assert open_engine().generate([], SAMPLING) == []
    assert server.bodies == []


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_tool_calls_come_in_the_form_of_chat_templates(open_engine, server):
    """Arguments as an object; as text where they are no JSON object. They go back as the protocol has them."""
    calls = [
        {"id": "x", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}},
        {"id": "y", "type": "function", "function": {"name": "weather", "arguments": "{oops"}},
    ]
    server.reply = lambda body, number: completion(None, "tool_calls", tool_calls=calls)
    engine = open_engine()

    found = engine.generate([prompt(tools=(WEATHER,))], SAMPLING)[0]
    results = tuple({"role": "tool", "content": text} for text in ("wet", "what?"))
    later = Prompt((), (Turn((user("go"),), found),), results, 1, "a", (WEATHER,))
    engine.generate([later], SAMPLING)

    assert found.text == ""
    assert found.ended
    assert [call["function"]["arguments"] for call in found.tool_calls] == [{"city": "Köln"}, "{oops"]
    assert server.bodies[0]["tools"] == [WEATHER]
    assert server.bodies[1]["messages"][1]["tool_calls"] == calls
    assert [message["tool_call_id"] for message in server.bodies[1]["messages"][2:]] == ["x", "y"]


def test_arguments_of_a_server_under_another_key_are_not_lost(open_engine, server):
    """Nor is one of two equal keys: such a call stays text, which is no call."""
    functions = [
        {"name": "weather", "parameters": {"city": "Bonn"}},
        {"name": "weather", "arguments": '{"city": "Bonn", "city": "Köln"}'},
    ]
    calls = [{"id": "x", "type": "function", "function": function} for function in functions]
    server.reply = lambda body, number: completion(
        None, "tool_calls", tool_calls=[calls["late" in str(body["messages"])]]
    )
    engine = open_engine()

    found = engine.generate(
        [prompt("a", tools=(WEATHER,)), prompt("b", heard="late", tools=(WEATHER,))], SAMPLING
    )
    said = [understand(action)[1] for action in found]

    assert said == [ToolAction("", (ToolCall("weather", {"city": "Bonn"}),)), None]


def test_tool_calls_of_other_origin_are_given_ids(open_engine, server):
    """Those of a dataset have none, and some are bare."""
    calls = ({"name": "weather", "arguments": {"city": "Bonn"}},)
    turns = [Turn((user("go"),), Action("", tool_calls=calls))]
    later = Prompt((), tuple(turns), ({"role": "tool", "name": "weather", "content": "dry"},), 0, "a")

    open_engine().generate([later], SAMPLING)

    _, asked, told = server.bodies[0]["messages"]
    assert asked["tool_calls"] == [
        {
            "id": told["tool_call_id"],
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Bonn"}'},
        }
    ]


def test_it_works_where_an_event_loop_runs_already(open_engine):
    """As in a notebook."""
    engine = open_engine()

    async def cell():
        return engine.generate(prompts(2), SAMPLING)

    assert len(asyncio.run(cell())) == 2


def test_an_interrupt_does_not_wait_for_the_server(open_engine, server):
    """Ctrl-C while a request hangs."""
    released = threading.Event()

    def reply(body, number):
        os.kill(os.getpid(), signal.SIGINT)
        released.wait(20)
        return completion()

    server.reply = reply
    start = time.monotonic()

    with pytest.raises(KeyboardInterrupt):
        open_engine().generate([prompt()], SAMPLING)
    took = time.monotonic() - start
    released.set()

    assert took < 15


def test_an_engine_that_is_closed_says_so(open_engine):
    """Closing twice is no mistake."""
    engine = open_engine()
    engine.close()
    engine.close()

    with pytest.raises(RunError, match="is closed"):
        engine.generate([prompt()], SAMPLING)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_the_thought_of_an_answer_is_kept(server, open_engine, tmp_path, name):
    """As a field, in the ledger too, unless the settings drop it; it is not sent back."""
    server.reply = lambda body, number: completion("a", **{name: "It is dark."})
    first = open_engine(ledger=tmp_path / "ledger.jsonl")
    (answer,) = first.generate([prompt()], SAMPLING)
    first.close()
    second = open_engine(ledger=tmp_path / "ledger.jsonl")
    again = second.generate([prompt()], SAMPLING)
    second.close()
    third = open_engine(ledger=tmp_path / "ledger.jsonl", keep_thoughts=False)
    assert third.generate([prompt()], SAMPLING) == [Action("a")]
    open_engine().generate([prompt(turns=[Turn((user("hi"),), answer)])], SAMPLING)

    assert answer == Action("a", reasoning="It is dark.")
    assert again == [answer]
    assert {"role": "assistant", "content": "a"} in server.bodies[-1]["messages"]


def test_contents_in_parts_and_the_older_call_are_read(server, open_engine):
    """As some servers write them; a part that is no text is the failure of its prompt."""
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]
    older = {"name": "look", "arguments": '{"at": "door"}'}
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    replies = [completion(parts), completion("b", function_call=older), completion(image)]
    server.reply = lambda body, number: replies[number]
    engine = open_engine()
    said, called, failed = (engine.generate([prompt(seed=n)], SAMPLING)[0] for n in range(3))

    assert said == Action("a", reasoning="hm")
    look = {"type": "function", "function": {"name": "look", "arguments": {"at": "door"}}}
    assert called == Action("b", tool_calls=(look,))
    assert "expected a text part" in str(failed)


def test_tokens_of_a_prompt_and_its_answer_are_known_until_the_conversation_ends(open_engine, server):
    """An endpoint says them as usage."""
    engine = open_engine()
    abilities = engine.abilities
    with (
        Endpoint(engine) as endpoint,
        openai.OpenAI(base_url=endpoint.url("a"), api_key=endpoint.key) as client,
    ):
        said = client.chat.completions.create(model="p", messages=[{"role": "user", "content": "a"}])
        known = dict(abilities.prompt_tokens)
    counts = completion()[1]["usage"]

    assert said.usage.prompt_tokens == counts["prompt_tokens"]
    assert said.usage.completion_tokens == counts["completion_tokens"]
    assert list(known.values()) == [counts["prompt_tokens"]]
    assert (dict(abilities.prompt_tokens), dict(abilities.answer_tokens)) == ({}, {})


def test_tokens_of_an_answer_from_the_ledger_count_too(open_engine, server, tmp_path):
    """So a resumed episode has its limit of tokens where it had it before."""
    for _ in range(2):
        engine = open_engine(ledger=tmp_path / "api.jsonl")
        engine.generate([prompt()], SAMPLING)
        counts = completion()[1]["usage"]

        assert list(engine.abilities.prompt_tokens.values()) == [counts["prompt_tokens"]]
        assert list(engine.abilities.answer_tokens.values()) == [counts["completion_tokens"]]
        engine.close()
    assert len(server.bodies) == 1
