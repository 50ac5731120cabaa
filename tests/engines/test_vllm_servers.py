"""The vLLM engine with servers: real HTTP against stand-ins that know vLLM's endpoints and no model."""

import threading
import time
from contextlib import ExitStack, closing

import pytest

from engines.playing import Numbers
from engines.serving import serve
from engines.vllm_server import Server
from perturn.engines.engine_check import check_engine
from perturn.engines.vllm.engine import VllmEngine, check_vllm
from perturn.engines.vllm.settings import VllmSettings
from perturn.errors import ContextFull, EngineFailure, RunError
from perturn.policy.models import weights_digest
from perturn.run.execute import open_run
from perturn.run.served_policy import open_engine
from perturn.types import Action, Prompt, Sampling

SAMPLING = Sampling(temperature=0.7, top_p=0.9, max_new_tokens=20)


@pytest.fixture
def servers(monkeypatch):
    """Two stand-ins."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with ExitStack() as stack:
        yield [started(Server(), stack) for _ in range(2)]


def started(server, stack):
    """The stand-in, listening."""
    server.url = stack.enter_context(serve(server.answer))
    return server


class Words(Numbers):
    """One token a word of the observation."""

    end_ids = frozenset({2})

    def prompt_ids(self, prompt):
        """As many tokens as there are words, in the whole conversation."""
        told = [turn.observation_text for turn in prompt.turns] + [prompt.observation[0]["content"]]
        return [7] * len(" ".join(told).split())

    def action(self, ids, logprobs, tools=()):
        """The tokens."""
        return Action("a", tuple(ids), tuple(logprobs), ended=ids[-1] == 2)


@pytest.fixture
def make_engine(servers):
    """Make engines for the first server, or as many as `count` says; all are closed in the end."""
    with ExitStack() as stack:

        def make(count=1, name="sft@1a2b", model="served", **settings):
            addresses = [server.url for server in servers[:count]]
            settings = VllmSettings(servers=addresses, **{"max_retries": 0} | settings)
            engine = VllmEngine(model, Words(), settings, name=name)
            stack.callback(engine.close)
            return engine

        yield make


def prompt(name="a", text="one two three", seed=5, turns=()):
    return Prompt((), tuple(turns), ({"role": "user", "content": text},), seed, name)


def test_a_request_holds_the_tokens_and_the_whole_decoding(make_engine, servers):
    """What it does not say is vLLM's neutral default; the model's own ends and decoding are left aside."""
    make_engine().generate([prompt(seed=2**63 + 5)], SAMPLING)

    assert servers[0].generated() == [
        {
            "model": "served",
            "token_ids": [7, 7, 7],
            "sampling_params": {
                "temperature": 0.7,
                "top_p": 0.9,
                "max_tokens": 20,
                "seed": 5,
                "stop_token_ids": [2],
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
            },
        }
    ]


def test_answers_keep_their_tokens_and_come_in_order(make_engine):
    """The second prompt's seed draws 101 and lower log-probabilities."""
    engine = make_engine()
    found = engine.generate([prompt(seed=2), prompt("b", seed=1)], SAMPLING)

    assert found == [
        Action("a", (102, 200, 2), (-0.5, -0.5, -0.5)),
        Action("a", (101, 200, 2), (-1.5, -1.5, -1.5)),
    ]
    assert engine.reused_tokens == 10


def test_it_keeps_the_contract_of_engines(make_engine):
    """In batches and as a stream."""
    assert check_engine(make_engine(count=2)) == []


