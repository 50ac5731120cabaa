"""The folder in which an endpoint records, as other commands read it."""

import json

import httpx2 as httpx
import pytest
from typer.testing import CliRunner

from perturn.chat.template_variants import TEMPLATES
from perturn.cli import app
from perturn.errors import ConfigError, RunError
from perturn.run.served_policy import _served, begin_record, open_policy, recipe_of_record
from perturn.serve import Endpoint
from support.scripted import Scripted


@pytest.fixture
def folder(tmp_path):
    """Two episodes of one task, of which one is rewarded, and a session that was open when its endpoint was closed."""
    with Endpoint(Scripted(), record=tmp_path / "record") as endpoint:
        begin_record(tmp_path / "record", recipe_of_record(tmp_path / "record", "tiny-agent", []))
        for name, reward in (("one", 1.0), ("one", 0.0), ("two", None)):
            headers = {"Authorization": f"Bearer {endpoint.key}"}
            body = {"model": "p", "messages": [{"role": "user", "content": "Where?"}]}
            address = f"{endpoint.address}/s/{name}"
            httpx.post(f"{address}/v1/chat/completions", json=body, headers=headers).raise_for_status()
            if reward is not None:
                httpx.post(f"{address}/reward", json={"reward": reward}, headers=headers).raise_for_status()
    return tmp_path / "record"


def test_without_a_name_the_credit_is_the_one_of_its_recipe(folder):
    """Two episodes with rewards 1 and 0: their advantages are 1 and -1."""
    said = CliRunner().invoke(app, ["credit", str(folder), "--json"])

    found = json.loads(said.stdout)
    assert found["credit"] == {"name": "rloo"}
    assert found["iterations"][0]["counts"]["trained"] == 2
    assert (folder / found["iterations"][0]["file"]).is_file()


def test_a_folder_keeps_to_the_model_of_its_recipe(folder):
    recipe_of_record(folder, "tiny-agent", [])

    with pytest.raises(RunError, match="record in another folder"):
        recipe_of_record(folder, "gpt-4.1-mini", ["engine.name=api"])


def test_another_model_is_rejected_before_it_is_loaded(folder, monkeypatch):
    monkeypatch.setattr("perturn.run.served_policy.open_beside", lambda *_: 1 / 0)
    said = CliRunner().invoke(app, ["serve", "gpt-4.1-mini", "engine.name=api", "--record", str(folder)])

    assert "record in another folder" in str(said.exception)


def test_a_relative_model_folder_is_the_same_from_another_working_directory(tmp_path, monkeypatch):
    model, record = tmp_path / "work/model", tmp_path / "record"
    model.mkdir(parents=True)
    monkeypatch.chdir(model.parent)
    begin_record(record, recipe_of_record(record, "model", []))
    monkeypatch.chdir(tmp_path)

    assert recipe_of_record(record, "work/model", []).model.name == str(model)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("model.chat_template=qwen3-nothnk", "Did you mean 'qwen3-nothink'"),
        ("model.dtyp=float32", "Did you mean 'model.dtype'"),
        ("model.max_length=9", "serving a model reads no model.max_length; leave it out"),
        ("model=float32", "model must be a section of settings"),
    ],
)
def test_settings_of_a_served_model_are_read(word, says):
    with pytest.raises(ConfigError, match=says):
        open_policy("tiny-agent", [word])


def test_a_served_model_gets_its_chat_template():
    *_, dtype, template = _served("tiny-agent", ["model.chat_template=qwen3", "model.dtype=float32"])

    assert (dtype, template) == ("float32", TEMPLATES["qwen3"].text)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("evaluate.samples=2", "evaluate is not a section of a served model"),
        ("seed=1", "seed is not a section of a served model"),
        ("model.name=other", "serving a model reads no model.name; leave it out"),
    ],
)
def test_settings_that_serving_a_run_would_ignore_are_rejected(folder, word, says):
    with pytest.raises(ConfigError, match=says):
        _served(f"{folder}:base", [word])


def test_an_address_is_checked_before_the_model_is_loaded(tmp_path, monkeypatch):
    """A host without a key, and a port in use."""
    monkeypatch.delenv("PERTURN_API_KEY", raising=False)
    monkeypatch.setattr("perturn.run.served_policy.open_beside", lambda *_: 1 / 0)
    with Endpoint(Scripted()) as endpoint:
        busy = endpoint.address.rpartition(":")[2]
        said = [
            str(CliRunner().invoke(app, ["serve", "tiny-agent", *words]).exception)
            for words in (["--host", "0.0.0.0", "--port", "0"], ["--port", busy])
        ]

    assert "PERTURN_API_KEY is missing" in said[0]
    assert f"127.0.0.1:{busy} cannot be listened at" in said[1]
