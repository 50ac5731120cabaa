"""A server of the chat-completions protocol on this machine, and engines that ask it."""

import pytest

from engines.api.chat import KEY, Server
from engines.serving import serve
from perturn.engines.api.engine import ApiEngine
from perturn.engines.api.settings import ApiSettings


@pytest.fixture
def server():
    """A server of the chat-completions protocol on a free port."""
    state = Server()
    with serve(state.answer) as address:
        state.url = f"{address}/v1"
        yield state


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