def test_a_conversation_stays_with_one_server_and_they_share_alike(make_engine, servers):
    """Six conversations of three turns on two servers; one that is forgotten makes room for a new one."""
    engine = make_engine(count=2)
    for turn in range(3):
        engine.generate(
            [prompt(str(number), text="w " * (10 * number + turn + 1)) for number in range(6)], SAMPLING
        )
    homes = [{len(body["token_ids"]) // 10 for body in server.generated()} for server in servers]
    engine.forget("3")
    engine.generate([prompt("new", text="w " * 90)], SAMPLING)

    assert homes == [{0, 2, 4}, {1, 3, 5}]
    assert len(servers[1].generated()) == 3 * 3 + 1


def test_prompts_are_answered_while_others_wait(make_engine, servers):
    """A stream: the second prompt is answered although the first one is not."""
    gate = threading.Event()
    slow = servers[0].inference_v1_generate
    servers[0].says["/inference/v1/generate"] = lambda body, number: (
        (gate.wait(30) and None) or (200, slow(body))
        if "model" in body and len(body["token_ids"]) == 1
        else None
    )
    engine, order = make_engine(), []
    engine.submit([prompt("slow", "x")], SAMPLING)
    engine.submit([prompt("quick", "x y")], SAMPLING)
    while len(order) < 2:
        order += [one.conversation for one, _ in engine.advance()]
        gate.set() if order else None

    assert order == ["quick", "slow"]


@pytest.mark.parametrize(("words", "room"), [(99, 1), (95, 5), (20, 20)])
def test_an_answer_has_the_room_that_the_context_leaves(make_engine, servers, words, room):
    """The server's context is 100 tokens."""
    make_engine().generate([prompt(text="w " * words)], SAMPLING)

    assert servers[0].generated()[0]["sampling_params"]["max_tokens"] == room


def test_a_context_in_which_positions_change_is_refused(servers):
    """Phi-3-128k's kind: with room for more than 64 tokens, vLLM takes the other factors for short sequences too."""
    settings = VllmSettings(servers=[servers[0].url], max_retries=0)

    with pytest.raises(
        RunError, match=r"^vLLM has a context of 100 tokens, but beyond 64 .* to 64 or less\.$"
    ):
        VllmEngine("served", Words(), settings, steady=64)
    with closing(VllmEngine("served", Words(), settings, steady=100)) as engine:
        assert isinstance(engine.generate([prompt()], SAMPLING)[0], Action)


def test_a_prompt_that_fills_the_context_fails_and_no_other(make_engine, servers):
    """It is not even sent."""
    found = make_engine().generate([prompt("b", text="w " * 100), prompt()], SAMPLING)

    assert isinstance(found[0], ContextFull)
    assert "100 tokens, which leaves no room" in str(found[0])
    assert isinstance(found[1], Action)
    assert len(servers[0].generated()) == 1


def test_a_prompt_that_the_server_refuses_fails_and_no_other(make_engine, servers):
    """Status 400 is about the prompt."""
    servers[0].says["/inference/v1/generate"] = lambda body, number: (
        (400, {"error": {"message": "bad token"}})
        if "model" in body and len(body["token_ids"]) == 1
        else None
    )
    found = make_engine().generate([prompt("b", "x"), prompt()], SAMPLING)

    assert isinstance(found[0], EngineFailure)
    assert "bad token" in str(found[0])
    assert isinstance(found[1], Action)


def test_a_busy_server_is_asked_again(make_engine, servers):
    """503 once."""
    servers[0].says["/inference/v1/generate"] = lambda body, number: (503, {}) if number == 2 else None

    assert isinstance(make_engine(max_retries=1).generate([prompt()], SAMPLING)[0], Action)


ENDED = {"choices": [{"finish_reason": "abort"}]}


@pytest.mark.parametrize(
    ("path", "said", "message"),
    [
        ("/inference/v1/generate", (500, {}), "The same command goes on"),
        ("/inference/v1/generate", (404, {}), "vLLM server of version 0.32"),
        ("/inference/v1/generate", (403, {}), "started with --enable-scale-out"),
        ("/inference/v1/generate", (200, ENDED), "ended an answer by 'abort'"),
        ("/weight_info", (404, {}), "VLLM_SERVER_DEV_MODE=1"),
        ("/collective_rpc", (500, {}), "the server must be able to read the folder"),
        ("/reset_prefix_cache", (200, {"success": False}), "give each run its servers"),
    ],
)
def test_what_concerns_all_prompts_ends_the_run(make_engine, servers, path, said, message):
    """Nothing is recorded as failed: the error names the server and what to do."""
    servers[0].says[path] = said

    with pytest.raises(RunError, match=message) as caught:
        make_engine().generate([prompt()], SAMPLING)

    assert servers[0].url in str(caught.value)


def test_a_server_that_is_not_there_is_named(make_engine):
    """Port 9 is nobody's."""
    with pytest.raises(RunError, match=r"http://127.0.0.1:9 does not answer /v1/models"):
        check_vllm(VllmSettings(servers=["http://127.0.0.1:9"], max_retries=0))


ASKS = {"/v1/models", "/weight_info", "/server_info", "/inference/v1/generate"}
"""What changes nothing."""


def reload_of(folder, method="reload_weights"):
    """The request that replaces the weights."""
    return "/collective_rpc", {"method": method, "kwargs": {"weights_path": str(folder)}}


def test_servers_are_given_the_weights_they_lack(make_engine, servers, tmp_path):
    """The second one has them already; the first one's label never names weights it does not have."""
    servers[1].version = "sft@1a2b"
    make_engine(count=2, model=str(tmp_path))
    asked = [each for each in servers[0].asked if each[0] not in ASKS]

    assert asked == [
        ("/resume", None),  # a killed run may have left it paused
        ("/update_weight_version", {"new_version": "loading"}),
        reload_of(tmp_path),
        ("/reset_prefix_cache", None),
        ("/update_weight_version", {"new_version": "sft@1a2b"}),
    ]
    assert set(servers[1].paths()) == ASKS | {"/resume"}


def test_servers_on_a_cpu_pack_their_output_layer_anew(make_engine, servers, tmp_path):
    """By a method that they get from us; vLLM's own leaves a tied output layer as it was."""
    servers[0].device = "cpu"
    make_engine(model=str(tmp_path))

    assert reload_of(tmp_path, "reload_weights_on_cpu") in servers[0].asked


def test_weights_are_updated_between_batches(make_engine, servers, tmp_path):
    """All servers take them, and the answers are the new policy's."""
    engine = make_engine(count=2)
    engine.generate([prompt()], SAMPLING)
    engine.update_weights(tmp_path, "online@3c4d")

    assert isinstance(engine.generate([prompt()], SAMPLING)[0], Action)
    assert engine.name == "online@3c4d"
    assert [server.version for server in servers] == ["online@3c4d"] * 2


def test_weights_are_not_updated_under_prompts(make_engine):
    """A submitted prompt has to be handed out first."""
    engine = make_engine()
    engine.submit([prompt()], SAMPLING)

    with pytest.raises(RunError, match="1 prompts are being answered"):
        engine.update_weights("x", "y")


def test_weights_are_swapped_in_the_middle_of_an_answer(make_engine, servers):
    """The server is paused meanwhile; each token of the answer says its version, also of the next answer."""
    engine, gate = make_engine(), threading.Event()
    old = {"version": "sft@1a2b", "start": 0, "end": 1}
    spans = [old, {"version": "online@3c4d", "start": 1, "end": 3}]

    def held(body, number):
        gate.wait(30)
        found = servers[0].inference_v1_generate(body)
        return 200, {"choices": [found["choices"][0] | {"weight_versions": spans}]}

    engine.version = 0
    servers[0].says["/inference/v1/generate"] = held
    engine.submit([prompt()], SAMPLING)
    while servers[0].paths()[-1] != "/inference/v1/generate":
        time.sleep(0.01)
    before = len(servers[0].asked)
    engine.swap_weights("/new", "online@3c4d", 1)
    gate.set()
    while not (answers := engine.advance()):
        pass
    del servers[0].says["/inference/v1/generate"]
    (later,) = engine.generate([prompt("b")], SAMPLING)

    assert servers[0].paths()[before : before + 7] == [
        "/pause?mode=keep",
        "/weight_info",
        "/update_weight_version",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/resume",
    ]
    assert [action.versions for _, action in answers] == [(0, 1, 1)]
    assert later.versions == (1, 1, 1)


def test_a_swap_that_fails_leaves_no_server_paused(make_engine, servers):
    """Neither does a killed one: the next command wakes the servers before it asks for an answer."""
    engine = make_engine()
    servers[0].says["/collective_rpc"] = (500, {"error": "no such folder"})
    with pytest.raises(RunError, match="answers /collective_rpc with 500"):
        engine.swap_weights("/nowhere", "online@3c4d", 1)

    paths = servers[0].paths()
    assert paths[-1] == "/resume"
    assert paths.index("/resume") < paths.index("/inference/v1/generate")


def test_a_server_that_names_no_weights_cannot_swap(make_engine, servers):
    """Its tokens would have no version."""
    engine = make_engine()
    engine.version = 0
    servers[0].says["/inference/v1/generate"] = lambda body, number: (
        200,
        {"choices": [servers[0].inference_v1_generate(body)["choices"][0] | {"weight_versions": None}]},
    )

    with pytest.raises(RunError, match="does not say which weights sampled an answer"):
        engine.generate([prompt()], SAMPLING)


def test_answers_of_other_weights_end_the_run(make_engine, servers):
    """A server that was restarted serves what it was started with."""
    engine = make_engine()
    servers[0].version = "default"

    with pytest.raises(RunError, match="by the weights default, not sft@1a2b: a server was restarted"):
        engine.generate([prompt()], SAMPLING)


def test_an_engine_that_is_closed_says_so(make_engine):
    """Closing twice is closing once."""
    engine = make_engine()
    engine.close()
    engine.close()

    with pytest.raises(RunError, match="engine sft@1a2b is closed"):
        engine.generate([prompt()], SAMPLING)


RECIPE = """
name: served
model: {{name: {folder}, dtype: float32}}
environment: {{name: "own_environment:GuessNumber"}}
protocol: {{name: guess, format: react, system: Guess., max_turns: 3}}
engine: {{name: vllm, servers: ["{address}"], max_retries: 0}}
sft: {{loss: {{name: sft}}, tasks: {{per_kind: 2}}}}
align: {{loss: {{name: tlm-dre}}}}
explore: {{tasks: {{per_kind: 2, skip: 2}}}}
output: {output}
"""


@pytest.fixture
def recipe(servers, tiny_folder, tmp_path, own_environment):
    """A recipe whose engine is the first server."""
    (file := tmp_path / "served.yaml").write_text(
        RECIPE.format(folder=tiny_folder, address=servers[0].url, output=tmp_path)
    )
    return file


def test_a_run_serves_its_policy_under_the_digest_of_its_weights(recipe, servers, tiny_model, tiny_folder):
    """The server is given the folder, and the name is the one the local engine would have."""
    run = open_run(recipe)
    with closing(open_engine(run, "base")) as engine:
        name = engine.name

    assert name == f"base@{weights_digest(tiny_model)[:12]}" == servers[0].version
    assert reload_of(tiny_folder) in servers[0].asked


def test_a_run_whose_server_cannot_take_weights_is_refused_before_it_starts(recipe, servers):
    """Not hours later, when there is a policy to serve; no folder is made."""
    servers[0].says["/weight_info"] = (404, {})

    with pytest.raises(RunError, match="VLLM_SERVER_DEV_MODE=1"):
        open_run(recipe)

    assert not (recipe.parent / "served").exists()
