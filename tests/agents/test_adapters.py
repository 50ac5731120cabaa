"""Adapters and functions in an interpreter of their own; the real libraries are in `test_peers.py`."""

import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

from perturn.envs.agent.agent_adapters import ADAPTERS
from perturn.envs.agent.environment import Agent
from perturn.envs.load_environment import make_environment
from perturn.errors import ConfigError, DataError
from perturn.types import Status

from .playing import HERE, agents, played

STUB = str(HERE / "stub_adapter.py")


def adapted(**settings):
    """The section `environment` of the stub."""
    return {"name": "agent", "adapter": STUB, "python": sys.executable, "tasks": "train", **settings}


@pytest.fixture
def bare(tmp_path):
    """Another program that is an interpreter, and imports nothing from where this process does."""
    file = tmp_path / "python"
    file.write_text(f'#!/bin/sh\nPYTHONPATH= exec {sys.executable} "$@"\n')
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize("python", [None, "other"])
def test_an_adapter_lists_and_plays_tasks(python, bare):
    """In this interpreter or another, in which nothing of Perturn is imported; a crash fails its episode alone."""
    section = adapted(python=bare if python else None)

    alpha, beta = played(section).values()

    assert (alpha.task.id, alpha.error, alpha.total_reward) == ("train/alpha", None, 1.0)
    assert alpha.environment == "agent-stub_adapter"
    assert alpha.turns[0].observation_text == "alpha"
    assert beta.status is Status.FAILED
    assert "RuntimeError: a bug in the library" in beta.error


def test_sources_are_listed_for_each_split():
    world = make_environment(adapted(tasks={"train": "easy", "test": "hard"}))

    assert [task.id for task in world.tasks("train")] == ["easy/alpha", "easy/beta"]
    assert [(task.id, task.split) for task in world.tasks("test")] == [
        ("hard/alpha", "test"),
        ("hard/beta", "test"),
    ]
    with pytest.raises(ConfigError, match="no split 'dev'"):
        world.tasks("dev")


def test_an_adapter_that_cannot_list_says_so_in_a_line():
    with pytest.raises(ConfigError) as found:
        make_environment(adapted(tasks="broken")).tasks("train")

    assert str(found.value).endswith("ValueError: there is no such set of words")
    assert "\n" not in str(found.value)


def test_a_function_runs_in_another_interpreter(tmp_path, bare):
    """It is imported there before any work."""
    section = agents(tmp_path, [{"id": "a", "word": "alpha"}], function=f"{STUB}:rollout", python=bare)
    (one,) = played(section).values()

    assert (one.error, one.total_reward) == (None, 1.0)
    with pytest.raises(ConfigError, match="has no function 'gone'"):
        make_environment(section | {"function": f"{STUB}:gone"})


@pytest.mark.parametrize("name", sorted(ADAPTERS))
@pytest.mark.parametrize("found", [None, "0.1.0"], ids=["missing", "another version"])
def test_a_library_that_is_not_there_is_named(name, found, tmp_path, monkeypatch):
    """With the version that the adapter is for, before any work."""
    package = {"inspect": "inspect-ai"}.get(name, name)
    if found is None and package_is_here(package):
        pytest.skip(f"{package} is installed")
    if found is not None:
        (tmp_path / f"{package.replace('-', '_')}-{found}.dist-info").mkdir()
        (tmp_path / f"{package.replace('-', '_')}-{found}.dist-info/METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: {found}\n"
        )
    own = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", own)
    said = f"{package} is not installed; run: pip install" if found is None else f"{found} is installed"

    with pytest.raises(ConfigError, match=said) as raised:
        make_environment({**adapted(tasks="x"), "adapter": name}).tasks("train")

    assert "\n" not in str(raised.value)


def package_is_here(package):
    """Whether this environment has a package."""
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"adapter": "verifier"}, "neither an adapter nor a file. Did you mean 'verifiers'?"),
        ({"adapter": "gone_adapter.py"}, "neither an adapter nor a file"),
        (
            {"python": "venvs/gone/bin/python"},
            "program 'venvs/gone/bin/python' is missing, and environment.python names it",
        ),
        (
            {"function": f"{STUB}:rollout"},
            r"must have one of command, function and adapter, got \['function', 'adapter'\]",
        ),
        (
            {"adapter": None, "command": ["python", STUB]},
            "environment.python belongs to a function or an adapter; name the interpreter in command",
        ),
    ],
)
def test_wrong_settings_of_adapters_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        make_environment(adapted(**settings))


def test_what_an_adapter_reads_counts_as_input(tmp_path):
    """Its own file, and the files of its sources."""
    source = str(shutil.copy(STUB, tmp_path / "tasks.py"))

    read = Agent.traits.reads({"adapter": STUB, "tasks": {"train": f"{source}@easy", "test": "http://x#0:8"}})

    assert read == [source, STUB]


def test_tasks_in_the_home_folder_count_as_input(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    section = agents(tmp_path, [{"id": "a"}]) | {"tasks": "~/home.jsonl"}
    (tmp_path / "home.jsonl").write_text('{"id": "a"}\n')

    assert [task.id for task in make_environment(section).tasks("train")] == ["a"]
    assert str(tmp_path / "home.jsonl") in Agent.traits.reads(section)


@pytest.mark.parametrize("kind", ["function", "adapter"])
def test_a_missing_client_is_named_before_any_work(kind, tmp_path, monkeypatch):
    """It is OpenAI's, of this interpreter."""
    monkeypatch.setattr("perturn.table.find_spec", lambda name: None)
    what = {"function": f"{STUB}:rollout"} if kind == "function" else {"adapter": STUB}

    with pytest.raises(
        ConfigError, match=rf'environment\.{kind} needs openai; run: pip install "perturn\[api\]"'
    ):
        make_environment({"name": "agent", "tasks": "train", **what})


def test_an_adapter_that_lists_texts_is_told_what_a_row_is(tmp_path):
    (tmp_path / "texts.py").write_text(
        "def tasks(source):\n    return ['a']\n\n\nasync def rollout(task, client):\n    return 1.0\n"
    )

    with pytest.raises(DataError, match="row 1: expected an object, got 'a'"):
        make_environment(adapted(adapter=str(tmp_path / "texts.py"))).tasks("train")
