"""The API engine against a real HTTP server on this machine that answers as it is told."""

import asyncio
import itertools
import json
import logging
import os
import signal
import socketserver
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from perturn.cli import main
from perturn.data.store import read_trajectories
from perturn.engines import ENGINES
from perturn.engines.api.engine import ApiEngine
from perturn.engines.api.settings import ApiSettings
from perturn.errors import BudgetError, ConfigError, EngineFailure, RunError
from perturn.settings.recipe import build, read_recipe
from perturn.types import Action, Prompt, Sampling, Status, Turn

ROOT = Path(__file__).parents[2]
KEY = "sk-planted-9f8e7d6c5b4a39281706"
SAMPLING = Sampling(temperature=0.5, max_new_tokens=20)


def completion(text="Thought: t\nAction: a", finish="stop", tokens=(10, 5), **message):
    """A 200 of the protocol."""
    return 200, {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "finish_reason": finish,
                "message": {"role": "assistant", "content": text, **message},
            }
        ],
        "usage": {
            "prompt_tokens": tokens[0],
            "completion_tokens": tokens[1],
            "total_tokens": sum(tokens),
        },
    }


def refusal(status, message="no", code=None, **headers):
    """An error of the protocol."""
    return status, {"error": {"message": message, "type": "t", "code": code}}, headers


@dataclass
class Server:
    """What the server was asked, and what it answers: `reply` is given the body and the number of the request."""

    url: str = ""
    reply: object = lambda body, number: completion()
    bodies: list = field(default_factory=list)
    headers: list = field(default_factory=list)
    times: list = field(default_factory=list)
    answered: int = 0
    busy: int = 0
    peak: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, headers, body):
        """Note a request; its number, from 0 on."""
        with self.lock:
            self.bodies.append(body)
            self.headers.append(headers)
            self.times.append(time.monotonic())
            self.busy += 1
            self.peak = max(self.peak, self.busy)
            return len(self.bodies) - 1


