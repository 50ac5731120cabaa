"""Recipes, words of the command line and chat templates that are not as they should be."""

import tracemalloc
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from fuzz.mutations import answers, fuzzed, mutated, scrambled
from perturn.cli import main
from perturn.config.parsing import to_yaml
from perturn.config.recipe import read_recipe
from perturn.errors import ConfigError
from perturn.watch import Watcher

NO_NUL = pytest.mark.skipif(
    Version(version("click")) < Version("8.5"), reason="this click fails on NUL, which no shell can pass"
)
RECIPES = Path(__file__).parents[2] / "recipes"
DEMO = (RECIPES / "scienceworld_tlm-dre_demo.yaml").read_text()
DATA = yaml.safe_load(DEMO)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
BOMBS = {
    "aliases": "a: &a [1, 1]\n" + "".join(f"{y}: &{y} [*{x}, *{x}]\n" for x, y in pairwise(LETTERS)),
    "merges": "a: &a {k: 1}\n" + "".join(f"{y}: &{y} {{<<: [*{x}, *{x}]}}\n" for x, y in pairwise(LETTERS)),
    "a recursive anchor": "&a [*a]",
    "a recursive mapping": "name: x\nmodel: &a\n  name: *a",
    "brackets": "name: " + "[" * 3000 + "]" * 3000,
    "open brackets": "name: " + "{a: " * 3000,
    "a date that cannot be": "name: 2001-99-99",
    "a time that cannot be": "name: 2001-01-01 99:99:99",
    "a long integer": "seed: " + "9" * 5000,
    "a long number in base 60": "seed: 1" + ":1" * 50_000,
    "a long number in base 16": "name: 0x" + "f" * 50_000,
    "an empty integer": "name: !!int ''",
    "an empty float": "name: !!float ''",
    "a date of another kind": "name: !!timestamp x",
    "a truth of another kind": "name: !!bool x",
    "half a surrogate pair": 'name: "\\ud800"',
    "a megabyte": "name: " + "x" * 1_000_000,
    "a long name": "name: " + "x" * 300,
    "a list as a key": "? [a]\n: b",
    "a NUL": 'name: "a\\0b"',
}  # fmt: skip


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_what_costs_time_or_memory_is_refused_before_it_does(tmp_path, text):
    """Ten megabytes at most, where an alias bomb of a kilobyte is a gigabyte."""
    file = tmp_path / "recipe.yaml"
    file.write_text(text)

    tracemalloc.start()
    with answers("recipe.yaml", "name", "seed"), pytest.raises(ConfigError):
        read_recipe(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30e6


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_a_watcher_says_which_file_is_no_yaml(tmp_path, text):
    """Of another version, with other keys: it is read; what is no YAML is one error."""
    (tmp_path / "recipe.yaml").write_text(text)

    with answers("recipe.yaml"):
        Watcher(tmp_path).look()


@pytest.mark.parametrize(
    "path",
    [
        "x" * 5000,
        "a/" * 3000 + "b",
        "~nosuchuser/r.yaml",
        pytest.param("a\0b", marks=NO_NUL),
        "\udcff" * 300,
        "",
        "/dev/null",
        "/proc/self/mem",
    ],
)
@pytest.mark.parametrize("command", ["run", "watch", "verify", "report", "inspect", "collect", "init"])
def test_a_path_that_cannot_be_is_one_line(monkeypatch, capsys, path, command):
    """Exit code 2 (or 1), and a sentence; no traceback."""
    more = {"inspect": ["--model", "smollm2-135m"], "init": ["--environment", "x", "--model", "m"]}.get(
        command, []
    )
    monkeypatch.setattr("sys.argv", ["perturn", command, path, *more])

    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 or (path, command) == ("/dev/null", "inspect")
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["model.chat_template", "output", "environment.data"])
@pytest.mark.parametrize("path", ["x" * 5000, "~nosuchuser/a", '"a\\0b"'])
def test_a_setting_that_is_no_path_is_named(tmp_path, setting, path):
    file = tmp_path / "recipe.yaml"
    file.write_text(DEMO)

    with answers(setting):
        read_recipe(file, [f"{setting}={path}"])


@fuzzed
@given(content=mutated(DATA) | scrambled(DEMO.encode()))
def test_recipes(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "recipe.yaml"
    file.write_bytes(content)

    with answers("recipe.yaml", *DATA, "key", "name"):
        recipe = read_recipe(file)
        file.write_text(to_yaml(recipe))
        assert read_recipe(file) == recipe


KEYS = ["align", "loss", "beta", "seed", "name", "model", "", "x" * 5000]


@fuzzed
@given(
    keys=st.lists(st.sampled_from(KEYS), max_size=30),
    value=scrambled(b"[1, {a: &x 2001-01-01}, *x]") | scrambled(b"1e3"),
)
def test_words_of_the_command_line(keys, value):
    word = f"{'.'.join(keys)}={value.decode('utf-8', 'surrogateescape')}"

    with answers("override", "recipe", "key", *DATA, *KEYS):
        read_recipe(RECIPES / "scienceworld_tlm-dre_demo.yaml", [word])
