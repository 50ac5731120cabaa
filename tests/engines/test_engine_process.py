"""An engine in a process of its own, behind an endpoint."""

import os
import signal
import time
from contextlib import ExitStack, contextmanager
from functools import partial

import openai
import pytest

from perturn.engines import engine_process
from perturn.engines.engine_process import EngineProcess
from perturn.episodes.engine_abilities import EngineAbilities
from perturn.errors import ConfigError, EngineFailure, RunError
from perturn.serve import Endpoint
from perturn.types import Action, Task

pytestmark = pytest.mark.slow  # each starts Python


class Recalling:
    """Says how many turns each prompt holds, or raises, or ends its process."""

    name = "recalling"
    abilities = EngineAbilities(decode=lambda ids: "".join(map(chr, ids)))

    def generate(self, prompts, sampling):
        """Return the observations of all turns and of the newest one."""
        return [self.answer(prompt) for prompt in prompts]

    def answer(self, prompt):
        """Return an answer that depends on the whole prompt."""
        newest = prompt.observation[0]["content"]
        if newest == "end":
            os.kill(os.getpid(), signal.SIGKILL)
        if newest == "hang":
            hang()
        if newest == "raise":
            raise ValueError("no")
        if newest == "fail":
            return EngineFailure("not this one")
        heard = [turn.observation[0]["content"] for turn in prompt.turns] + [newest]
        text = "|".join(heard)
        return Action(text, token_ids=tuple(map(ord, text)), logprobs=(-1.0,) * len(text), ended=True)

    def forget(self, conversation):
        """Keep nothing."""

    def close(self):
        """Hold nothing."""


class Unforgetting(Recalling):
    """Fails to forget."""

    def forget(self, conversation):
        """Fail."""
        raise RuntimeError("nothing to forget")


def hang():
    """Close the pipe, with all other files, and never end."""
    os.closerange(3, 100)
    while True:
        time.sleep(60)


def refuse():
    """Open no engine."""
    raise ConfigError("no such engine")


def say(client, texts):
    """Answers to texts of one conversation."""
    messages, said = [], []
    for text in texts:
        messages.append({"role": "user", "content": text})
        said.append(client.chat.completions.create(model="p", messages=messages, logprobs=True).choices[0])
        messages.append({"role": "assistant", "content": said[-1].message.content})
    return said


@pytest.fixture
def client_of():
    """Makes a function from a session to OpenAI's client, in front of an engine in a process."""

    @contextmanager
    def serve(engine):
        process = EngineProcess(engine)
        try:
            with Endpoint(process) as endpoint, ExitStack() as clients:

                def client(session):
                    made = openai.OpenAI(base_url=endpoint.url(session), api_key=endpoint.key, max_retries=0)
                    return clients.enter_context(made)

                yield client
        finally:
            process.close()

    return serve


def test_prompts_reach_the_process_whole(client_of):
    """Each answer holds all observations, though only new turns cross; texts of tokens cross too."""
    with client_of(Recalling) as client:
        said = say(client("one"), ["a", "b", "c"])
        again = say(client("one"), ["a", "x"])  # another sequence of the session

        assert [each.message.content for each in said] == ["a", "a|b", "a|b|c"]
        assert again[-1].message.content == "a|x"
        assert [each.token for each in said[1].logprobs.content] == ["a", "|", "b"]


def test_failures_cross(client_of):
    """An engine that raises fails the request alone."""
    with client_of(Recalling) as client:
        for text, message in (("raise", "ValueError: no"), ("fail", "not this one")):
            with pytest.raises(Exception, match=message):
                say(client("failing"), [text])
        assert say(client("failing"), ["a"])[0].message.content == "a"


def test_a_failing_forget_does_not_end_the_process(client_of):
    """The end of a session forgets its conversations; the next session is answered."""
    with client_of(Unforgetting) as client:
        for name in ("one", "two"):
            assert say(client(name), ["a"])[0].message.content == "a"
            client(name).with_options(base_url=str(client(name).base_url).removesuffix("v1/")).post(
                "/reward", body={"reward": 1.0}, cast_to=object
            )


def test_a_killed_process_fails_requests(client_of):
    """The request that kills it and all later ones say how it ended."""
    with client_of(Recalling) as client:
        for text in ("end", "a"):
            with pytest.raises(Exception, match="was killed by SIGKILL"):
                say(client("killed"), [text])


def test_a_process_that_closes_its_pipe_and_hangs_is_killed(client_of, monkeypatch):
    """Its request fails, and so does the opening of an engine that hangs; the endpoint answers meanwhile."""
    monkeypatch.setattr(engine_process, "_CLOSE_S", 0.5)
    with client_of(Recalling) as client:
        for text in ("hang", "a"):
            with pytest.raises(Exception, match=r"did not end in 0\.5 seconds, and was killed"):
                say(client("hanging"), [text])
        assert client("hanging").models.list().data[0].id == "recalling"
    with pytest.raises(RunError, match="and was killed"):
        EngineProcess(hang)


def test_an_engine_that_cannot_be_opened():
    """The error of the process is raised here."""
    with pytest.raises(ConfigError, match="no such engine"):
        EngineProcess(refuse)
    with pytest.raises(RunError, match="exit code 3"):
        EngineProcess(partial(os._exit, 3))


def test_several_endpoints_one_after_the_other(client_of):
    """The process outlives an endpoint."""
    process = EngineProcess(Recalling)
    try:
        for _ in range(2):
            with Endpoint(process) as endpoint:
                name = endpoint.new_session(Task("a"))
                assert endpoint.trajectory(name).policy == "recalling"
    finally:
        process.close()