@pytest.fixture
def server():
    """A server of the chat-completions protocol on a free port."""
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            number = state.begin(self.headers, body)
            if self.path == "/v1/chat/completions":
                status, answer, *rest = state.reply(body, number)
            else:
                status, answer, *rest = refusal(404, f"no {self.path}")
            with state.lock:
                state.busy -= 1
                state.answered += status == 200
            data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            headers = {"Content-Type": "application/json"} | (rest[0] if rest else {})
            try:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), str(value))
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:  # the client did not wait
                self.close_connection = True

        def log_message(self, *_):
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

    with Quiet(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        state.url = f"http://127.0.0.1:{http.server_port}/v1"
        yield state
        http.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def key(monkeypatch):
    """The planted key."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def open_engine(server):
    """Make engines for the server; all are closed in the end."""
    made = []

    def make(stop=(), ledger=None, model="m", **settings):
        settings = {"base_url": server.url, "max_retries": 1} | settings
        made.append(ApiEngine(model, ApiSettings(**settings), stop=stop, ledger=ledger))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def user(text):
    return {"role": "user", "content": text}


def prompt(name="a", turns=(), heard="go", seed=0, tools=()):
    return Prompt(({"role": "system", "content": "Play."},), tuple(turns), (user(heard),), seed, name, tools)


def prompts(count):
    return [prompt(str(number), heard=f"go {number}", seed=number) for number in range(count)]


def heard(body):
    """The newest observation of a request."""
    return body["messages"][-1]["content"]


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
            "max_tokens": 20,
            "seed": 7,
            "stop": ["\nObservation:"],
        }
    ]
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_parameters_are_added_replaced_and_left_out(open_engine, server):
    """What models with other rules need; top_p is sent where it does something."""
    changes = {"max_tokens": None, "seed": None, "temperature": 1, "max_completion_tokens": 99}

    open_engine(request=changes, stop=["x"]).generate([prompt()], Sampling(top_p=0.9))
    open_engine(stop=["x"], ledger=None, **{}).generate([prompt()], Sampling())

    sent = {name: value for name, value in server.bodies[0].items() if name not in ("model", "messages")}
    assert sent == {"temperature": 1, "max_completion_tokens": 99, "top_p": 0.9, "stop": ["x"]}
    assert "top_p" not in server.bodies[1]


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

    def reply(body, number):
        time.sleep(0.2)
        return completion()

    server.reply = reply

    open_engine(concurrency=3).generate(prompts(10), SAMPLING)

    assert server.peak == 3
    assert len(server.bodies) == 10


def test_no_prompts_are_no_requests(open_engine, server):
    """An empty batch asks nothing."""
    assert open_engine().generate([], SAMPLING) == []
    assert server.bodies == []


def test_a_busy_server_is_asked_again_when_it_says(open_engine, server):
    """Retry-After is a second; the client's own first wait would be half of that at most."""
    server.reply = lambda body, number: completion() if number else refusal(429, Retry_After=1)

    found = open_engine().generate([prompt()], SAMPLING)

    assert isinstance(found[0], Action)
    assert 1 <= server.times[1] - server.times[0] < 5


def test_a_broken_server_is_asked_again_with_a_growing_and_jittered_wait(open_engine, server):
    """Half a second and a second, each less up to a quarter of itself; plus what a busy machine adds."""
    server.reply = lambda body, number: completion() if number == 2 else refusal(500)

    found = open_engine(max_retries=2).generate([prompt()], SAMPLING)

    assert isinstance(found[0], Action)
    first, second = (b - a for a, b in itertools.pairwise(server.times))
    assert first >= 0.375
    assert second >= 0.75


@pytest.mark.parametrize(
    "refused",
    [
        refusal(400, "This content was filtered.", "content_filter"),
        refusal(400, "The context has 9000 tokens.", "context_length_exceeded"),
        refusal(422, "strange"),
        completion("half of", "content_filter"),
        refusal(500, "broken"),
    ],
    ids=["filter", "length", "unprocessable", "filtered answer", "server error"],
)
def test_what_is_wrong_with_one_prompt_is_its_failure_alone(open_engine, server, refused):
    """The other three are answered."""
    server.reply = lambda body, number: refused if heard(body) == "go 1" else completion()

    found = open_engine(max_retries=0).generate(prompts(4), SAMPLING)

    assert [type(one) for one in found] == [Action, EngineFailure, Action, Action]
    assert str(found[1]).startswith("m@127.0.0.1 ") or "content filter" in str(found[1])


def test_a_server_that_hangs_on_one_prompt_fails_that_prompt(open_engine, server):
    """The wait ends at the timeout."""
    released = threading.Event()

    def reply(body, number):
        if heard(body) == "go 1":
            released.wait(20)
        return completion()

    server.reply = reply
    start = time.monotonic()

    found = open_engine(timeout=1, max_retries=0).generate(prompts(3), SAMPLING)
    took = time.monotonic() - start
    released.set()

    assert [type(one) for one in found] == [Action, EngineFailure, Action]
    assert "timed out" in str(found[1])
    assert 1 <= took < 10


@pytest.mark.parametrize(
    ("refused", "error", "says"),
    [
        (refusal(401, f"Incorrect API key provided: {KEY}."), ConfigError, "variable OPENAI_API_KEY"),
        (refusal(403, f"{KEY} may not"), ConfigError, "refuses the key (403"),
        (
            refusal(404, "no such model"),
            ConfigError,
            "has no model 'm' (404: no such model); check model.name",
        ),
        (refusal(400, "max_tokens", "unsupported_parameter"), ConfigError, "engine.request"),
        (refusal(429, "pay", "insufficient_quota", x_should_retry="false"), RunError, "no credit left"),
        (refusal(429, "slow down"), RunError, "set engine.requests_per_minute or lower engine.concurrency"),
    ],
    ids=["key", "forbidden", "model", "parameter", "quota", "rate"],
)
def test_what_is_wrong_with_all_prompts_ends_the_run_in_one_line(open_engine, server, refused, error, says):
    """One line that says what to do, without the key, though the server echoes it."""
    server.reply = lambda body, number: refused

    with pytest.raises(error) as caught:
        open_engine(max_retries=0, concurrency=2).generate(prompts(9), SAMPLING)

    assert says in str(caught.value)
    assert KEY not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(server.bodies) <= 2


def test_a_long_error_is_cut_after_the_key_is_taken_out(open_engine, server):
    """The key lies across the place where the text is cut."""
    server.reply = lambda body, number: refusal(400, "x" * (300 - len(KEY) // 2) + KEY)

    found = open_engine().generate([prompt()], SAMPLING)

    assert KEY[:8] not in str(found[0])
    assert len(str(found[0])) < 400


def test_a_server_that_is_not_there_ends_the_run(open_engine):
    """Port 9 of this machine is closed; the episodes shall not count as failed."""
    engine = open_engine(base_url="http://127.0.0.1:9/v1", max_retries=0)

    with pytest.raises(RunError, match=r"cannot be reached .* check engine.base_url"):
        engine.generate([prompt()], SAMPLING)


@pytest.mark.parametrize(
    "answer",
    [
        refusal(503, "down"),
        (200, "<html>hello</html>", {"Content-Type": "text/html"}),
        (200, "{", {}),
        (200, {"error": {"message": "wrapped"}}),
    ],
    ids=["5xx", "a page", "half an answer", "another object"],
)
def test_a_server_that_answers_nobody_ends_the_run(open_engine, server, answer):
    """Two prompts in a row may be at fault themselves, the third shows that the server is."""
    server.reply = lambda body, number: answer
    engine = open_engine(max_retries=0)

    found = [engine.generate([one], SAMPLING)[0] for one in prompts(2)]

    assert [type(one) for one in found] == [EngineFailure, EngineFailure]
    with pytest.raises(RunError, match="left 3 prompts in a row without an answer"):
        engine.generate([prompt("c")], SAMPLING)


def test_prompts_without_answer_are_counted_in_a_row(open_engine, server):
    """Every second prompt fails for ever: the server is well."""
    server.reply = lambda body, number: completion() if number % 2 else refusal(500)
    engine = open_engine(max_retries=0)

    found = [engine.generate([one], SAMPLING)[0] for one in prompts(8)]

    assert [type(one) for one in found] == [EngineFailure, Action] * 4


def test_the_rate_limit_counts_retries_too(open_engine, server):
    """300 a minute is one each 0.2 s: three prompts, the first of which is sent twice, are 0.6 s and not 0.4."""
    server.reply = lambda body, number: completion() if number else refusal(429, retry_after_ms=1)

    open_engine(requests_per_minute=300).generate(prompts(3), SAMPLING)

    assert len(server.times) == 4
    assert server.times[-1] - server.times[0] > 0.5


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


@pytest.fixture
def interrupts():
    """SIGINT raises KeyboardInterrupt, also in a run that was started in the background, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
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

    assert took < 5


def test_the_token_budget_stops_and_a_higher_one_goes_on(open_engine, server, tmp_path):
    """15 tokens a request: of a budget of 40 the third request takes the rest, and what it cost is remembered."""
    ledger = tmp_path / "api.jsonl"
    first = open_engine(ledger=ledger, max_tokens_total=40, concurrency=1)
    with pytest.raises(
        BudgetError, match=r"spent: 45 of engine.max_tokens_total=40 after 3 requests.*_total=90\."
    ):
        first.generate(prompts(5), SAMPLING)
    first.close()

    again = open_engine(ledger=ledger, max_tokens_total=40)
    with pytest.raises(BudgetError):
        again.generate(prompts(5), SAMPLING)
    again.close()
    found = open_engine(ledger=ledger, max_tokens_total=80).generate(prompts(5), SAMPLING)

    assert len(found) == 5
    assert sorted(map(heard, server.bodies)) == [f"go {number}" for number in range(5)]


def test_the_budget_in_money_is_tokens_times_prices(open_engine, server):
    """10 prompt tokens at 2 and 5 of the answer at 8 a million are 60e-6 a request, so 0.00012 is two of them."""
    engine = open_engine(max_cost=0.00012, prompt_price=2, completion_price=8, concurrency=1)

    with pytest.raises(
        BudgetError, match=r"spent: 0.00012 of engine.max_cost=0.00012 after 2 .*engine.max_cost=0.00024"
    ):
        engine.generate(prompts(4), SAMPLING)

    assert len(server.bodies) == 2


def test_requests_under_way_when_the_budget_ends_are_counted_and_kept(open_engine, server, tmp_path):
    """Three at once are sent before the first has cost anything; all three are paid for."""
    ledger = tmp_path / "api.jsonl"

    def reply(body, number):
        time.sleep(0.3)
        return completion()

    server.reply = reply

    with pytest.raises(BudgetError, match=r"spent: 45 of .*=1 after 3 requests"):
        open_engine(ledger=ledger, max_tokens_total=1, concurrency=3).generate(prompts(9), SAMPLING)

    assert len(ledger.read_text().splitlines()) == len(server.bodies) == 3


def test_a_budget_needs_a_server_that_says_what_an_answer_cost(open_engine, server):
    """Without a budget its answers are taken."""
    status, body = completion()
    del body["usage"]
    server.reply = lambda *_: (status, body)

    assert isinstance(open_engine().generate([prompt()], SAMPLING)[0], Action)
    with pytest.raises(RunError, match="no budget can be kept"):
        open_engine(max_tokens_total=100).generate([prompt()], SAMPLING)


def test_another_sample_of_the_same_task_is_asked_anew(open_engine, server, tmp_path):
    """Only the same prompt of the same conversation with the same seed is known, even where no seed is sent."""
    engine = open_engine(ledger=tmp_path / "api.jsonl", request={"seed": None})

    for name, seed in [("a", 1), ("b", 1), ("a", 2), ("a", 1)]:
        engine.generate([prompt(name, seed=seed)], SAMPLING)

    assert len(server.bodies) == 3


def test_a_ledger_that_a_kill_cut_short_is_read_to_its_last_whole_line(open_engine, server, tmp_path):
    """The torn line is dropped, and what comes after it is whole again."""
    ledger = tmp_path / "api.jsonl"
    engine = open_engine(ledger=ledger)
    engine.generate(prompts(2), SAMPLING)
    engine.close()
    ledger.write_bytes(ledger.read_bytes()[:-7])

    for _ in range(2):
        engine = open_engine(ledger=ledger)
        engine.generate(prompts(2), SAMPLING)
        engine.close()

    assert len(server.bodies) == 3
    assert len([json.loads(line) for line in ledger.read_text().splitlines()]) == 2


def test_a_ledger_that_is_damaged_or_in_use_is_refused(open_engine, tmp_path):
    """Money is not guessed at, nor counted by two at once."""
    ledger = tmp_path / "api.jsonl"
    open_engine(ledger=ledger)
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text('{"request": 1}\n')

    with pytest.raises(RunError, match="in use: another process"):
        open_engine(ledger=ledger)
    with pytest.raises(RunError, match=r"damaged.jsonl:1: request: expected a valid string"):
        open_engine(ledger=damaged)
    with pytest.raises(RunError, match="cannot be written: Is a directory"):
        open_engine(ledger=tmp_path)


def test_an_engine_that_is_closed_says_so(open_engine):
    """Closing twice is no mistake."""
    engine = open_engine()
    engine.close()
    engine.close()

    with pytest.raises(RunError, match="is closed"):
        engine.generate([prompt()], SAMPLING)


@pytest.mark.parametrize(
    ("settings", "begins"),
    [
        ({"concurrency": 0}, "engine.concurrency must be >= 1, got 0."),
        ({"max_retries": -1}, "engine.max_retries must be >= 0, got -1."),
        ({"timeout": 0}, "engine.timeout must be > 0, got 0.0."),
        ({"requests_per_minute": 0}, "engine.requests_per_minute must be > 0, got 0.0."),
        ({"max_tokens_total": 0}, "engine.max_tokens_total must be >= 1, got 0."),
        ({"max_cost": 1}, "engine.max_cost needs prices; set prompt_price and completion_price"),
        ({"api_key_env": KEY}, "engine.api_key_env must be the name of an environment variable"),
        ({"base_url": f"https://u:{KEY}@h/v1"}, "engine.base_url must be like https://host/v1, without user"),
        ({"base_url": "host/v1"}, "engine.base_url must be like https://host/v1"),
        ({"request": {"messages": []}}, "engine.request cannot set messages"),
        ({"tiemout": 1}, "unknown key 'engine.tiemout'. Did you mean 'engine.timeout'?"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(settings, begins):
    """Through the table, as a recipe is; a key is never shown."""
    with pytest.raises(ConfigError) as caught:
        build(ENGINES, {"name": "api", **settings}, "engine")

    assert str(caught.value).startswith(begins)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("value", [None, "", "  "])
def test_a_key_that_is_not_set_is_asked_for_by_name(monkeypatch, value):
    """Before any work."""
    monkeypatch.delenv("OPENAI_API_KEY")
    if value is not None:
        monkeypatch.setenv("OPENAI_API_KEY", value)

    with pytest.raises(
        ConfigError, match="environment variable OPENAI_API_KEY is not set; export the key of"
    ):
        ApiEngine("m", ApiSettings())


def test_a_key_that_no_header_can_hold_is_refused_unseen(monkeypatch):
    """The transport would quote it in its error."""
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\n{KEY}")

    with pytest.raises(ConfigError, match="holds no key") as caught:
        ApiEngine("m", ApiSettings())

    assert KEY not in str(caught.value)


def test_a_server_without_keys_needs_none(open_engine, server, monkeypatch):
    """And a placeholder for one, being no secret, is not taken out of texts."""
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    server.reply = lambda *_: completion("The box is EMPTY")

    found = [open_engine().generate([prompt()], SAMPLING)[0], None]
    monkeypatch.delenv("OPENAI_API_KEY")
    found[1] = open_engine(api_key_env=None).generate([prompt()], SAMPLING)[0]

    assert [one.text for one in found] == ["The box is EMPTY"] * 2
    assert server.headers[0]["Authorization"] == "Bearer EMPTY"


def test_the_client_library_is_optional(monkeypatch):
    """The message has the command."""
    monkeypatch.setattr("perturn.engines.protocol.find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r'pip install "perturn\[api\]"'):
        ApiSettings().check(lambda: None, "")


# Whole runs, through the command line.

RECIPE = """
name: one
output: {output}
model: {{name: teacher-1}}
engine: {{name: api, base_url: "{url}", max_retries: 1}}
environment: {{name: "{world}"}}
worlds: {{processes: 0}}
protocol: {{name: tiny, system: Guess., max_turns: 6}}
explore: {{tasks: {{split: test}}}}
evaluate: {{tasks: {{split: train}}, concurrency: 2}}
"""
WORLD = ROOT / "docs" / "examples" / "own_environment.py:GuessNumber"
TRAINED = "sft: {loss: {name: sft}}\nalign: {loss: {name: tlm-dre}}\n"


def bisect(body, number):
    """A policy that halves what is left of 1 to 12; it knows nothing but the conversation it is sent."""
    low, high = 1, 12
    for said, told in itertools.pairwise(body["messages"]):
        if said["role"] == "assistant":
            guess = int(said["content"].rpartition(" ")[2])
            low, high = (guess + 1, high) if told["content"] == "higher" else (low, guess - 1)
    return completion(f"Thought: between {low} and {high}\nAction: {(low + high) // 2}")


@pytest.fixture
def recipe(tmp_path, server):
    """A recipe that evaluates a model of the server."""
    server.reply = bisect
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.format(output=tmp_path / "runs", url=server.url, world=WORLD))
    return file


@pytest.fixture
def perturn(monkeypatch, capsys):
    """Call the command line in this process: (exit code, what it printed)."""

    def call(*words):
        monkeypatch.setattr("sys.argv", ["perturn", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
        printed = capsys.readouterr()
        return caught.value.code or 0, printed.out + printed.err

    return call


def played(file):
    """What was recorded, by key."""
    found = list(read_trajectories(file))
    assert len({one.key for one in found}) == len(found)
    return {one.key: one for one in found}


def test_evaluate_scores_the_servers_model(recipe, perturn, server, tmp_path):
    """No tokenizer and no weights: there is no model of that name here. Halving finds 1 to 8 in four guesses."""
    code, printed = perturn("evaluate", recipe)

    assert code == 0, printed
    found = played(tmp_path / "runs" / "one" / "evaluation" / "base.jsonl")
    assert len(found) == 8
    assert all(one.success and one.policy == "teacher-1@127.0.0.1" for one in found.values())
    assert max(len(one.turns) for one in found.values()) == 4
    assert {tuple(body["stop"]) for body in server.bodies} == {("\nObservation:",)}


def test_run_evaluates_and_reports_where_nothing_is_trained(recipe, perturn, tmp_path):
    """And explores nothing where no section asks for it, which would cost money."""
    code, printed = perturn("run", recipe, "explore=null", "pair=null")

    assert code == 0, printed
    assert "report.html" in printed.replace("\n", "")
    assert not (tmp_path / "runs" / "one" / "trajectories" / "explore.jsonl").exists()


def test_collect_records_the_server_as_teacher(recipe, perturn, tmp_path):
    """On the tasks of explore, besides the expert."""
    code, printed = perturn("collect", recipe)

    assert code == 0, printed
    found = played(tmp_path / "runs" / "one" / "trajectories" / "explore.jsonl")
    assert {one.task.split for one in found.values()} == {"test"}
    assert {one.policy for one in found.values()} == {"teacher-1@127.0.0.1"}


@pytest.mark.parametrize("command", ["train", "run"])
def test_training_a_servers_model_is_refused_before_work(recipe, perturn, server, tmp_path, command):
    """One line; no folder is made. Evaluating with the same recipe works."""
    recipe.write_text(recipe.read_text() + TRAINED)

    code, printed = perturn(command, recipe)

    assert code == 2
    assert "engine 'api' serves a model that cannot be trained here" in printed
    assert len(printed.splitlines()) == 1
    assert not (tmp_path / "runs").exists()
    assert server.bodies == []
    assert perturn("evaluate", recipe)[0] == 0


def test_a_recipe_for_training_becomes_a_baseline_by_overrides(perturn, server, tmp_path):
    """As `perturn evaluate RECIPE engine.name=api model.name=...` with a recipe that knows of no engine."""
    server.reply = bisect
    text = RECIPE.format(output=tmp_path / "runs", url="", world=WORLD) + TRAINED
    file = tmp_path / "trained.yaml"
    file.write_text("".join(line for line in text.splitlines(True) if not line.startswith("engine")))

    code, printed = perturn(
        "evaluate", file, "engine.name=api", f"engine.base_url={server.url}", "model.name=gpt-x"
    )

    assert code == 0, printed
    assert {body["model"] for body in server.bodies} == {"gpt-x"}


def test_a_spent_budget_stops_a_run_and_a_higher_one_goes_on(recipe, perturn, server, tmp_path):
    """The result is that of a run that nothing stopped: none doubled, none missing, and no answer bought twice."""
    assert perturn("evaluate", recipe, "name=whole")[0] == 0
    whole = server.answered
    stops = 0
    for limit in itertools.count(60, 60):
        code, printed = perturn("evaluate", recipe, f"engine.max_tokens_total={limit}")
        if code == 0:
            break
        stops += 1
        assert code == 2
        error = next(line for line in printed.splitlines() if line.startswith("error: "))
        assert "the budget is spent: " in error
        assert f" of engine.max_tokens_total={limit} after " in error

    assert stops > 3
    assert server.answered == 2 * whole
    runs = tmp_path / "runs"
    found = [played(runs / name / "evaluation" / "base.jsonl") for name in ("whole", "one")]
    assert found[0] == found[1]
    assert len(found[0]) == 8


def test_limits_may_change_between_calls_but_the_server_may_not(recipe, perturn):
    """A run holds one policy's episodes."""
    assert perturn("evaluate", recipe)[0] == 0

    faster = perturn("evaluate", recipe, "engine.concurrency=2", "engine.requests_per_minute=1000")
    other = perturn("evaluate", recipe, "engine.base_url=http://elsewhere/v1")

    assert faster[0] == 0
    assert other[0] == 2
    assert "was made by another recipe: engine.base_url is" in other[1]


def test_a_run_that_the_server_stops_goes_on_later(recipe, perturn, server, tmp_path):
    """A refused key in the middle fails no episode: all that is recorded was played."""
    server.reply = lambda body, number: bisect(body, number) if number < 12 else refusal(401, f"bad {KEY}")
    code, printed = perturn("evaluate", recipe)
    assert code == 2
    assert "refuses the key (401: bad [API key])" in printed

    server.reply = bisect

    assert perturn("evaluate", recipe)[0] == 0
    found = played(tmp_path / "runs" / "one" / "evaluation" / "base.jsonl")
    assert [one.status for one in found.values()] == [Status.COMPLETED] * 8


def test_a_planted_key_is_written_nowhere(recipe, perturn, server, tmp_path, caplog, monkeypatch):
    """Not in a log down to DEBUG, a trajectory, a report or on the screen.

    The server does what it can to bring it there: it echoes the key in answers, in errors and in tool calls.
    """
    caplog.set_level(logging.DEBUG)

    def reply(body, number):
        echo = server.headers[number]["Authorization"]
        if number == 3:
            return refusal(400, f"bad request with {echo}")
        if number in (5, 6):
            return refusal(500, f"failed for {echo}")
        status, answer = bisect(body, number)
        message = answer["choices"][0]["message"]
        message["content"] = f"Thought: {echo} " + message["content"].removeprefix("Thought: ")
        message["tool_calls"] = [
            {"id": "x", "type": "function", "function": {"name": "f", "arguments": json.dumps({"k": echo})}}
        ]
        return status, answer

    server.reply = reply
    codes = [perturn("evaluate", recipe), perturn("report", tmp_path / "runs" / "one")]
    server.reply = lambda *_: refusal(403, f"no more for {KEY}")
    codes.append(perturn("evaluate", recipe, "name=two"))

    assert [code for code, _ in codes] == [0, 0, 2]
    assert KEY in server.headers[0]["Authorization"]
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"base.jsonl", "report.html", "api.jsonl", "manifest.json"} <= {path.name for path in written}
    assert "[API key]" in (tmp_path / "runs" / "one" / "evaluation" / "base.jsonl").read_text()
    assert "openai" in {record.name.split(".")[0] for record in caplog.records}
    assert [path for path in written if KEY.encode() in path.read_bytes()] == []
    assert KEY not in caplog.text
    assert not any(KEY in str(vars(record)) for record in caplog.records)
    assert not any(KEY in printed for _, printed in codes)


@pytest.mark.parametrize(
    "word",
    [
        f"engine.api_key={KEY}",
        "engine.api_key=letmein",
        f"engine.request.extra={KEY}",
        f"model.name={KEY}",
        f"environment.authorization=Bearer {KEY}",
    ],
)
def test_a_key_in_a_recipe_is_refused_by_the_name_of_its_place(recipe, perturn, tmp_path, word):
    """With what to do instead; neither shown nor written."""
    code, printed = perturn("evaluate", recipe, word)

    place, _, secret = word.partition("=")
    assert code == 2
    assert f"{place} holds what looks like a key" in printed
    assert "engine.api_key_env" in printed
    assert secret not in printed
    assert not (tmp_path / "runs").exists()


def test_a_key_of_any_form_is_refused_if_it_is_the_one_in_use(recipe, perturn, tmp_path, monkeypatch):
    """Compared with the environment, since not every key looks like one."""
    monkeypatch.setenv("OPENAI_API_KEY", "correct.horse.battery")

    code, printed = perturn("evaluate", recipe, "protocol.system=Use correct.horse.battery")

    assert code == 2
    assert "the recipe holds the key that is in OPENAI_API_KEY" in printed
    assert not (tmp_path / "runs").exists()


def test_the_shipped_baseline_can_be_run(server, tmp_path):
    """Its settings are those of the engine, and it trains nothing."""
    shipped = read_recipe(ROOT / "recipes" / "scienceworld_react_api.yaml")

    settings = build(ENGINES, shipped.engine, "engine")

    assert isinstance(settings, ApiSettings)
    assert shipped.protocol.format == "react"
    assert (shipped.sft, shipped.align) == (None, None)


def drip(chunks, pause=0.0, head=b"Content-Type: application/json"):
    """A server that answers each request with raw chunks; its address."""

    class Raw(socketserver.StreamRequestHandler):
        def handle(self):
            while self.rfile.readline().strip():
                pass
            try:
                self.wfile.write(b"HTTP/1.1 200 OK\r\n" + head + b"\r\nConnection: close\r\n\r\n")
                for chunk in chunks():
                    self.wfile.write(chunk)
                    self.wfile.flush()
                    time.sleep(pause)
            except OSError:  # the client has gone
                return

    return Raw


@pytest.fixture
def raw(open_engine):
    """Engines for servers that break the rules of HTTP's good manners."""
    running = []

    def make(handler, **settings):
        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler)
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        running.append(server)
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        return open_engine(base_url=url, max_retries=0, **settings)

    yield make
    for server in running:
        server.shutdown()
        server.server_close()


def test_an_answer_that_comes_byte_by_byte_ends_at_the_timeout(raw):
    """A byte each 0.2 s for 30 s; no single read takes as long as the limit of 1 s."""
    engine = raw(drip(lambda: itertools.repeat(b" ", 150), pause=0.2), timeout=1)
    start = time.monotonic()

    found = engine.generate([prompt()], SAMPLING)

    assert "timed out" in str(found[0])
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("head", "says"),
    [(b"X: y", "longer than 16777216 bytes"), (b"Content-Encoding: gzip", "it is packed")],
)
def test_an_answer_without_end_is_not_read_to_its_end(raw, head, says):
    """Of a gigabyte 16 MiB are read, once; what is packed is not unpacked."""
    sent = itertools.count()
    engine = raw(drip(lambda: (bytes(1 << 20) for _ in range(1024) if next(sent) >= 0), head=head))

    found = engine.generate([prompt()], SAMPLING)

    assert says in str(found[0])
    assert next(sent) < 64


