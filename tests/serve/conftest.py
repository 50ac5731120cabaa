"""An endpoint in front of a scripted engine, and clients of it."""

import openai
import pytest

from perturn.serve import Endpoint, ServeSettings
from support.scripted import Scripted


@pytest.fixture(scope="module")
def engine():
    """Answers as the test of the moment wants it."""
    return Scripted()


@pytest.fixture(scope="module")
def endpoint(engine):
    """One endpoint for the tests of a module."""
    with Endpoint(engine, ServeSettings(heartbeat_seconds=0.2)) as found:
        yield found


@pytest.fixture(autouse=True)
def fresh(engine):
    """The engine as it is before a test."""
    if isinstance(engine, Scripted):
        engine.__init__()


@pytest.fixture
def client(endpoint):
    """Makes OpenAI's client for a session."""
    made = []

    def make(session=None, key=None, **settings):
        made.append(
            openai.OpenAI(
                base_url=endpoint.url(session), api_key=key or endpoint.key, max_retries=0, **settings
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.close()
