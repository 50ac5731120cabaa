"""A misspelt bundled model is told before anything asks a network for it."""

import socket

import pytest

from perturn.chat.model_names import BUNDLED, load_config, load_tokenizer, resolve_model
from perturn.errors import ModelError


@pytest.fixture
def no_network(monkeypatch):
    """Whoever looks an address up fails."""

    def refuse(*_, **__):
        pytest.fail("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def misspelt(name):
    """Names that are meant for a bundled one: a letter gone, two swapped, other case and joints, only its beginning."""
    return [
        name[:-1],
        name[:-3] + name[-2] + name[-3] + name[-1],
        name.upper(),
        name.replace("-", "_"),
        name[:6],
    ]


@pytest.mark.parametrize(
    ("word", "meant"), [(word, name) for name in BUNDLED for word in misspelt(name) if word != name]
)
@pytest.mark.parametrize("load", [resolve_model, load_tokenizer, load_config])
def test_a_misspelt_bundled_model_is_told_at_once(load, word, meant, no_network, tmp_path, monkeypatch):
    """By whatever part of it is asked for."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ModelError, match=f"unknown model '{word}'. Did you mean '{meant}'?"):
        load(word)


@pytest.mark.parametrize(
    "name", ["gpt2", "distilgpt2", "me/smollm2-135", "bert-base-uncased", "HuggingFaceTB/SmolLM2-135M"]
)
def test_a_name_of_the_hub_is_left_as_it_is(name):
    """With an owner, or unlike any bundled name."""
    assert resolve_model(name) == name


def test_a_folder_is_taken_for_what_it_is(tmp_path, monkeypatch):
    """Even where its name is like that of a bundled model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135").mkdir()
    (tmp_path / "smollm2-135" / "config.json").write_text("{}")

    assert resolve_model("smollm2-135") == "smollm2-135"


def test_a_run_folder_names_its_policies(tmp_path):
    """A run holds several models, so none is taken for the user."""
    policy = tmp_path / "run" / "checkpoints" / "sft"
    policy.mkdir(parents=True)
    (policy / "config.json").write_text("{}")

    with pytest.raises(ModelError, match=f"has no config.json; give a policy of this run: {policy}"):
        resolve_model(str(tmp_path / "run"))