WRONG = [-1, float("nan"), "x", [[]], {"a": {}}]
PLACES = [
    (),
    ("choices",),
    ("choices", 0),
    ("choices", 0, "message"),
    ("choices", 0, "message", "content"),
    ("choices", 0, "message", "tool_calls"),
    ("choices", 0, "message", "tool_calls", 0),
    ("choices", 0, "message", "tool_calls", 0, "function"),
    ("choices", 0, "message", "tool_calls", 0, "function", "name"),
    ("choices", 0, "message", "tool_calls", 0, "function", "arguments"),
    ("choices", 0, "message", "refusal"),
    ("choices", 0, "finish_reason"),
    ("usage",),
    ("usage", "prompt_tokens"),
    ("usage", "completion_tokens"),
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)) or "all")
def test_a_value_of_another_type_is_one_failure_that_names_it(open_engine, server, place):
    """At each place of an answer: an action, or one failure; never a traceback of another kind."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = completion(tool_calls=[call], refusal=None)[1]
    for wrong in (*map(json.dumps, WRONG), "[" * 900 + "]" * 900, "9" * 5000):
        answer = json.dumps(put(body, place, "@")).replace('"@"', wrong)
        server.reply = lambda body, number, answer=answer: (200, answer)

        found = open_engine(max_retries=0).generate([prompt()], SAMPLING)

        assert isinstance(found[0], Action) or "answer" in str(found[0])


def put(data, place, value):
    """The data with another value at a place."""
    if not place:
        return value
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[place[0]] = put(copy[place[0]], place[1:], value)
    return copy


@pytest.mark.parametrize("wrong", [float("nan"), -5, "12", 1e999, 1.5, True, None, 10**30])
@pytest.mark.parametrize("count", ["prompt_tokens", "completion_tokens"])
def test_a_cost_that_cannot_be_keeps_no_budget(open_engine, server, tmp_path, count, wrong):
    """With a budget the run ends, since none could be kept; what was spent before is not forgotten."""
    replies = [completion(), (200, put(completion()[1], ("usage", count), wrong))]
    server.reply = lambda body, number: replies[number]
    ledger = tmp_path / "api.jsonl"
    engine = open_engine(ledger=ledger, max_cost=1, prompt_price=1, completion_price=1)
    first, second = prompts(2)
    engine.generate([first], SAMPLING)

    with pytest.raises(RunError, match="no budget can be kept"):
        engine.generate([second], SAMPLING)
    assert sum(json.loads(line)["prompt_tokens"] for line in ledger.read_text().splitlines()) == 10
