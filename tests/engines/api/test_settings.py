"""Settings of the API engine, and its key."""

from pathlib import Path

import pytest

from engines.api.chat import KEY, SAMPLING, completion, prompt
from perturn.config.parsing import build
from perturn.config.recipe import read_recipe
from perturn.engines import ENGINES
from perturn.engines.api.engine import ApiEngine
from perturn.engines.api.settings import ApiSettings
from perturn.errors import ConfigError

ROOT = Path(__file__).parents[3]


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
        ConfigError, match="OPENAI_API_KEY must hold a key, and is not set; export the key of"
    ):
        ApiEngine("m", ApiSettings())


def test_a_key_that_no_header_can_hold_is_refused_unseen(monkeypatch):
    """The transport would quote it in its error."""
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\n{KEY}")

    with pytest.raises(ConfigError, match="must hold a key, and does not") as caught:
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
    monkeypatch.setattr("perturn.table.find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r'pip install "perturn\[api\]"'):
        ApiSettings().check(lambda: None, "")


def test_the_shipped_baseline_can_be_run(server, tmp_path):
    """Its settings are those of the engine, and it trains nothing."""
    shipped = read_recipe(ROOT / "recipes" / "scienceworld_react_api.yaml")

    settings = build(ENGINES, shipped.engine, "engine")

    assert isinstance(settings, ApiSettings)
    assert shipped.protocol.format == "react"
    assert (shipped.sft, shipped.align) == (None, None)
